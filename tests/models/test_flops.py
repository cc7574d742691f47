"""Counted FLOPs against hand formulas, the decoder's own traced matmuls and XLA's cost analysis."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from remat import remat as saving

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.core.program import model_from_config
from jaxtrain.kernels.cross_entropy import recomputes
from jaxtrain.losses.terms import split_loss_output
from jaxtrain.models.flops import (
    Flops,
    attended,
    decoder_flops,
    layer_matmuls,
    layer_windows,
    recomputed,
    user_flops,
    utilization,
)
from jaxtrain.sharding.sharder import Sharder


def test_llama3_8b_by_hand():
    model = ModelConfig(embed=4096, layers=32, heads=32, kv_heads=8, head_dim=128, mlp=14336)
    weights = 32 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    attention = 32 * 2 * 2 * 4096 * (8192 + 1) / 2
    assert decoder_flops(model, 128256, 8192).model == pytest.approx(3 * (2 * weights + attention), rel=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, 16, 17])
def test_attended_counts_the_mask(window):
    query, key = np.arange(16)[:, None], np.arange(16)[None]
    mask = (key <= query) & (query - key < (window or 16))
    assert attended(16, window) == pytest.approx(mask.sum() / 16)


def test_windows_by_layer():
    assert layer_windows(ModelConfig(layers=7, sliding_window=4, sliding_window_pattern=3)) == [(5, 4), (2, None)]
    assert layer_windows(ModelConfig(layers=7, sliding_window=4)) == [(7, 4), (0, None)]
    far, near = ModelConfig(layers=4), ModelConfig(layers=4, sliding_window=8)
    assert decoder_flops(near, 64, 128).model < decoder_flops(far, 64, 128).model


def traced_dots(jaxpr) -> float:
    """2mnk of every dot_general of a jaxpr, those of scans times their length."""
    total = 0.0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[d] for d in contracted)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
            continue
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * traced_dots(inner)
    return total


def gradients(model: dict, remat="none", chunks=1, batch=2, sequence=32, vocab=96):
    """A jittable gradient function of the decoder on one device, its arguments, and its model section."""
    config = Config(
        precision="fp32", model=model, loss={"vocab_chunks": chunks}, step={**saving(remat), "attention": "reference"}
    )
    model_def = model_from_config(config, Sharder(), vocab)
    ints = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    inputs = {"tokens": ints, "targets": ints, "positions": ints, "segments": ints}
    inputs["weights"] = jax.ShapeDtypeStruct((batch, sequence), jnp.float32)

    def loss(params, batch):
        terms, _ = split_loss_output(model_def.bind(params).loss(batch, None), 1)
        return sum(total for total, _ in terms.values())

    return jax.grad(loss), (model_def.params, inputs), config.model


def hardware_flops(model: ModelConfig, remat, sequence: int, vocab: int) -> float:
    """Per token, with every key attended to: the reference attention multiplies masked scores too."""
    terms = layer_matmuls(model, sequence)
    head = 2 * model.embed * vocab
    again = head + model.layers * sum(terms[name] for name in recomputed(model, remat))
    return 3 * (head + model.layers * sum(terms.values())) + again


SMALL = {"embed": 32, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 48}
REMATS = ["none", "full", "dots", ("q", "k", "v"), ("attention", "residual"), ("gate", "up"), ("residual",)]


MOE = {
    "moe": {"num_experts": 4, "top_k": 2, "shared_experts": 1, "capacity_factor": 1.0},
    "mlp": 24,
}  # as many places as choices


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "variant", [{}, {"activation": "gelu", "qk_norm": "per_head"}, {"norm_placement": "sandwich"}, MOE], ids=str
)
@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_traced_matmuls(remat, variant):
    grad, args, model = gradients(SMALL | variant, remat, chunks=4, vocab=1024)
    traced = traced_dots(jax.make_jaxpr(grad)(*args).jaxpr) / 64
    want = hardware_flops(model, remat, 32, 1024)
    if isinstance(remat, tuple) and "attention" in remat:  # scores recomputed by a plain kernel are not counted
        want += model.layers * layer_matmuls(model, 32)["scores"]
    assert traced == pytest.approx(want, rel=1e-9)


def test_an_only_chunk_keeps_its_logits():
    grad, args, model = gradients(SMALL, vocab=96)
    traced = traced_dots(jax.make_jaxpr(grad)(*args).jaxpr) / 64
    assert traced == pytest.approx(hardware_flops(model, "none", 32, 96) - 2 * 32 * 96, rel=1e-9)
    assert [recomputes(96, 8), recomputes(512, 8), recomputes(1024, 1), recomputes(1024, 2)] == [0, 0, 0, 1]
    kept, again = (decoder_flops(model, 96, 32, recomputes_logits=again).hardware for again in (False, True))
    assert again - kept == 2 * 32 * 96


def test_xla_cost_analysis():
    """XLA also counts elementwise operations, so a little more.

    One layer and one chunk, since it counts the body of a loop once; the one chunk's logits it computes only once.
    """
    sizes = {"embed": 256, "layers": 1, "heads": 4, "mlp": 1024}
    grad, args, model = gradients(sizes, batch=2, sequence=128, vocab=512)
    counted = jax.jit(grad).lower(*args).compile().cost_analysis()["flops"] / 256
    assert 1.0 <= counted / (hardware_flops(model, "none", 128, 512) - 2 * 256 * 512) < 1.03


def test_experts_count_as_often_as_they_are_visited():
    dense, moe = ModelConfig(mlp=96), ModelConfig(moe={"num_experts": 64, "top_k": 4, "shared_experts": 2}, mlp=16)
    router = 2 * 256 * 64
    assert sum(layer_matmuls(moe, 8).values()) == sum(layer_matmuls(dense, 8).values()) + router
    again = {remat: recomputed(moe, remat) - recomputed(dense, remat) for remat in ("none", "dots", "full")}
    assert again["none"] == {"experts_gate", "experts_up"}
    assert again["dots"] == again["none"] | {"experts_down"}
    assert again["full"] == again["dots"] | {"router"}


def test_hardware_flops_order():
    model = ModelConfig()
    least, dots, full = (decoder_flops(model, 512, 1024, remat).hardware for remat in ("none", "dots", "full"))
    assert decoder_flops(model, 512, 1024).model < least < dots < full


def test_user_models_are_never_guessed():
    class Silent:
        pass

    class Counting:
        def flops(self, shapes):
            return 6.0 * math.prod(shapes["x"])

    assert user_flops(Silent(), {"x": (4, 10)}, 4) is None
    assert user_flops(Counting(), {"x": (4, 10)}, 4) == Flops(60.0, None, "as counted by the model")


def test_utilization():
    assert utilization(6e9, 1e4, 100e12) == pytest.approx(0.6)
    assert utilization(None, 1e4, 1e12) is None
    assert utilization(6e9, 1e4, None) is None
