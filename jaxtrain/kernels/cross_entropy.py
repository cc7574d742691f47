"""Cross-entropy fused with the output projection: the logits of the batch never exist.

The vocabulary is walked in chunks with a running maximum and sum in float32; the backward pass computes each
chunk's logits again and emits the chunk's weight gradient at once. So a head stored in shards (FSDP) is
gathered chunk by chunk, once per pass. A vocabulary of one chunk has its logits kept instead: they take no more
memory than that chunk takes in any case. With the vocabulary sharded (tensor parallel) each shard keeps its own
statistics under an explicit `shards` dim; they are combined once, after the last chunk.

The running softmax is that of Milakov and Gimelshein (2018), arXiv:1805.02867; the z-loss is from ST-MoE,
arXiv:2202.08906, section 3; soft caps on logits are Gemma 2's, arXiv:2408.00118.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.sharding.rules import dims_without_axes, storage_axes
from jaxtrain.sharding.sharder import Dims, Sharder

Term = tuple[Array, Array]  # (sum, weight), float32 scalars

MASKED = -1e30  # finite, so that a wholly masked chunk gives no NaN
LANES = 128  # chunks of the vocabulary are multiples of this, for the matrix units
SMALLEST = 512  # a smaller chunk costs more in steps of the loop than it saves


def cross_entropy(
    x_BTD: Array,
    head: Array,
    targets_BT: Array,
    weights_BT: Array,
    *,
    chunks: int = 8,
    tied: bool = False,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    names: Sequence[str | None] | None = None,
    sharder: Sharder | None = None,
) -> dict[str, Term]:
    """Loss terms of a language model from its last hidden state.

    Args:
        x_BTD: final hidden states [batch, time, embed]; their dtype is the compute dtype of the matmuls
            (accumulation is float32).
        head: projection [embed, vocab], or the embedding table [vocab, embed] when `tied`; any float dtype, it
            is cast chunk by chunk.
        targets_BT: int token ids [batch, time].
        weights_BT: float32 [batch, time]; 0 leaves a token out. Not differentiated.
        chunks: chunks of each shard's part of the vocabulary, fewer where they would be smaller than 512 ids; a
            float32 chunk of logits, 4 * batch * time * vocab / chunks bytes, is what the loss needs in memory. With
            one chunk the logits are kept for the backward pass, which saves a matmul; more never hold them all.
        tied: `head` is an embedding table. No transposed copy is made.
        z_loss: coefficient of log(Z)^2; 0 leaves the term out.
        label_smoothing: probability spread evenly over the vocabulary.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        names: logical names of the dims of `head` as stored; default ("embed", "vocab"), reversed when tied.
        sharder: places tensors; None runs unsharded.

    Returns:
        `cross_entropy` and, with a coefficient, `z_loss`: (sum, weight) float32 scalars over the batch. The
        z-loss sum already carries its coefficient, so that the loss is the plain sum of the terms.

    Raises:
        ValueError: shapes that do not fit, or options out of range.
    """
    _check(x_BTD, head, targets_BT, weights_BT, chunks, tied, label_smoothing)
    if names is None:
        names = ("vocab", "embed") if tied else ("embed", "vocab")
    plan = _ChunkSpec.make(sharder or Sharder(), tuple(names), head.shape, chunks, tied, label_smoothing, softcap)
    weights_BT = lax.stop_gradient(weights_BT.astype(jnp.float32))
    with jax.named_scope("cross_entropy"):
        sums: Any = _sums(plan, x_BTD, head, targets_BT, weights_BT)
        total, squares = sums
        weight = weights_BT.sum()
    terms = {"cross_entropy": (total, weight)}
    if z_loss:
        terms["z_loss"] = (z_loss * squares, weight)
    return terms


def recomputes(vocab: int, chunks: int, sharder: Sharder | None = None) -> bool:
    """Returns whether the backward pass computes the logits again: those of a shard of the vocabulary are in several
    chunks.
    """
    part = _split(sharder or Sharder(), vocab)[2]
    return _chunk(part, chunks) < part


def _split(sharder: Sharder, vocab: int) -> tuple[tuple[str, ...], int, int]:
    """Mesh axes that split the vocabulary, number of shards, ids of one, after padding to whole shards.

    Not the axes over which weights are only stored in shards: over these the head is gathered.
    """
    if sharder.mesh is None:
        return (), 1, vocab
    gathered = storage_axes(sharder.rules or {})
    over = tuple(axis for axis in sharder.axes("vocab") if axis not in gathered)
    shards = prod(sharder.mesh.shape[axis] for axis in over)
    return over, shards, -(-vocab // shards)


def _chunk(part: int, chunks: int) -> int:
    """Ids of a chunk."""
    return min(part, max(SMALLEST, -(-part // (chunks * LANES)) * LANES))


def _check(x: Array, head: Array, targets: Array, weights: Array, chunks: int, tied: bool, smoothing: float) -> None:
    if x.ndim != 3 or head.ndim != 2 or head.shape[1 if tied else 0] != x.shape[-1]:
        want = "[vocab, embed]" if tied else "[embed, vocab]"
        raise ValueError(f"cross_entropy: head {head.shape} does not fit x {x.shape}: {want} with x's last size")
    if targets.shape != x.shape[:2] or weights.shape != x.shape[:2]:
        raise ValueError(f"cross_entropy: targets {targets.shape} and weights {weights.shape} must be {x.shape[:2]}")
    if chunks < 1:
        raise ValueError(f"cross_entropy: chunks is {chunks}; at least 1")
    if not 0 <= smoothing < 1:
        raise ValueError(f"cross_entropy: label_smoothing is {smoothing}; from 0 up to, not including, 1")


@dataclass(frozen=True)
class _ChunkSpec:
    """Everything static: how the vocabulary is cut and where each tensor lives. Hashable."""

    sharder: Sharder
    tied: bool
    smoothing: float
    softcap: float | None
    vocab: int
    shards: int
    part: int  # vocabulary per shard, after padding to whole shards
    size: int  # vocabulary per chunk of a shard
    count: int  # chunks per shard
    parameter: Dims  # mesh axes of the head as it comes
    kept: Dims  # of its gradient
    stored: Dims  # of a chunk before gathering
    graded: Dims  # of a chunk's gradient
    used: Dims  # of a chunk in the matmul
    tokens: Dims  # of [batch, time]
    over: tuple[str, ...]  # of the shards dim

    @classmethod
    def make(cls, sharder, names, shape, chunks, tied, smoothing, softcap) -> _ChunkSpec:
        rules = (sharder.rules if sharder.mesh is not None else None) or {}
        parameter = dims_without_axes(names, (), rules)
        kept = sharder.storage_dims(names, shape) if rules else parameter
        vocab, embed = (0, 1) if tied else (1, 0)
        # Replicas that keep shards of the state (ZeRO) get shards of every chunk's gradient.
        more = tuple(a for a in kept[embed] if a not in parameter[embed])
        gathered = storage_axes(rules)
        held = tuple(a for dim in parameter for a in dim if a in gathered)  # FSDP axes, kept on embed until used
        over, shards, part = _split(sharder, shape[vocab])
        size = _chunk(part, chunks)
        order = (lambda embed: (over, (), embed)) if tied else (lambda embed: (embed, over, ()))
        return cls(
            sharder=sharder,
            tied=tied,
            smoothing=smoothing,
            softcap=softcap,
            vocab=shape[vocab],
            shards=shards,
            part=part,
            size=size,
            count=-(-part // size),
            parameter=parameter,
            kept=kept,
            stored=order(held),
            graded=order((*held, *more)),
            used=order(()),
            tokens=dims_without_axes(("batch", "context"), (), rules),
            over=over,
        )

    @property
    def dim(self) -> int:
        """The vocabulary dim of the [embed, shards, part] view; [shards, part, embed] when tied."""
        return 1 if self.tied else 2

    @property
    def masks(self) -> bool:
        """True if some column of some chunk must not be counted."""
        return self.part % self.size != 0 or self.part * self.shards != self.vocab

    def view(self, head: Array, dtype: Any) -> Array:
        """The head with its vocabulary split into shards; cast first where the split has to move or pad data."""
        extra = self.part * self.shards - self.vocab
        embed = head.shape[1 if self.tied else 0]
        if extra:
            head = jnp.pad(head.astype(dtype), ((0, extra), (0, 0)) if self.tied else ((0, 0), (0, extra)))
        elif self.moves:
            head = head.astype(dtype)
        shape = (self.shards, self.part, embed) if self.tied else (embed, self.shards, self.part)
        return self.sharder.constrain_dims(head.reshape(shape), self.stored)

    @property
    def moves(self) -> bool:
        """True if the view lies elsewhere than the parameter."""
        vocab, embed = self.parameter if self.tied else self.parameter[::-1]
        return vocab != self.over or embed != self.stored[2 if self.tied else 0]

    def chunk(self, view: Array, index: Array, dtype: Any) -> tuple[Array, Array, Array]:
        """Chunk `index`, ready for the matmul; its start in the part; the vocabulary ids [shards, size] it holds.

        The last chunk may begin early, so as to be whole; ids that an earlier chunk held, or that are padding,
        are -1.
        """
        start = jnp.minimum(index * self.size, self.part - self.size)
        w = lax.dynamic_slice_in_dim(view, start, self.size, self.dim)
        # Cast, hold in shards, then gather: so that the compute dtype travels.
        w = self.sharder.constrain_dims(self.sharder.constrain_dims(w.astype(dtype), self.stored), self.used)
        column = start + jnp.arange(self.size, dtype=jnp.int32)
        ids = column + self.part * jnp.arange(self.shards, dtype=jnp.int32)[:, None]
        if self.masks:
            ids = jnp.where((column >= index * self.size) & (ids < self.vocab), ids, -1)
        return w, start, ids

    def logits(self, x: Array, w: Array) -> Array:
        """float32 logits [batch, time, shards, size], capped."""
        logits = jnp.einsum("btd,ncd->btnc" if self.tied else "btd,dnc->btnc", x, w, preferred_element_type=jnp.float32)
        logits = self.sharder.constrain_dims(logits, (*self.tokens, self.over, ()))
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def unsplit(self, view: Array) -> Array:
        """The inverse of `view` for a gradient."""
        rest = slice(self.vocab)
        flat = view.reshape(-1, view.shape[-1])[rest] if self.tied else view.reshape(view.shape[0], -1)[:, rest]
        return self.sharder.constrain_dims(flat, self.kept)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(plan: _ChunkSpec, x: Array, head: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Weighted sums of the cross-entropy and of log(Z)^2."""
    return _sums_fwd(plan, x, head, targets, weights)[0]


def _sums_fwd(plan: _ChunkSpec, x: Array, head: Array, targets: Array, weights: Array):
    # Gathered once over the sequence-parallel axes and kept: the backward pass follows at once.
    x = plan.sharder.constrain_dims(x, (*plan.tokens, ()))
    z, label, total, logits = _statistics(plan, x, head, targets)
    nll = z - (1 - plan.smoothing) * label
    if plan.smoothing:
        nll -= plan.smoothing / plan.vocab * total
    sums = (jnp.sum(weights * nll), jnp.sum(weights * jnp.square(z)))
    return sums, (x, head, targets, weights, z, logits)


def _statistics(plan: _ChunkSpec, x: Array, head: Array, targets: Array) -> tuple[Array, Array, Array, Array | None]:
    """Log Z, the label's logit and the sum of all logits, each float32 [batch, time]; the logits of an only chunk."""
    view = plan.view(head, x.dtype)
    kept = (*plan.tokens, plan.over)

    def body(carry, index):
        top, z, label, total = carry
        w, _, ids = plan.chunk(view, index, x.dtype)
        logits = plan.logits(x, w)
        if plan.masks:
            logits = jnp.where(ids >= 0, logits, MASKED)
        new = jnp.maximum(top, logits.max(-1))
        z = z * jnp.exp(top - new) + jnp.exp(logits - new[..., None]).sum(-1)
        label += jnp.where(ids == targets[..., None, None], logits, 0.0).sum(-1)
        if plan.smoothing:
            total += jnp.where(ids >= 0, logits, 0.0).sum(-1)
        return tuple(plan.sharder.constrain_dims(a, kept) for a in (new, z, label, total)), logits

    zeros = plan.sharder.constrain_dims(jnp.zeros((*targets.shape, plan.shards), jnp.float32), kept)
    start = (zeros + MASKED, zeros, zeros, zeros)
    if plan.count == 1:
        (top, z, label, total), only = body(start, jnp.int32(0))
    else:
        indices = jnp.arange(plan.count, dtype=jnp.int32)
        (top, z, label, total), only = lax.scan(lambda c, i: (body(c, i)[0], None), start, indices)
    highest = top.max(-1)
    z = highest + jnp.log((z * jnp.exp(top - highest[..., None])).sum(-1))
    return z, label.sum(-1), total.sum(-1), only


def _sums_bwd(plan: _ChunkSpec, saved, cotangents):
    x, head, targets, weights, z, only = saved
    g_nll, g_squares = cotangents
    view = plan.view(head, x.dtype)
    scale = (weights * (g_nll + 2 * g_squares * z))[..., None, None]  # of the probabilities
    hit = (weights * g_nll * (1 - plan.smoothing))[..., None, None]  # of the label
    rest = (weights * g_nll * plan.smoothing / plan.vocab)[..., None, None]  # of every id
    dx_places = (*plan.tokens, plan.over, ())

    def body(carry, index):
        dx, dview = carry
        w, start, ids = plan.chunk(view, index, x.dtype)
        logits = plan.logits(x, w) if only is None else only
        d = scale * jnp.exp(logits - z[..., None, None]) - jnp.where(ids == targets[..., None, None], hit, 0.0)
        if plan.smoothing:
            d -= rest
        if plan.softcap is not None:
            d *= 1 - jnp.square(logits / plan.softcap)
        if plan.masks:
            d = jnp.where(ids >= 0, d, 0.0)
        d = plan.sharder.constrain_dims(d.astype(x.dtype), dx_places)
        back = "btnc,ncd->btnd" if plan.tied else "btnc,dnc->btnd"
        dx += jnp.einsum(back, d, w, preferred_element_type=jnp.float32)
        dw = jnp.einsum("btd,btnc->ncd" if plan.tied else "btd,btnc->dnc", x, d)
        dw = plan.sharder.constrain_dims(dw, plan.graded).astype(
            dview.dtype
        )  # reduced into the shards, in compute dtype
        if plan.part % plan.size:  # the last chunk overlaps the one before
            dw += lax.dynamic_slice_in_dim(dview, start, plan.size, plan.dim)
        dview = lax.dynamic_update_slice_in_dim(dview, dw, start, plan.dim)
        return (plan.sharder.constrain_dims(dx, dx_places), plan.sharder.constrain_dims(dview, plan.graded)), None

    dx = jnp.zeros((*targets.shape, plan.shards, x.shape[-1]), jnp.float32)
    dview = jnp.zeros(view.shape, head.dtype)
    start = (plan.sharder.constrain_dims(dx, dx_places), plan.sharder.constrain_dims(dview, plan.graded))
    if plan.count == 1:
        (dx, dview), _ = body(start, jnp.int32(0))
    else:
        (dx, dview), _ = lax.scan(body, start, jnp.arange(plan.count, dtype=jnp.int32))
    # A matmul, because jnp.sum would widen what travels to float32, and the reducer of a bfloat16 lax.reduce comes out
    # of a shard_map over other axes with a copy in it, on which XLA's CPU compiler aborts (AllReducePromotion).
    dx = dx.astype(x.dtype)
    dx = dx[:, :, 0] if plan.shards == 1 else jnp.einsum("btnd,n->btd", dx, jnp.ones((plan.shards,), x.dtype))
    dx = plan.sharder.constrain(dx, "batch", "sequence", None)
    return dx, plan.unsplit(dview), None, None


_sums.defvjp(_sums_fwd, _sums_bwd)
