"""cuDNN flash attention on NVIDIA GPUs, through JAX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import Partial

from jaxtrain.kernels.attention.spec import RESIDUALS, AttnSpec, TokenOrder, attention_mask

HOPPER = (9, 0)
# Documents per row that a compiled kernel supports, see `_run_limits`: a small and a large limit, because cuDNN's
# backward kernel clears and accumulates a float32 gradient for every possible document.
FEW_RUNS, MANY_RUNS = 4, 16
TOKENS_PER_RUN = 512  # cuDNN has a float32 statistic per run, head and token
MAX_MASK = 2**27  # elements of a mask that exist at a time


def unsupported_reason(
    spec: AttnSpec, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, hopper: bool
) -> str | None:
    """Returns why this kernel does not support the options, or None."""
    max_head_dim = 256 if hopper else 128
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"needs bfloat16 or float16, not {jnp.dtype(dtype)}"
    if spec.softcap is not None:
        return "does not support softcap"
    if q_shape[-1] % 8 or q_shape[-1] > max_head_dim:
        return f"needs a head_dim that is a multiple of 8 and at most {max_head_dim}, not {q_shape[-1]}"
    if q_shape[1] != k_shape[1]:
        return f"needs as many keys as queries, not {q_shape[1]} queries and {k_shape[1]} keys"
    if q_shape[1] % 2:
        return f"needs an even number of tokens a row, not {q_shape[1]}"
    if spec.window is not None and (spec.static_window is None or not spec.causal):
        return "needs causal=True and a window known when tracing (an int) for a window"
    return None


def attention(q_BTHD: Array, k_BSKD: Array, v_BSKD: Array, segments_BT: Array | None, spec: AttnSpec, hopper: bool):
    """Computes self-attention [batch, time, heads, head_dim] in array order. All mesh axes must be manual.

    cuDNN gets packed documents as separate sequences (Hopper and later). Their number per row is limited at compile
    time: the device chooses between two limits. A batch with more documents uses a mask, and so do earlier GPUs.
    """
    if segments_BT is None:
        return _unsegmented(spec, q_BTHD, k_BSKD, v_BSKD)
    if hopper:
        if q_BTHD.shape[2] != k_BSKD.shape[2] and not _grouped_offsets_are_right():
            groups = q_BTHD.shape[2] // k_BSKD.shape[2]
            k_BSKD, v_BSKD = (jnp.repeat(x, groups, axis=2) for x in (k_BSKD, v_BSKD))
        out: Any = _documents(spec, q_BTHD, k_BSKD, v_BSKD, segments_BT)
    else:
        out = _masked(q_BTHD, k_BSKD, v_BSKD, segments_BT, spec)
    # Padding attended to itself or to everything: set its output and its gradient to 0.
    return jnp.where((segments_BT != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _differentiate(run: Callable, inputs: tuple[Array, ...]) -> tuple[Array, list[Array], Callable]:
    """Returns the output, the residuals other than inputs and output, and a function that rebuilds the pullback."""
    out, pullback = jax.vjp(run, *inputs)
    leaves, tree = jax.tree.flatten(pullback)
    source = [next((i for i, x in enumerate((*inputs, out)) if x is leaf), None) for leaf in leaves]
    others = [leaf for leaf, i in zip(leaves, source) if i is None]

    def rebuild(others: list[Array], *inputs_and_output: Array) -> Callable:
        rest = iter(others)
        return tree.unflatten([next(rest) if i is None else inputs_and_output[i] for i in source])

    return out, others, rebuild


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unsegmented(spec: AttnSpec, q: Array, k: Array, v: Array) -> Array:
    """Computes attention without segments. The custom derivative names its residuals for remat policies."""
    return _plain(q, k, v, spec)


def _unsegmented_fwd(spec, q, k, v):
    out, others, rebuild = _differentiate(partial(_plain, spec=spec), (q, k, v))
    out, *others = (checkpoint_name(x, RESIDUALS) for x in (out, *others))
    return out, rebuild(others, q, k, v, out)


_unsegmented.defvjp(_unsegmented_fwd, lambda spec, pullback, g: pullback(g))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _documents(spec: AttnSpec, q: Array, k: Array, v: Array, segments_BT: Array) -> Array:
    """Computes attention within segments: packed with the smallest limit that holds the runs, else masked.

    The derivative is custom, because `lax.switch` would save the residuals of *all* branches. The packed branches save
    the same arrays, padded to the shapes of the largest limit; the masked branch saves nothing and is recomputed.
    """
    return _documents_fwd(spec, q, k, v, segments_BT)[0]


def _documents_fwd(spec, q, k, v, segments_BT):
    runs_BT = _runs(segments_BT)
    limits = _run_limits(segments_BT.shape[1])
    branch = sum((runs_BT.max() >= limit).astype(jnp.int32) for limit in limits)
    rebuilds = {}  # no arrays, so they leave the branches as a side effect of tracing; the last trace counts

    def packed(limit, q, k, v):
        run = partial(_packed, runs_BT=runs_BT, limit=limit, spec=spec)
        out, others, rebuilds[limit] = _differentiate(run, (q, k, v))
        return out, others

    shapes = {limit: jax.eval_shape(partial(packed, limit), q, k, v)[1] for limit in limits}
    largest = shapes[limits[-1]]

    def padded(limit, q, k, v):
        out, others = packed(limit, q, k, v)
        return out, [_pad_to(x, like.shape) for x, like in zip(others, largest)]

    def masked(q, k, v):
        return _masked(q, k, v, segments_BT, spec), [jnp.zeros(x.shape, x.dtype) for x in largest]

    out, others = lax.switch(branch, [*(partial(padded, limit) for limit in limits), masked], q, k, v)
    out, *others = (checkpoint_name(x, RESIDUALS) for x in (out, *others))

    def pullback(limit, others, q, k, v, out, g):
        others = [lax.slice(x, (0,) * x.ndim, like.shape) for x, like in zip(others, shapes[limit])]
        return rebuilds[limit](others, q, k, v, out)(g)

    pullbacks = tuple(Partial(partial(pullback, limit)) for limit in limits)
    return out, (branch, q, k, v, segments_BT, out, others, pullbacks)


def _documents_bwd(spec, residuals, g):
    branch, q, k, v, segments_BT, out, others, pullbacks = residuals

    def masked(others, q, k, v, out, g):
        return jax.vjp(partial(_masked, segments_BT=segments_BT, spec=spec), q, k, v)[1](g)

    return *lax.switch(branch, [*pullbacks, masked], others, q, k, v, out, g), None


_documents.defvjp(_documents_fwd, _documents_bwd)


def _pad_to(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more - size, 0) for size, more in zip(x.shape, shape)])


def _plain(q: Array, k: Array, v: Array, spec: AttnSpec, mask: Array | None = None) -> Array:
    window = None if spec.static_window is None else (spec.static_window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=spec.scale, is_causal=spec.causal, local_window_size=window, implementation="cudnn"
    )


def _masked(q: Array, k: Array, v: Array, segments_BT: Array, spec: AttnSpec) -> Array:
    """Computes attention with a mask, which cuDNN takes as a bias [batch, 1, queries, keys] and differentiates.

    To bound its size, long sequences are split into equal blocks of queries, each with all keys.
    """
    B, T = segments_BT.shape
    count = min(n for n in range(1, T + 1) if T % n == 0 and (B * T * T // n <= MAX_MASK or n == T))
    unmasked = replace(spec, causal=False, window=None)
    if count == 1:  # cuDNN applies causality and window
        mask = attention_mask(unmasked, TokenOrder(segments_BT, segments_BT), slice(0, T), slice(0, T))
        return _plain(q, k, v, spec, None if mask is None else mask[:, None])
    block = T // count

    @jax.checkpoint  # else the scan would save the mask of every block
    def attend_block(_, xs):
        first, q, segments = xs
        mask = attention_mask(spec, TokenOrder(segments, segments_BT), slice(0, block), slice(0, T), first)
        return None, _plain(q, k, v, unmasked, None if mask is None else mask[:, None])

    split = (jnp.moveaxis(x.reshape(B, count, block, *x.shape[2:]), 1, 0) for x in (q, segments_BT))
    _, out = lax.scan(attend_block, None, (block * jnp.arange(count, dtype=jnp.int32), *split))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _run_limits(time: int) -> tuple[int, ...]:
    """Returns the maximum number of runs per row, for each packed branch."""
    return FEW_RUNS, max(MANY_RUNS, time // TOKENS_PER_RUN)


def _runs(segments_BT: Array) -> Array:
    """Returns the number, from 0, of each token's run of equal segment ids; padding counts as a run."""
    changed = segments_BT[:, 1:] != segments_BT[:, :-1]
    return jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def _run_offsets(runs_BT: Array, limit: int) -> tuple[Array, Array]:
    """Returns lengths [batch, limit] and offsets [batch, limit + 1] of the runs; -1 for none."""
    sizes = (runs_BT[:, :, None] == jnp.arange(limit, dtype=jnp.int32)).sum(1, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes
    none = jnp.full((sizes.shape[0], 1), -1, jnp.int32)
    empty = sizes == 0
    return jnp.where(empty, -1, sizes), jnp.concatenate([jnp.where(empty, -1, starts), none], axis=1)


def _packed(q: Array, k: Array, v: Array, runs_BT: Array, limit: int, spec: AttnSpec) -> Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # jax 0.10 has no public function with offsets

    sizes, offsets = _run_offsets(runs_BT, limit)
    kind = cudnn.MaskType.PADDING_CAUSAL if spec.causal else cudnn.MaskType.PADDING
    out: Any = cudnn.dot_product_attention(
        q, k, v, q_seqlen=sizes, kv_seqlen=sizes, q_offsets=offsets, kv_offsets=offsets, scale=spec.scale,
        mask_type=kind, sliding_window_length=spec.static_window,
    )  # fmt: skip
    return out


@cache
def _grouped_offsets_are_right() -> bool:
    """Returns whether JAX scales the offsets of the keys by the heads of the keys.

    JAX 0.10 scales them by the heads of the queries, and grouped queries then read wrong tokens without an error (jax
    pull request 39521). This calls the function itself, so that no list of versions is needed.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    if not hasattr(cudnn, "_fix_seqlen_offsets"):
        return False
    with jax.ensure_compile_time_eval():
        sizes, offsets = jnp.array([[1, 1]], jnp.int32), jnp.array([[0, 1, -1]], jnp.int32)
        q, k = jnp.zeros((1, 2, 4, 1)), jnp.zeros((1, 2, 2, 1))
        fixed = cudnn._fix_seqlen_offsets(sizes, sizes, offsets, offsets, q, k)
        return int(fixed[3][0, 1]) == 2
