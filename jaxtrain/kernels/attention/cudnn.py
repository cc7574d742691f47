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

from jaxtrain.kernels.attention.spec import RESIDUALS, Case, TokenOrder, visible

HOPPER = (9, 0)
# Documents a row, few and many; longer rows hold more, see `_places`. Two, because cuDNN's backward kernel clears and
# adds up a float32 gradient for every place, taken or not.
FEW, RUNS = 4, 16
TOKENS_PER_RUN = 512  # cuDNN keeps a float32 statistic per run, head and token
MASK = 2**27  # elements of a mask that is made at a time


def refusal(case: Case, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: Any, hopper: bool) -> str | None:
    """Returns the reason why this kernel can not do the case, or None."""
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
    when compiling, few or many, and chosen on the device; a batch with more of them takes cuDNN with a mask instead,
    and so do earlier GPUs always.
    """
    if segments_BT is None:
        return _whole(case, q_BTHD, k_BSKD, v_BSKD)
    if hopper:
        if q_BTHD.shape[2] != k_BSKD.shape[2] and not _grouped_offsets_are_right():
            groups = q_BTHD.shape[2] // k_BSKD.shape[2]
            k_BSKD, v_BSKD = (jnp.repeat(x, groups, axis=2) for x in (k_BSKD, v_BSKD))
        out: Any = _documents(case, q_BTHD, k_BSKD, v_BSKD, segments_BT)
    else:
        out = _masked(q_BTHD, k_BSKD, v_BSKD, segments_BT, case)
    # Padding saw itself or everything: a select gives 0, and takes its gradient away.
    return jnp.where((segments_BT != 0)[:, :, None, None], out, jnp.zeros((), out.dtype))


def _differentiate(run: Callable, inputs: tuple[Array, ...]) -> tuple[Array, list[Array], Callable]:
    """Output, what its backward pass needs besides it and `inputs`, and how to make the pull-back of all three."""
    out, pull = jax.vjp(run, *inputs)
    leaves, tree = jax.tree.flatten(pull)
    source = [next((i for i, x in enumerate((*inputs, out)) if x is leaf), None) for leaf in leaves]
    others = [leaf for leaf, i in zip(leaves, source) if i is None]

    def rebuild(others: list[Array], *known: Array) -> Callable:
        rest = iter(others)
        return tree.unflatten([next(rest) if i is None else known[i] for i in source])

    return out, others, rebuild


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(case: Case, q: Array, k: Array, v: Array) -> Array:
    """Attention without segments. A derivative of its own, to name what it keeps for remat policies."""
    return _plain(q, k, v, case)


def _whole_fwd(case, q, k, v):
    out, others, rebuild = _differentiate(partial(_plain, case=case), (q, k, v))
    out, *others = (checkpoint_name(x, RESIDUALS) for x in (out, *others))
    return out, rebuild(others, q, k, v, out)


_whole.defvjp(_whole_fwd, lambda case, pull, g: pull(g))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _documents(case: Case, q: Array, k: Array, v: Array, segments_BT: Array) -> Array:
    """Attention within segments: packed in as few places a row as hold the runs, masked if there are too many.

    A derivative of its own, because `lax.switch` would keep what the backward passes of *all* branches need. The
    packed ones keep the same arrays, filled up to the shapes of the one with most places; the masked one keeps nothing
    and runs again.
    """
    return _documents_fwd(case, q, k, v, segments_BT)[0]


def _documents_fwd(case, q, k, v, segments_BT):
    runs_BT = _runs(segments_BT)
    places = _places(segments_BT.shape[1])
    which = sum((runs_BT.max() >= most).astype(jnp.int32) for most in places)
    rebuilds = {}  # not arrays, so they leave the branches by the side; the last trace is the one that counts

    def packed(most, q, k, v):
        run = partial(_packed, runs_BT=runs_BT, most=most, case=case)
        out, others, rebuilds[most] = _differentiate(run, (q, k, v))
        return out, others

    kept = {most: jax.eval_shape(partial(packed, most), q, k, v)[1] for most in places}
    widest = kept[places[-1]]

    def filled(most, q, k, v):
        out, others = packed(most, q, k, v)
        return out, [_filled(x, like.shape) for x, like in zip(others, widest)]

    def masked(q, k, v):
        return _masked(q, k, v, segments_BT, case), [jnp.zeros(x.shape, x.dtype) for x in widest]

    out, others = lax.switch(which, [*(partial(filled, most) for most in places), masked], q, k, v)
    out, *others = (checkpoint_name(x, RESIDUALS) for x in (out, *others))

    def pull(most, others, q, k, v, out, g):
        own = [lax.slice(x, (0,) * x.ndim, like.shape) for x, like in zip(others, kept[most])]
        return rebuilds[most](own, q, k, v, out)(g)

    pulls = tuple(Partial(partial(pull, most)) for most in places)
    return out, (which, q, k, v, segments_BT, out, others, pulls)


def _documents_bwd(case, saved, g):
    which, q, k, v, segments_BT, out, others, pulls = saved

    def masked(others, q, k, v, out, g):
        return jax.vjp(partial(_masked, segments_BT=segments_BT, case=case), q, k, v)[1](g)

    return *lax.switch(which, [*pulls, masked], others, q, k, v, out, g), None


_documents.defvjp(_documents_fwd, _documents_bwd)


def _filled(x: Array, shape: tuple[int, ...]) -> Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, more - size, 0) for size, more in zip(x.shape, shape)])


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
    count = min(n for n in range(1, T + 1) if T % n == 0 and (B * T * T // n <= MASK or n == T))
    if count == 1:  # causality and window are cuDNN's own
        mask = visible(
            replace(case, causal=False, window=None), TokenOrder(segments_BT, segments_BT), slice(0, T), slice(0, T)
        )
        return _plain(q, k, v, case, None if mask is None else mask[:, None])
    block = T // count
    plain = replace(case, causal=False, window=None)

    @jax.checkpoint  # or the scan would keep every block's mask
    def one(_, xs):
        first, q, segments = xs
        mask = visible(case, TokenOrder(segments, segments_BT), slice(0, block), slice(0, T), first)
        return None, _plain(q, k, v, plain, None if mask is None else mask[:, None])

    split = (jnp.moveaxis(x.reshape(B, count, block, *x.shape[2:]), 1, 0) for x in (q, segments_BT))
    _, out = lax.scan(one, None, (block * jnp.arange(count, dtype=jnp.int32), *split))
    return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def _places(time: int) -> tuple[int, ...]:
    """Returns how many runs a row may hold, by branch."""
    return FEW, max(RUNS, time // TOKENS_PER_RUN)


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
    """Returns whether JAX scales the offsets of the keys by the heads of the keys.

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
