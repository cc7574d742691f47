"""cuDNN flash attention on NVIDIA GPUs, through JAX."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.case import Case, Tokens, visible

HOPPER = (9, 0)
RUNS = 16  # at least so many documents a row; longer rows hold more, see `_most_runs`
TOKENS_PER_RUN = 512  # cuDNN keeps a float32 statistic per run, head and token
MASKED_QUERIES = 4096  # queries that a mask is made for at a time
PRIMITIVE = "dot_product_attention_fwd_wrapper"  # saved by remat policies: naming the output saves nothing


def refusal(case: Case, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, hopper: bool) -> str | None:
    """Why this kernel can not do the case, or None."""
    most = 256 if hopper else 128
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {jnp.dtype(dtype)}"
    if case.softcap is not None:
        return "has no softcap"
    if q_shape[-1] % 8 or q_shape[-1] > most:
        return f"needs a head_dim that is a multiple of 8 and at most {most}, not {q_shape[-1]}"
    if q_shape[1] != k_shape[1]:
        return f"needs as many keys as queries, not {q_shape[1]} queries and {k_shape[1]} keys"
    if q_shape[1] % 2:
        return f"needs an even number of tokens a row, not {q_shape[1]}"
    if case.window is not None and (case.span is None or not case.causal):
        return "needs causal=True and a window known when tracing (an int) for a window"
    return None


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segments_BT: Array | None, case: Case, hopper: bool):
    """Self-attention [batch, time, heads, head_dim]; causal order is the index. All mesh axes must be manual.

    Packed documents go to cuDNN as sequences of their own (Hopper and later). How many a row may hold is fixed
    when compiling; a batch with more of them takes cuDNN with a mask instead, chosen on the device, and so do
    earlier GPUs always.
    """
    if segments_BT is None:
        return _plain(q_BTHD, k_BSKD, v_BSKD, case)
    if hopper:
        most = _most_runs(segments_BT.shape[1])
        runs_BT = _runs(segments_BT)
        out = lax.cond(
            runs_BT.max() < most,
            lambda q, k, v: _packed(q, k, v, runs_BT, most, case),
            lambda q, k, v: _masked(q, k, v, segments_BT, case),
            *(q_BTHD, k_BSKD, v_BSKD),
        )
    else:
        out = _masked(q_BTHD, k_BSKD, v_BSKD, segments_BT, case)
    # Padding saw itself or everything: a select gives 0, and takes its gradient away.
    return jnp.where((segments_BT != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _plain(q: Array, k: Array, v: Array, case: Case, mask: Array | None = None) -> Array:
    window = None if case.span is None else (case.span - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=case.scale, is_causal=case.causal, local_window_size=window, implementation="cudnn"
    )


def _masked(q: Array, k: Array, v: Array, segments_BT: Array, case: Case) -> Array:
    """Documents by a mask, which cuDNN takes as a bias [batch, 1, queries, keys] and differentiates.

    So that it stays small, long sequences come in equal blocks of queries, each against all keys.
    """
    B, T = segments_BT.shape
    count = max(n for n in range(1, max(1, T // MASKED_QUERIES) + 1) if T % n == 0)
    if count == 1:  # causality and window are cuDNN's own
        mask = visible(
            replace(case, causal=False, window=None), Tokens(segments_BT, segments_BT), slice(0, T), slice(0, T)
        )
        return _plain(q, k, v, case, None if mask is None else mask[:, None])
    block = T // count
    plain = replace(case, causal=False, window=None)

    def one(_, xs):
        first, q, segments = xs
        mask = visible(case, Tokens(segments, segments_BT), slice(0, block), slice(0, T), first)
        return None, _plain(q, k, v, plain, None if mask is None else mask[:, None])

    split = (jnp.moveaxis(x.reshape(B, count, block, *x.shape[2:]), 1, 0) for x in (q, segments_BT))
    _, out = lax.scan(one, None, (block * jnp.arange(count, dtype=jnp.int32), *split))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _most_runs(time: int) -> int:
    return max(RUNS, time // TOKENS_PER_RUN)


def _runs(segments_BT: Array) -> Array:
    """Number, from 0, of the run of equal segment ids that each token is in; padding counts as a run."""
    changed = segments_BT[:, 1:] != segments_BT[:, :-1]
    return jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _layout(runs_BT: Array, most: int) -> tuple[Array, Array]:
    """Lengths [batch, most] and offsets [batch, most + 1] of the runs, -1 where there is none."""
    sizes = (runs_BT[:, :, None] == jnp.arange(most, dtype=jnp.int32)).sum(1, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes
    none = jnp.full((sizes.shape[0], 1), -1, jnp.int32)
    empty = sizes == 0
    return jnp.where(empty, -1, sizes), jnp.concatenate([jnp.where(empty, -1, starts), none], axis=1)


def _packed(q: Array, k: Array, v: Array, runs_BT: Array, most: int, case: Case) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # no public way to give offsets in jax 0.10

    sizes, offsets = _layout(runs_BT, most)
    if q.shape[2] != k.shape[2] and not _grouped_offsets_are_right():
        groups = q.shape[2] // k.shape[2]
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(v, groups, axis=2)
    kind = cudnn.MaskType.PADDING_CAUSAL if case.causal else cudnn.MaskType.PADDING
    out: Any = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=sizes,
        kv_seqlen=sizes,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=case.scale,
        mask_type=kind,
        sliding_window_length=case.span,
    )
    return out


@cache
def _grouped_offsets_are_right() -> bool:
    """Whether JAX scales the offsets of the keys by the heads of the keys.

    JAX 0.10 scales them by the heads of the queries, and grouped queries then read wrong tokens without an
    error (jax pull request 39521). Asked of the function itself, so that a mended JAX needs no list of versions.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if not hasattr(cudnn, "_fix_seqlen_offsets"):
        return False
    with jax.ensure_compile_time_eval():
        sizes, offsets = jnp.array([[1, 1]], jnp.int32), jnp.array([[0, 1, -1]], jnp.int32)
        q, k = jnp.zeros((1, 2, 4, 1)), jnp.zeros((1, 2, 2, 1))
        fixed = cudnn._fix_seqlen_offsets(sizes, sizes, offsets, offsets, q, k)
        return int(fixed[3][0, 1]) == 2
