"""Runs of plain modules: a batch with uneven weights, a program on any layout, and differences of two states."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxtrain.config import Config
from jaxtrain.core.placement import Placer
from jaxtrain.core.program import Program, build_program
from jaxtrain.core.resolve import resolve

ROWS = 16
ZERO_GRADIENT = (
    "attention/key/bias",
    "SelfAttention_0/key/bias",
)  # softmax does not see it, so that it holds rounding alone
# Name -> overrides. The loss is the module's own unless the overrides name one.
FUNCTION = "loss=nnx_modules:weighted_cross_entropy"
LINEN = "loss=linen_modules:weighted_cross_entropy"
MODULES: dict[str, tuple[str, ...]] = {
    "ConvNet": (FUNCTION,), "ResNet": (FUNCTION,), "NamedMLP": (FUNCTION,), "VisionTransformer": (FUNCTION,),
    "ScannedMLP": (FUNCTION,), "LSTM": (FUNCTION,), "BidirectionalGRU": (FUNCTION,), "Mixer": (FUNCTION,),
    "NormedConvNet": (FUNCTION,), "SpectralMLP": (FUNCTION,), "Buffered": (), "Ensemble": (FUNCTION,),
    "FrozenBackbone": (FUNCTION, "model.frozen=[backbone/.*]"),
    "LowRank": (FUNCTION, "model.frozen=[.*/base_module/.*]"),
    "GPT": (), "TiedLanguageModel": (), "VAE": ("optimizer.lr=1e-4",), "Contrastive": (), "Centered": (), "UNet": (),
    "MeanLoss": (),
    "LinenConvNet": (LINEN,), "LinenMLP": (LINEN,), "LinenTransformer": (LINEN,), "LinenLSTM": (LINEN,),
    "LinenScanned": (LINEN,), "LinenCollections": (LINEN,), "LinenCentered": (),
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, ...]] = {
    "ddp": ("layout=ddp",), "fsdp": ("layout=fsdp",), "zero1": ("layout=zero1",), "zero2": ("layout=zero2",),
    "zero3": ("layout=zero3",), "hsdp": ("layout=hsdp", "mesh.data=2", "mesh.fsdp=4"),
}  # fmt: skip


def batch(step: int, rows: Any = slice(None)) -> dict[str, np.ndarray]:
    """Images, labels, token ids and weights that differ much between rows."""
    rng = np.random.default_rng(step)
    whole = {
        "image": rng.normal(size=(ROWS, 4, 4, 3)).astype(np.float32),
        "label": rng.integers(0, 4, ROWS).astype(np.int32),
        "ids": rng.integers(0, 32, (ROWS, 9)).astype(np.int32),
        "weight": (rng.uniform(0.1, 3, ROWS) * (np.arange(ROWS) % 5 > 0)).astype(np.float32),
    }
    return {name: value[rows] for name, value in whole.items()}


def config(name: str, *overrides: str) -> Config:
    module = "linen_modules" if name.startswith("Linen") else "nnx_modules"
    base = {
        "model": {"type": f"{module}:{name}"}, "data": {"type": "conformance:Rows", "global_batch": ROWS},
        "precision": "fp32", "optimizer": {"name": "sgd", "lr": 0.05, "weight_decay": 0.0, "grad_clip_norm": None},
        "schedule": {"name": "constant"}, "log": {"sample_tokens": 0}, "steps": 20,
    }  # fmt: skip
    return resolve(None, *overrides, base=base)[0]


def program(name: str, *overrides: str, devices: int = 8) -> Program:
    return build_program(config(name, *overrides), None, jax.devices()[:devices], batch(0))


def train(built: Program, steps: int, state: Any = None, first: int = 0) -> tuple[Any, list[dict[str, float]]]:
    """Returns the last state and the metrics of every step."""
    place, metrics = Placer(batch, built.sharder, ROWS, False, None), []
    state = built.init() if state is None else state
    for step in range(first, first + steps):
        state, values = built.step(state, place(step))
        metrics.append({key: float(value) for key, value in values.items()})
    return state, metrics


def copied(state: Any, built: Program) -> Any:
    """Returns a copy of a state, placed as a program places its own."""
    return jax.tree.map(lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding), state, built.state)


def variables(state: Any) -> dict[str, np.ndarray]:
    kinds = {kind: state[kind] for kind in ("params", "frozen", "mutable") if kind in state}
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf, np.float64)
        for path, leaf in jax.tree_util.tree_leaves_with_path(kinds)
    }


def largest_difference(a: Any, b: Any) -> tuple[float, str]:
    """Largest difference of a tensor of two states, as a share of its norm in `a`, and the tensor's path."""
    first, second = variables(a), variables(b)
    assert first.keys() == second.keys()
    for path in [path for path in first if path.endswith(ZERO_GRADIENT)]:
        assert np.abs(first.pop(path) - second.pop(path)).max() < 1e-6
    return max(
        (float(np.linalg.norm(first[path] - second[path]) / max(np.linalg.norm(first[path]), 1e-3)), path)
        for path in first
    )


class Rows:
    """The batches as a user's own data class."""

    def __init__(self, split, seed, global_batch):
        self.first = 1000 * (split == "validation")

    def batch(self, step, rows=None):
        return batch(self.first + step, slice(None) if rows is None else rows)
