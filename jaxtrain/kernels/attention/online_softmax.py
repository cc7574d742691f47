"""Attention of some queries to some keys, with the softmax statistics that join it to that of other keys.

Scores exist for one block of queries at a time. The backward pass is of a whole softmax restricted to these keys:
it takes the log-sum-exp over *all* keys, so that nothing needs to be known of the others (Dao 2023,
arXiv:2307.08691; Liu et al. 2023, arXiv:2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.spec import MASKED, Case, TokenOrder, visible

NOTHING = MASKED / 2  # below it a log-sum-exp or a score is of nothing


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


class Partial(NamedTuple):
    """Attention to some of the keys: normalised output [batch, time, heads, head_dim] and log-sum-exp of the scores
    [batch, time, heads], float32. That of a query that sees none of them is `MASKED`, and its output has no say.
    """

    out_BTHD: Array
    lse_BTH: Array


class Cotangent(NamedTuple):
    """Values that the backward pass needs per query: the output's cotangent [batch, time, heads, head_dim], the
    log-sum-exp over all keys and the sum of output * cotangent, float32 [batch, time, heads].
    """

    out_BTHD: Array
    lse_BTH: Array
    delta_BTH: Array


def merge(a: Partial, b: Partial) -> Partial:
    """Attention to the keys of both."""
    top = jnp.maximum(a.lse_BTH, b.lse_BTH)
    left, right = (jnp.where(x.lse_BTH > NOTHING, jnp.exp(x.lse_BTH - top), 0.0) for x in (a, b))
    seen = top > NOTHING
    total = jnp.where(seen, left + right, 1.0)
    out = a.out_BTHD * (left / total)[..., None] + b.out_BTHD * (right / total)[..., None]
    return Partial(out, jnp.where(seen, top + jnp.log(total), MASKED))


def forward(case: Case, queries: Queries, keys: Keys, block: int) -> Partial:
    """Attention of the queries to these keys. Matmuls are in the dtype of the inputs and add up in float32."""

    def one(queries: Queries) -> Partial:
        scores, mask = _scores(case, queries, keys)
        top = scores.max(-1, keepdims=True)
        p = jnp.exp(scores - top)
        if mask is not None:
            p = jnp.where(mask, p, 0.0)
        total = p.sum(-1, keepdims=True)
        seen = total > 0
        p = (p / jnp.where(seen, total, 1.0)).astype(keys.v_BSKD.dtype)
        out = jnp.einsum("bkgts,bskd->btkgd", p, keys.v_BSKD, preferred_element_type=jnp.float32)
        lse = jnp.where(seen, top + jnp.log(jnp.where(seen, total, 1.0)), MASKED)
        B, T, H, _ = queries.q_BTHD.shape
        return Partial(out.reshape(B, T, H, -1), jnp.moveaxis(lse[..., 0], 3, 1).reshape(B, T, H))

    size = queries.q_BTHD.shape[1]
    if size <= block:
        return one(queries)
    _, outs = lax.scan(lambda _, part: (None, one(part)), None, _split(queries, block))
    return _join(outs, size)


def backward(case: Case, queries: Queries, keys: Keys, cotangent: Cotangent, block: int) -> tuple[Array, Array, Array]:
    """Gradients of the queries, keys and values from their meeting, float32 in the shapes of all three."""

    def one(queries: Queries, cotangent: Cotangent) -> tuple[Array, Array, Array]:
        q, dtype = _grouped(queries.q_BTHD, keys), queries.q_BTHD.dtype
        scores, mask = _scores(case, queries, keys)
        lse, delta = (jnp.moveaxis(_grouped(x, keys), 1, 3)[..., None] for x in cotangent[1:])
        p = jnp.exp(scores - lse)
        if mask is not None:
            p = jnp.where(mask, p, 0.0)  # also what overflowed, in rows that see nothing
        dout = _grouped(cotangent.out_BTHD, keys)
        dv = jnp.einsum("bkgts,btkgd->bskd", p.astype(dtype), dout, preferred_element_type=jnp.float32)
        dp = jnp.einsum("btkgd,bskd->bkgts", dout, keys.v_BSKD, preferred_element_type=jnp.float32)
        ds = p * (dp - delta) * case.scale
        if case.softcap is not None:
            ds *= 1 - jnp.square(jnp.where(scores > NOTHING, scores, 0.0) / case.softcap)
        ds = ds.astype(dtype)
        dq = jnp.einsum("bkgts,bskd->btkgd", ds, keys.k_BSKD, preferred_element_type=jnp.float32)
        dk = jnp.einsum("bkgts,btkgd->bskd", ds, q, preferred_element_type=jnp.float32)
        return dq.reshape(queries.q_BTHD.shape), dk, dv

    size = queries.q_BTHD.shape[1]
    if size <= block:
        return one(queries, cotangent)

    def step(sums: tuple[Array, Array], part: tuple[Queries, Cotangent]) -> tuple[tuple[Array, Array], Array]:
        dq, dk, dv = one(*part)
        return (sums[0] + dk, sums[1] + dv), dq

    zeros = (jnp.zeros(keys.k_BSKD.shape, jnp.float32), jnp.zeros(keys.v_BSKD.shape, jnp.float32))
    (dk, dv), dq = lax.scan(step, zeros, _split((queries, cotangent), block))
    return _join(dq, size), dk, dv


def _scores(case: Case, queries: Queries, keys: Keys) -> tuple[Array, Array | None]:
    """Scores [batch, kv_heads, group, time, source], float32, `MASKED` where the mask, of that rank, is False."""
    q, k = _grouped(queries.q_BTHD, keys), keys.k_BSKD
    scores = case.scale * jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32)
    if case.softcap is not None:
        scores = case.softcap * jnp.tanh(scores / case.softcap)
    tokens = TokenOrder(queries.segments_BT, keys.segments_BS, queries.order_BT, keys.order_BS)
    mask = visible(case, tokens, slice(0, q.shape[1]), slice(0, k.shape[1]))
    if mask is None:
        return scores, None
    mask = mask[:, None, None]
    return jnp.where(mask, scores, MASKED), mask


def _grouped(x_BTH: Array, keys: Keys) -> Array:
    """[batch, time, heads, ...] to [batch, time, kv_heads, group, ...]."""
    B, T, H, *rest = x_BTH.shape
    K = keys.k_BSKD.shape[2]
    return x_BTH.reshape(B, T, K, H // K, *rest)


def _split(tree: Any, block: int) -> Any:
    """Arrays [batch, time, ...] to [count, batch, block, ...]; zeros fill the last block, and give no gradient."""

    def split(x: Array) -> Array:
        count = -(-x.shape[1] // block)
        x = jnp.pad(x, ((0, 0), (0, count * block - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], count, block, *x.shape[2:]), 1, 0)

    return jax.tree.map(split, tree)


def _join(tree: Any, size: int) -> Any:
    """The inverse of `_split`."""

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :size]

    return jax.tree.map(join, tree)
