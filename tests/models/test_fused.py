"""Weights that are fused, as many checkpoints have them, by rules alone: the decoder's gradients and collectives."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.planning import compile
from jaxtrain.planning.hardware import targets
from jaxtrain.verification.packed_batch import packed_batch

H100 = "h100:1x8"
NO_COMPILER = targets.missing_packages(targets.parse(H100), "xla")
VOCAB = 256
SIZES = {"embed": 64, "layers": 2, "heads": 8, "kv_heads": 4, "mlp": 96}
LAYOUTS = {
    "tp": {"model": 4, "data": 2},
    "tp_sp": {"model": 4, "data": 2},
    "fsdp_tp": {"fsdp": 2, "model": 4},
    "fsdp": {"fsdp": 8},
    "zero2": {"data": 8},
}


def config(fused: bool, layout: str | None, sizes: dict, vocab: int, *keys: str) -> Config:
    mesh = LAYOUTS[layout] if layout else {"data": 1}
    own = {"type": "fused_model:Fused", "options": {**sizes, "vocab": vocab}} if fused else {**sizes, "vocab": vocab}
    changes = [f"model.{name}={value}" for name, value in own.items()]
    changes += [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    return resolve(None, f"layout={layout or 'ddp'}", *changes, *keys, paths=False)[0]


def gradients(fused: bool, layout: str | None, params: dict | None = None) -> tuple[dict, dict]:
    """Parameters (fresh ones by default) and their gradients."""
    keys = ("precision=fp32", "data.sequence=32", "data.global_batch=8", "data.validation_fraction=0")
    program = build_program(config(fused, layout, SIZES, VOCAB, *keys), VOCAB, jax.devices()[: 8 if layout else 1])
    held = program.init()["params"]
    if params is not None:
        held = jax.tree.map(lambda p, old: jax.device_put(np.asarray(p), old.sharding), params, held)
    grads = jax.jit(program.gradients)(held, packed_batch(0, 8, 32, VOCAB), jax.random.key(0)).grads
    return jax.device_get(held), jax.device_get(grads)


@pytest.fixture(scope="module")
def one() -> tuple[dict, dict]:
    return gradients(True, None)


def parted(tree: dict) -> dict:
    """A fused tree as the decoder's."""
    layers = {name: leaf for name, leaf in tree["layers"].items() if name.endswith("_norm")}
    qkv_LDKGH, gate_up_LDGF = tree["layers"]["qkv"], tree["layers"]["gate_up"]
    L, D, _, _, H = qkv_LDKGH.shape
    layers["attention"] = {
        "q": qkv_LDKGH[..., :-2, :].reshape(L, D, -1, H), "k": qkv_LDKGH[..., -2, :], "v": qkv_LDKGH[..., -1, :],
        "o": tree["layers"]["o"],
    }  # fmt: skip
    layers["mlp"] = {"gate": gate_up_LDGF[:, :, 0], "up": gate_up_LDGF[:, :, 1], "down": tree["layers"]["down"]}
    return {**tree, "layers": layers}


def close(got: dict, want: dict) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x), jax.tree_util.keystr(path)


def test_equals_the_decoder(one: tuple[dict, dict]):
    params, grads = one
    close(parted(grads), gradients(False, None, parted(params))[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_device(layout: str, one: tuple[dict, dict]):
    params, grads = one
    close(gradients(True, layout, params)[1], grads)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.parametrize("layout", ["tp_sp"])
def test_sends_what_the_decoder_sends(layout: str):
    """On absent H100s, where q, k and v share one gather and one reduction, fused or not."""
    sizes = {"embed": 512, "layers": 2, "heads": 8, "kv_heads": 4, "mlp": 1408}
    keys = (
        "data.sequence=512",
        "data.global_batch=16",
        "data.validation_fraction=0",
        "step.remat=full",
        "step.attention=xla",
    )

    def sent(fused: bool) -> dict:
        rows = compile.compile_report(config(fused, layout, sizes, 1024, *keys), 1024, H100).collectives
        out: dict = {}
        for row in rows:
            count, size = out.get((row.op, row.axes_text), (0, 0))
            out[row.op, row.axes_text] = count + row.count, size + row.bytes
        return {key: value for key, value in out.items() if value[1] > 2**16}

    fused, separate = sent(True), sent(False)
    assert {key: size for key, (_, size) in fused.items()} == pytest.approx(
        {key: size for key, (_, size) in separate.items()}, rel=0.01
    )
    assert all(fused[key][0] <= separate[key][0] for key in fused)
