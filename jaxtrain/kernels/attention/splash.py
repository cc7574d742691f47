"""TPU splash attention (a Pallas kernel that ships with JAX). On CPU it runs interpreted, for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.kernels.attention.spec import RESIDUALS, Case

LANES = 128
BLOCK = 512


def refusal(case: Case, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Returns the reason why this kernel can not do the case, or None."""
    if q_shape[1] != k_shape[1]:
        return f"needs as many keys as queries, not {q_shape[1]} queries and {k_shape[1]} keys"
    if case.window is not None and case.span is None:
        return "needs a window known when tracing (an int)"
    return None


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segments_BT: Array | None, case: Case, interpret: bool):
    """Self-attention [batch, time, heads, head_dim]; causal order is the index. All mesh axes must be manual.

    The sequence is padded to a multiple of 128 inside. Grouped query heads are native.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H = q_BTHD.shape[1:3]
    extra = -T % LANES
    if extra and segments_BT is None and not case.causal:
        segments_BT = jnp.ones(q_BTHD.shape[:2], jnp.int32)
    pad = ((0, 0), (0, extra))
    q, k, v = (jnp.pad(x, (*pad, (0, 0), (0, 0))).swapaxes(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    q = (q.astype(jnp.float32) * case.scale).astype(q.dtype)
    ids = None
    if segments_BT is not None:
        segments = jnp.pad(segments_BT, pad)
        ids = splash.SegmentIds(q=segments, kv=segments)
    with jax.ensure_compile_time_eval():  # block masks are constants, worked out once per trace
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([_mask(splash, case, T + extra)] * H),
            block_sizes=_blocks(splash, T + extra),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=case.softcap,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
    out: Any = jax.vmap(kernel)(q, k, v, ids)
    out = out.swapaxes(1, 2)[:, :T]
    if segments_BT is None:
        return out
    # Padding saw itself: a select gives 0, and takes its gradient away.
    return jnp.where((segments_BT != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _mask(splash, case: Case, size: int):
    if case.span is not None:
        right = 0 if case.causal else case.span - 1
        return splash.LocalMask((size, size), (case.span - 1, right), offset=0)
    if case.causal:
        return splash.CausalMask((size, size))
    return splash.FullMask((size, size))


def _blocks(splash, size: int):
    """The largest tiles up to `BLOCK` that divide the sequence."""
    n = max(b for b in range(LANES, min(BLOCK, size) + 1, LANES) if size % b == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    return splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), n))
