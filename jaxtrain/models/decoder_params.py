"""Parameters of the decoder as a table: path -> shape and logical names.

The layout check, the parameter count and `plan` read it before JAX starts; a test compares it with the decoder.
Dims: L layers, D embed, H heads, K kv_heads, h head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from math import prod

from jaxtrain.config.sections.model import ModelConfig, MoeConfig
from jaxtrain.sharding.rules import KV_SHARED, kv_copies, table_names

Names = tuple[str | None, ...]
Table = dict[str, tuple[tuple[int, ...], Names]]
VOCAB_MULTIPLE = 128  # a decoder's vocabulary is rounded up to it, so that it divides over devices and fills tiles


def head_dim(model: ModelConfig) -> int:
    """Size of one head."""
    return model.head_dim or model.embed // model.heads


def decoder_tensors(model: ModelConfig, vocab: int, kv_shards: int = 1, table_shards: int = 1) -> Table:
    """Returns every parameter of the decoder.

    Args:
        model: the sizes.
        vocab: rows of the embedding table.
        kv_shards: shards of `kv_heads`; if heads must be repeated for them, their dim is named `kv_shared`.
        table_shards: shards of `table`, the width of an embedding that is not the head too.

    Returns:
        path, such as `layers/attention/q` -> (shape, logical names). Layers have a leading dim `layers`.
    """
    D, V = model.embed, vocab
    table: Table = {"embed/table": ((V, D), table_names(D, model.tie_embeddings, table_shards))}
    for path, (shape, names) in {**_attention(model, kv_shards), **_feed_forward(model), **_norms(model)}.items():
        table[f"layers/{path}"] = ((model.layers, *shape), ("layers", *names))
    table |= _norm("final_norm", (D,), (None,), model)
    if model.learned_positions is not None:
        table["positions/table"] = ((model.learned_positions, D), table_names(D, False, table_shards))
    if not model.tie_embeddings:
        table["head"] = ((D, V), ("embed", "vocab"))
    return table


def parameter_count(model: ModelConfig, vocab: int) -> int:
    """Number of parameters of the decoder, embeddings included."""
    return sum(prod(shape) for shape, _ in decoder_tensors(model, vocab).values())


def _attention(model: ModelConfig, kv_shards: int) -> Table:
    """Returns the projections of one layer, without the dim `layers`."""
    D, H, K, h = model.embed, model.heads, model.kv_heads or model.heads, head_dim(model)
    kv = "kv_heads" if kv_copies(H, K, kv_shards) == 1 else KV_SHARED
    table: Table = {
        "attention/q": ((D, H, h), ("embed", "heads", "head_dim")),
        "attention/k": ((D, K, h), ("embed", kv, "head_dim")),
        "attention/v": ((D, K, h), ("embed", kv, "head_dim")),
        "attention/o": ((D, H, h), ("embed", "heads", "head_dim")),
    }
    if "qkv" in model.biases:
        table["attention/q_bias"] = ((H, h), ("heads", "head_dim"))
        table["attention/k_bias"] = ((K, h), (kv, "head_dim"))
        table["attention/v_bias"] = ((K, h), (kv, "head_dim"))
    if "output" in model.biases:
        table["attention/o_bias"] = ((D,), (None,))
    if model.qk_norm != "none":
        is_full = model.qk_norm == "full"
        for name, count, heads in (("q", H, "heads"), ("k", K, kv)):
            shape, names = ((count, h), (heads, "head_dim")) if is_full else ((h,), (None,))
            table |= _norm(f"attention/{name}_norm", shape, names, model)
    return table


def _feed_forward(model: ModelConfig) -> Table:
    """Returns the feed-forward layer, or its experts."""
    return _mlp(model, model.mlp) if model.moe is None else _moe(model, model.moe)


def _moe(model: ModelConfig, moe: MoeConfig) -> Table:
    """Returns router, experts and shared experts of one layer. The router is too small to shard its experts."""
    D, E, F = model.embed, moe.num_experts, model.mlp
    table: Table = {"moe/router": ((D, E), ("embed", None))}
    if moe.bias_update_rate is not None:
        table["moe/bias"] = ((E,), ("balance",))
    for path, (shape, names) in (_mlp(model, F) | {"mlp/down": ((F, D), ("mlp", "embed"))}).items():
        table[path.replace("mlp/", "moe/")] = ((E, *shape), ("expert", *names))
    if moe.shared_experts:
        shared = _mlp(model, moe.shared_experts * F)
        table |= {path.replace("mlp/", "moe/shared/"): entry for path, entry in shared.items()}
    return table


def _mlp(model: ModelConfig, mlp: int) -> Table:
    """Returns a feed-forward layer of this width; `gelu` has no gate."""
    D, F = model.embed, mlp
    inner = ("up",) if model.activation == "gelu" else ("gate", "up")
    table: Table = {f"mlp/{name}": ((D, F), ("embed", "mlp")) for name in inner}
    table["mlp/down"] = ((D, F), ("embed", "mlp"))
    if "mlp" in model.biases:
        table |= {f"mlp/{name}_bias": ((F,), ("mlp",)) for name in inner}
        table["mlp/down_bias"] = ((D,), (None,))
    return table


def _norms(model: ModelConfig) -> Table:
    """Returns the norms of one layer on the residual stream, which are never sharded."""
    names = [] if model.norm_placement == "post" else ["attention_norm", "mlp_norm"]
    if model.norm_placement != "pre":
        names += ["attention_post_norm", "mlp_post_norm"]
    tables = [_norm(name, (model.embed,), (None,), model) for name in names]
    return {path: entry for table in tables for path, entry in table.items()}


def _norm(path: str, shape: tuple[int, ...], names: Names, model: ModelConfig) -> Table:
    """Returns the scale of a norm, and the bias of a LayerNorm."""
    parts = ("scale", "bias") if model.norm == "layernorm" else ("scale",)
    return {f"{path}/{part}": (shape, names) for part in parts}
