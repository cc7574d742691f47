"""TPU splash attention (a Pallas kernel of JAX). On CPU it runs interpreted, for tests."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtrain.kernels.attention.spec import RESIDUALS, AttnSpec

LANES = 128
BLOCK = 512


def unsupported_reason(spec: AttnSpec, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> str | None:
    """Returns why this kernel does not support the options, or None."""
    if q_shape[1] != k_shape[1]:
        return f"needs as many keys as queries, not {q_shape[1]} queries and {k_shape[1]} keys"
    if spec.window is not None and spec.static_window is None:
        return "needs a window known when tracing (an int)"
    return None


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segments_BT: Array | None, spec: AttnSpec, interpret: bool):
    """Computes self-attention [batch, time, heads, head_dim] in array order. All mesh axes must be manual.

    The sequence is padded to a multiple of 128.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, H = q_BTHD.shape[1:3]
    extra = -T % LANES
    if extra and segments_BT is None and not spec.causal:
        segments_BT = jnp.ones(q_BTHD.shape[:2], jnp.int32)
    pad = ((0, 0), (0, extra))
    q, k, v = (jnp.pad(x, (*pad, (0, 0), (0, 0))).swapaxes(1, 2) for x in (q_BTHD, k_BSKD, v_BSKD))
    q = (q.astype(jnp.float32) * spec.scale).astype(q.dtype)
    ids = None
    if segments_BT is not None:
        segments = jnp.pad(segments_BT, pad)
        ids = splash.SegmentIds(q=segments, kv=segments)
    with jax.ensure_compile_time_eval():  # block masks are constants, computed once per trace
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([_mask(splash, spec, T + extra)] * H),
            block_sizes=_blocks(splash, T + extra),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=spec.softcap,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
    out: Any = jax.vmap(kernel)(q, k, v, ids)
    out = out.swapaxes(1, 2)[:, :T]
    if segments_BT is None:
        return out
    # Padding attended to itself: set its output and its gradient to 0.
    return jnp.where((segments_BT != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _mask(splash, spec: AttnSpec, size: int):
    if spec.static_window is not None:
        right = 0 if spec.causal else spec.static_window - 1
        return splash.LocalMask((size, size), (spec.static_window - 1, right), offset=0)
    if spec.causal:
        return splash.CausalMask((size, size))
    return splash.FullMask((size, size))


def _blocks(splash, size: int):
    """Returns the largest tiles up to `BLOCK` that divide the sequence."""
    n = max(b for b in range(LANES, min(BLOCK, size) + 1, LANES) if size % b == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    return splash.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), n))
