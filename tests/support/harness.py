"""A tiny model, a packed batch and a run on any layout, for the tests of the step."""

from __future__ import annotations

import jax
import numpy as np

from jaxtrain.config.schema import Config
from jaxtrain.core.placement import Placer, row_order
from jaxtrain.core.program import Program, build_program
from jaxtrain.verification.packed_batch import packed_batch

RULES = {
    "batch": ["data", "fsdp"], "embed": "fsdp", "heads": "model", "kv_heads": "model", "mlp": "model",
    "vocab": "model", "sequence": "model",
}  # fmt: skip
MODEL = {
    "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64, "vocab": 256, "qk_norm": "per_head",
    "biases": ["qkv", "mlp"], "sliding_window": 24, "sliding_window_pattern": 2,
}  # fmt: skip
OTHERS = {  # options of other families: OLMo 2, Gemma 3, Granite
    "qk_norm": "full", "norm_placement": "post", "sliding_window_rope_theta": 100.0, "embed_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_divisor": 2.0,
}  # fmt: skip
ROWS, LENGTH = 8, 32


def config(**changes) -> Config:
    base = {
        "model": MODEL, "precision": "fp32", "steps": 100, "loss": {"z_loss": 1e-3},
        "data": {"sequence": LENGTH, "global_batch": ROWS},
        "optimizer": {"lr": 3e-3, "epsilon": 1e-4}, "schedule": {"name": "constant"},
    }  # fmt: skip
    return Config(**{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in (base | changes).items()})


def program(mesh: dict | None = None, rules: dict = RULES, **changes) -> Program:
    """On as many simulated devices as the mesh has places; without a mesh on one, unsharded."""
    cfg = config(mesh=mesh or {}, rules=rules if mesh else {}, **changes)
    count = int(np.prod(list((mesh or {}).values()) or [1]))
    return build_program(cfg, 256, jax.devices()[:count])


def batch(step: int) -> dict[str, np.ndarray]:
    """Packed documents of random lengths; one row is mostly padding, so that weights differ a lot between rows."""
    return packed_batch(step, ROWS, LENGTH, 250)


def placed(program: Program, step: int) -> dict[str, jax.Array]:
    """The batch as the loop puts it on the devices: rows in the order that the layout wants."""
    order = row_order(program.config.context_parallel, program.config.data.sequence, program.sharder)
    return Placer(lambda step, rows: batch(step), program.sharder, ROWS, True, order)(step)


def run(program: Program, steps: int) -> tuple[dict, dict[str, np.ndarray]]:
    """The last state and the metrics of every step."""
    state, rows = program.init(), []
    for step in range(steps):
        state, metrics = program.step(state, placed(program, step))
        rows.append(metrics)
    return state, {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def close_trees(a, b, tolerance: float) -> None:
    """Every tensor of `b` within `tolerance` of the norm of its own in `a`."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        scale = max(np.linalg.norm(x), 1e-6)
        assert np.linalg.norm(x - y) <= tolerance * scale, (jax.tree_util.keystr(path), np.linalg.norm(x - y) / scale)
