"""Multi-head attention with grouped key/value heads, rotary positions or none, and a cache for decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.kernels.attention import attention
from jaxtrain.nn.env import Env, constant, normal
from jaxtrain.nn.rope import rotate
from jaxtrain.sharding.rules import BATCH, CONTEXT, KV_SHARED, ROWS, kv_copies


class Cache(NamedTuple):
    """Keys and values of past tokens, k and v [B, S, K, D]; the first `length[b]` of row b are valid, int32 [B]."""

    k: jax.Array
    v: jax.Array
    length: jax.Array

    def append(self, k_BTKD: jax.Array, v_BTKD: jax.Array) -> Cache:
        """Returns the cache with T more tokens in every row. The caller makes sure that they fit."""

        @jax.vmap
        def write(past_SKD: jax.Array, new_TKD: jax.Array, at: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice(past_SKD, new_TKD.astype(past_SKD.dtype), (at, 0, 0))

        k, v = write(self.k, k_BTKD, self.length), write(self.v, v_BTKD, self.length)
        return Cache(k, v, self.length + k_BTKD.shape[1])


class Attention(nnx.Module):
    """softmax(q k' / sqrt(D)) v over heads; column-parallel q, k, v and row-parallel output."""

    def __init__(
        self,
        embed: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool,
        output_bias: bool,
        norm: Callable[..., nnx.Module] | None,
        full_norm: bool,
        scale: float | None,
        softcap: float | None,
        std: float,
        out_std: float,
        env: Env,
        rngs: nnx.Rngs,
    ):
        self.env, self.scale, self.softcap = env, scale, softcap
        self.copies = kv_copies(heads, kv_heads, env.sharder.size("kv_heads"))
        kv = "kv_heads" if self.copies == 1 else KV_SHARED
        self.q = env.param(rngs, ("embed", "heads", "head_dim"), (embed, heads, head_dim), normal(std))
        self.k = env.param(rngs, ("embed", kv, "head_dim"), (embed, kv_heads, head_dim), normal(std))
        self.v = env.param(rngs, ("embed", kv, "head_dim"), (embed, kv_heads, head_dim), normal(std))
        # `embed` first, as in every dense weight: shards of a last dim are transposed after they are gathered.
        self.o = env.param(rngs, ("embed", "heads", "head_dim"), (embed, heads, head_dim), normal(out_std))
        if bias:
            self.q_bias = env.param(rngs, ("heads", "head_dim"), (heads, head_dim), constant(0.0))
            self.k_bias = env.param(rngs, (kv, "head_dim"), (kv_heads, head_dim), constant(0.0))
            self.v_bias = env.param(rngs, (kv, "head_dim"), (kv_heads, head_dim), constant(0.0))
        if output_bias:
            self.o_bias = env.param(rngs, (None,), (embed,), constant(0.0))
        if norm is not None:
            for name, own, count in (("q", "heads", heads), ("k", kv, kv_heads)):
                size, names = ((count, head_dim), (own, "head_dim")) if full_norm else (head_dim, (None,))
                setattr(self, f"{name}_norm", norm(size, names=names, env=env, rngs=rngs))

    def __call__(
        self,
        x_BTD: jax.Array,
        rotation: tuple[jax.Array, jax.Array] | None,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        window: int | None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Maps [B, T, D] to [B, T, D], sharded as the residual stream. Also returns the extended cache, or None."""
        q_BTHD, k_BTKD = (self._project_rotated(x_BTD, name, rotation) for name in ("q", "k"))
        q_BTHD, k_BTKD = self._constrain(q_BTHD, "q"), self._constrain(k_BTKD, "k")
        v_BTKD = self._constrain(self._project(x_BTD, "v"), "v")
        options = {"window": window, "softcap": self.softcap, "scale": self.scale}
        if cache is None:
            out_BTHD = attention(
                q_BTHD, k_BTKD, v_BTKD, segments_BT=segments_BT, positions_BT=positions_BT, causal=True, **options,
                kernel=self.env.attention, context_parallel=self.env.context_parallel, sharder=self.env.sharder,
            )  # fmt: skip
        else:
            # The rows of the cache may be on more devices than the new tokens, which are sent to their rows.
            q_BTHD, k_BTKD, v_BTKD = (
                self.env.constrain(x, ROWS, None, name, None)
                for x, name in ((q_BTHD, "heads"), (k_BTKD, "kv_heads"), (v_BTKD, "kv_heads"))
            )
            cache = cache.append(k_BTKD, v_BTKD)
            kv_positions_BS = jnp.broadcast_to(jnp.arange(cache.k.shape[1]), cache.k.shape[:2])
            out_BTHD = attention(
                q_BTHD, cache.k, cache.v, positions_BT=positions_BT, kv_positions_BS=kv_positions_BS, causal=True,
                **options, kernel="xla" if q_BTHD.shape[1] > 1 else "reference", sharder=self.env.sharder,
            )  # fmt: skip
            out_BTHD = self.env.constrain(out_BTHD, ROWS, None, "heads", None)
        out_BTHD = self.env.constrain(out_BTHD, BATCH, CONTEXT, "heads", None)
        out_BTD = jnp.einsum("bthk,dhk->btd", out_BTHD, self.env.weight(self.o))
        out_BTD = self.env.scatter_sequence(out_BTD)
        return (out_BTD + self.env.weight(self.o_bias) if hasattr(self, "o_bias") else out_BTD), cache

    def _project(self, x_BTD: jax.Array, name: str) -> jax.Array:
        out_BTHD = jnp.einsum("btd,dhk->bthk", x_BTD, self._heads(self.env.weight(getattr(self, name)), name))
        bias = getattr(self, f"{name}_bias", None)
        return out_BTHD if bias is None else out_BTHD + self._heads(self.env.weight(bias), name)

    def _heads(self, weight: jax.Array, name: str) -> jax.Array:
        """Returns the weight [..., heads, head_dim]; key/value heads that are fewer than their shards are repeated."""
        if name == "q" or weight.ndim == 1 or self.copies == 1:
            return weight
        copied = jnp.repeat(weight, self.copies, axis=-2)
        return self.env.constrain(copied, *(None,) * (weight.ndim - 2), "kv_heads", None)

    def _project_rotated(self, x_BTD: jax.Array, name: str, rotation: tuple[jax.Array, jax.Array] | None) -> jax.Array:
        out_BTHD = self._project(x_BTD, name)
        norm = getattr(self, f"{name}_norm", None)
        out_BTHD = out_BTHD if norm is None else norm(out_BTHD, partial(self._heads, name=name))
        return out_BTHD if rotation is None else rotate(out_BTHD, *rotation)

    def _constrain(self, x_BTHD: jax.Array, name: str) -> jax.Array:
        heads = "heads" if name == "q" else "kv_heads"
        return checkpoint_name(self.env.constrain(x_BTHD, BATCH, CONTEXT, heads, None), name)
