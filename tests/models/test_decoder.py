"""The decoder against a NumPy float64 decoder, over the options of every family it covers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpy_decoder
import pytest
from remat import remat as saving

from jaxtrain.config.schema import Config
from jaxtrain.core.program import model_from_config
from jaxtrain.sharding.sharder import Sharder

TINY = {"embed": 32, "layers": 3, "heads": 4, "mlp": 48, "vocab": 67, "init_std": 0.2}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 16}
FAMILIES = {
    "llama2": {},
    "llama3": {"kv_heads": 2, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    "linear_rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"kv_heads": 2, "sliding_window": 5},
    "qwen2": {"kv_heads": 1, "biases": ["qkv"], "tie_embeddings": True},
    "qwen3": {"kv_heads": 2, "head_dim": 12, "qk_norm": "per_head"},
    "gemma2": {
        "kv_heads": 2, "head_dim": 16, "activation": "geglu", "norm": "gemma_rmsnorm", "norm_placement": "sandwich",
        "embed_multiplier": 32**0.5, "tie_embeddings": True, "sliding_window": 4, "sliding_window_pattern": 2,
        "attention_scale": 0.3,
        "attention_softcap": 5.0, "logits_softcap": 3.0,
    },
    "gemma3": {
        "kv_heads": 2, "head_dim": 12, "norm": "gemma_rmsnorm", "norm_placement": "sandwich",
        "embed_multiplier": 32**0.5, "qk_norm": "per_head",
        "sliding_window": 4, "sliding_window_pattern": 2, "sliding_window_rope_theta": 30.0,
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "olmo2": {"kv_heads": 2, "qk_norm": "full", "norm_placement": "post", "biases": ["qkv"]},
    "granite": {
        "embed_multiplier": 3.0, "residual_multiplier": 0.3, "logits_divisor": 2.5, "logits_softcap": 1.0,
        "attention_scale": 0.2,
    },
    "mixtral": {"kv_heads": 2, "moe": {"num_experts": 4, "top_k": 2}},
    "switch": {"moe": {"num_experts": 4, "top_k": 1, "capacity_factor": 0.8}, "mlp": 24, "activation": "gelu"},
    "gshard": {"kv_heads": 2, "moe": {"num_experts": 4, "top_k": 2, "capacity_factor": 0.8}, "mlp": 24},
    "deepseek": {
        "moe": {"num_experts": 6, "top_k": 3, "shared_experts": 2, "normalize_gates": False, "bias_update_rate": 1e-3},
        "mlp": 16,
        "sliding_window": 4, "sliding_window_pattern": 2,
    },
    "gelu_biases": {"activation": "gelu", "biases": ["mlp", "output", "qkv"]},
    "gpt2": {
        "activation": "gelu", "biases": ["mlp", "output", "qkv"], "tie_embeddings": True,
        "norm": "layernorm", "learned_positions": 16,
    },
    "layer_norms": {
        "norm": "layernorm", "kv_heads": 2, "qk_norm": "full", "norm_placement": "sandwich", "embed_multiplier": 3.0,
        "sliding_window": 4,
        "learned_positions": 12, "head_dim": 7,
    },
}  # fmt: skip


def setup(options: dict, **config):
    cfg = Config(model=TINY | options, precision="fp32", **config)
    model_def = model_from_config(cfg, Sharder(), TINY["vocab"])
    params, _ = model_def.init(jax.random.key(0))
    # Biases and norm scales start at constants: make every parameter matter.
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [leaf + 0.1 * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    return cfg, model_def, jax.tree.unflatten(tree, leaves)


def packed(rows: int = 2, length: int = 13):
    """Tokens, positions and segments: two documents (the second starts inside its document) and padding."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, TINY["vocab"], (rows, length)).astype(np.int32)
    segments = np.array([1] * 6 + [2] * (length - 8) + [0, 0], np.int32)
    positions = np.array([*range(6), *range(7, 7 + length - 8), 0, 0], np.int32)
    return tokens, np.tile(positions, (rows, 1)), np.tile(segments, (rows, 1))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_numpy(family: str):
    cfg, model_def, params = setup(FAMILIES[family])
    tokens, positions, segments = packed()

    @jax.jit
    def run(params):
        model = model_def.bind(params)
        return model.logits(model.hidden(tokens, positions, segments)[0])

    expected = numpy_decoder.logits(params, cfg.model, tokens, positions, segments)
    real = segments[0] > 0
    np.testing.assert_allclose(np.asarray(run(params))[:, real], expected[:, real], rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "family", ["llama3", "mistral", "gemma2", "gemma3", "olmo2", "granite", "qwen3", "mixtral", "deepseek", "gpt2"]
)
def test_decoding_with_a_cache_equals_the_whole_sequence(family: str):
    _, model_def, params = setup(FAMILIES[family])
    tokens = packed(rows=2, length=12)[0]
    positions = np.tile(np.arange(12, dtype=np.int32), (2, 1))

    @jax.jit
    def whole(params):
        model = model_def.bind(params)
        return model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens))[0])

    @jax.jit
    def begin(params):
        model = model_def.bind(params)
        padded = jnp.pad(tokens[:, :5], ((0, 0), (0, 3)))  # right padding must not count
        return model.decode(padded, model.empty_cache(2, 16), 5)

    extend = jax.jit(lambda params, token, cache: model_def.bind(params).decode(token, cache))
    expected = np.asarray(whole(params))
    logits, cache = begin(params)
    np.testing.assert_allclose(logits, expected[:, 4], rtol=1e-4, atol=1e-5)
    for t in range(5, 12):
        logits, cache = extend(params, tokens[:, t : t + 1], cache)
        np.testing.assert_allclose(logits, expected[:, t], rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("remat", ["full", "dots", ("attention", "residual"), ("q", "k", "v", "up", "gate")])
def test_remat_gives_the_same_gradients(remat):
    tokens, positions, segments = packed()
    batch = {"tokens": tokens, "targets": np.roll(tokens, -1, 1), "positions": positions, "segments": segments,
             "weights": (segments > 0).astype(np.float32)}  # fmt: skip

    def gradients(remat):
        _, model_def, params = setup(FAMILIES["gemma2"], step=saving(remat))
        loss = lambda p: model_def.bind(p).loss(batch, jax.random.key(0))["cross_entropy"][0]  # noqa: E731
        return jax.jit(jax.grad(loss))(params)

    for a, b in zip(jax.tree.leaves(gradients("none")), jax.tree.leaves(gradients(remat))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", ["none", "dots"])
def test_no_layer_keeps_the_scores_of_its_attention(remat):
    sizes, layers, length = {"embed": 32, "heads": 8, "mlp": 48}, 3, 2048
    cfg = Config(model=TINY | sizes | {"layers": layers}, precision="fp32", step={"remat": remat, "attention": "xla"})
    model_def = model_from_config(cfg, Sharder(), TINY["vocab"])
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    loss = lambda params, tokens: model_def.bind(params).hidden(tokens, tokens, None)[0].sum()  # noqa: E731
    needs = jax.jit(jax.grad(loss)).lower(model_def.params, tokens).compile().memory_analysis().temp_size_in_bytes
    assert needs < sizes["heads"] * length**2 * 4 / 2  # of one layer


def test_compile_work_does_not_grow_with_depth():
    def size(layers: int) -> int:
        cfg = Config(model=TINY | {"layers": layers}, precision="fp32")
        model_def = model_from_config(cfg, Sharder(), TINY["vocab"])
        tokens, positions, segments = packed()
        run = jax.jit(lambda params: model_def.bind(params).hidden(tokens, positions, segments)[0])
        return len(run.lower(model_def.params).as_text())

    assert size(64) < 1.02 * size(4)
