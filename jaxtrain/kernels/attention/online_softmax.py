"""Attention to a part of the keys, with the softmax statistics to merge it with that to other keys.

Scores exist for one block of queries at a time. The backward pass takes the log-sum-exp over *all* keys and gives the
part of the gradients from these keys (Dao 2023, arXiv:2307.08691; Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.spec import MASKED, AttnSpec, TokenOrder, attention_mask

MIN_VISIBLE = MASKED / 2  # a smaller score or log-sum-exp is masked


class Queries(NamedTuple):
    """Queries [batch, time, heads, head_dim], their order and their documents [batch, time]."""

    q_BTHD: Array
    order_BT: Array
    segments_BT: Array | None


class Keys(NamedTuple):
    """Keys and values [batch, source, kv_heads, head_dim], their order and their documents [batch, source]."""

    k_BSKD: Array
    v_BSKD: Array
    order_BS: Array
    segments_BS: Array | None


class PartialAttention(NamedTuple):
    """Attention to a part of the keys, float32.

    Attributes:
        out_BTHD: normalised output [batch, time, heads, head_dim]; meaningless for a query that sees none of the keys.
        lse_BTH: log-sum-exp of the scores [batch, time, heads]; `MASKED` for such a query.
    """

    out_BTHD: Array
    lse_BTH: Array


class Cotangent(NamedTuple):
    """Inputs of the backward pass per query.

    Attributes:
        out_BTHD: cotangent of the output [batch, time, heads, head_dim].
        lse_BTH: log-sum-exp over all keys, float32 [batch, time, heads].
        delta_BTH: sum of output * cotangent, float32 [batch, time, heads].
    """

    out_BTHD: Array
    lse_BTH: Array
    delta_BTH: Array


def merge(a: PartialAttention, b: PartialAttention) -> PartialAttention:
    """Returns the attention to the keys of both."""
    top = jnp.maximum(a.lse_BTH, b.lse_BTH)
    left, right = (jnp.where(x.lse_BTH > MIN_VISIBLE, jnp.exp(x.lse_BTH - top), 0.0) for x in (a, b))
    visible = top > MIN_VISIBLE
    total = jnp.where(visible, left + right, 1.0)
    out = a.out_BTHD * (left / total)[..., None] + b.out_BTHD * (right / total)[..., None]
    return PartialAttention(out, jnp.where(visible, top + jnp.log(total), MASKED))


def forward(spec: AttnSpec, queries: Queries, keys: Keys, block: int) -> PartialAttention:
    """Computes attention to these keys. Matmuls are in the dtype of the inputs and accumulate in float32."""

    def attend_block(queries: Queries) -> PartialAttention:
        scores, mask = _scores(spec, queries, keys)
        top = scores.max(-1, keepdims=True)
        p = jnp.exp(scores - top)
        if mask is not None:
            p = jnp.where(mask, p, 0.0)
        total = p.sum(-1, keepdims=True)
        visible = total > 0
        p = (p / jnp.where(visible, total, 1.0)).astype(keys.v_BSKD.dtype)
        out = jnp.einsum("bkgts,bskd->btkgd", p, keys.v_BSKD, preferred_element_type=jnp.float32)
        lse = jnp.where(visible, top + jnp.log(jnp.where(visible, total, 1.0)), MASKED)
        B, T, H, _ = queries.q_BTHD.shape
        return PartialAttention(out.reshape(B, T, H, -1), jnp.moveaxis(lse[..., 0], 3, 1).reshape(B, T, H))

    size = queries.q_BTHD.shape[1]
    if size <= block:
        return attend_block(queries)
    _, outs = lax.scan(lambda _, part: (None, attend_block(part)), None, _split(queries, block))
    return _join(outs, size)


def backward(
    spec: AttnSpec, queries: Queries, keys: Keys, cotangent: Cotangent, block: int
) -> tuple[Array, Array, Array]:
    """Returns the float32 gradients of queries, keys and values from attention to these keys."""

    def attend_block(queries: Queries, cotangent: Cotangent) -> tuple[Array, Array, Array]:
        q, dtype = _grouped(queries.q_BTHD, keys), queries.q_BTHD.dtype
        scores, mask = _scores(spec, queries, keys)
        lse, delta = (jnp.moveaxis(_grouped(x, keys), 1, 3)[..., None] for x in cotangent[1:])
        p = jnp.exp(scores - lse)
        if mask is not None:
            p = jnp.where(mask, p, 0.0)  # also overflows of fully masked rows
        dout = _grouped(cotangent.out_BTHD, keys)
        dv = jnp.einsum("bkgts,btkgd->bskd", p.astype(dtype), dout, preferred_element_type=jnp.float32)
        dp = jnp.einsum("btkgd,bskd->bkgts", dout, keys.v_BSKD, preferred_element_type=jnp.float32)
        ds = p * (dp - delta) * spec.scale
        if spec.softcap is not None:
            ds *= 1 - jnp.square(jnp.where(scores > MIN_VISIBLE, scores, 0.0) / spec.softcap)
        ds = ds.astype(dtype)
        dq = jnp.einsum("bkgts,bskd->btkgd", ds, keys.k_BSKD, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgts,btkgd->bskd", ds, q, preferred_element_type=jnp.float32)
        return dq.reshape(queries.q_BTHD.shape), dk, dv

    size = queries.q_BTHD.shape[1]
    if size <= block:
        return attend_block(queries, cotangent)

    def step(sums: tuple[Array, Array], part: tuple[Queries, Cotangent]) -> tuple[tuple[Array, Array], Array]:
        dq, dk, dv = attend_block(*part)
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = (jnp.zeros(keys.k_BSKD.shape, jnp.float32), jnp.zeros(keys.v_BSKD.shape, jnp.float32))
    (dk, dv), dq = lax.scan(step, zeros, _split((queries, cotangent), block))
    return _join(dq, size), dk, dv


def _scores(spec: AttnSpec, queries: Queries, keys: Keys) -> tuple[Array, Array | None]:
    """Returns float32 scores [batch, kv_heads, group, time, source], `MASKED` where the mask is False, and the mask."""
    q, k = _grouped(queries.q_BTHD, keys), keys.k_BSKD
    scores = spec.scale * jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    tokens = TokenOrder(queries.segments_BT, keys.segments_BS, queries.order_BT, keys.order_BS)
    mask = attention_mask(spec, tokens, slice(0, q.shape[1]), slice(0, k.shape[1]))
    if mask is None:
        return scores, None
    mask = mask[:, None, None]
    return jnp.where(mask, scores, MASKED), mask


def _grouped(x_BTH: Array, keys: Keys) -> Array:
    """[batch, time, heads, ...] -> [batch, time, kv_heads, group, ...]."""
    B, T, H, *rest = x_BTH.shape
    K = keys.k_BSKD.shape[2]
    return x_BTH.reshape(B, T, K, H // K, *rest)


def _split(tree: Any, block: int) -> Any:
    """[batch, time, ...] -> [count, batch, block, ...]; the last block is padded with zeros, which have no gradient."""

    def split(x: Array) -> Array:
        count = -(-x.shape[1] // block)
        x = jnp.pad(x, ((0, 0), (0, count * block - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(tree: Any, size: int) -> Any:
    """Inverts `_split`."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :size]

    return jax.tree.map(join, tree)
