"""Plain attention in float32: the reference that all other kernels are tested against."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.attention.spec import MASKED, AttnSpec, TokenOrder, attention_mask


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, spec: AttnSpec, tokens: TokenOrder) -> Array:
    """Computes attention [batch, time, heads, head_dim] with all scores at once, in float32."""
    mask_BTS = attention_mask(spec, tokens, slice(0, q_BTHD.shape[1]), slice(0, k_BSKD.shape[1]))
    out = attend(q_BTHD.astype(jnp.float32), k_BSKD.astype(jnp.float32), v_BSKD.astype(jnp.float32), mask_BTS, spec)
    return out.astype(q_BTHD.dtype)


def attend(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, mask_BTS: Array | None, spec: AttnSpec) -> Array:
    """Computes attention of a block of queries to a block of keys. Softmax in float32; matmuls in the dtype of `q`.

    There is one matmul per (batch, key head), with time and group of the queries merged (x), so that keys and values
    are never repeated and scores never transposed. The output and gradients of a fully masked row are 0.
    """
    B, T, H, D = q_BTHD.shape
    S, K = k_BSKD.shape[1:3]
    G = H // K
    q_BKxD = q_BTHD.reshape(B, T, K, G, D).swapaxes(1, 2).reshape(B, K, T * G, D)
    k_BKSD, v_BKSD = k_BSKD.swapaxes(1, 2), v_BSKD.swapaxes(1, 2)
    scores = jnp.einsum("bkxd,bksd->bkxs", q_BKxD, k_BKSD, preferred_element_type=jnp.float32)
    scores = spec.scale * scores.reshape(B, K, T, G, S)
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if mask_BTS is not None:
        mask = mask_BTS[:, None, :, None]
        scores = jnp.where(mask, scores, MASKED)
    p = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
    if mask_BTS is not None:
        p = jnp.where(mask, p, 0.0)
    total = p.sum(-1, keepdims=True)
    p = p / jnp.where(total > 0, total, 1.0)  # before the matmul, so that its output is no residual
    p_BKxS = p.astype(v_BSKD.dtype).reshape(B, K, T * G, S)
    out = jnp.einsum("bkxs,bksd->bkxd", p_BKxS, v_BKSD, preferred_element_type=jnp.float32)
    return out.reshape(B, K, T, G, -1).swapaxes(1, 2).reshape(B, T, H, -1).astype(q_BTHD.dtype)
