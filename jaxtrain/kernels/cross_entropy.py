"""Cross-entropy fused with the output projection: the logits of the whole batch never exist.

A loop over chunks of the vocabulary computes a running maximum and sum in float32; the backward pass recomputes the
logits of each chunk and its weight gradient. So a head that is sharded by FSDP is gathered chunk by chunk, once per
pass. With a single chunk its logits are saved instead, which takes no more memory. If the vocabulary is sharded (tensor
parallel), each shard has its own statistics under an explicit `shards` dim; they are combined after the last chunk.

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

MASKED = -1e30  # finite, so that a fully masked chunk gives no NaN
LANES = 128  # chunks of the vocabulary are multiples of this, for the matrix units
MIN_CHUNK = 512  # smaller chunks cost more in loop iterations than they save


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
    """Returns the loss terms of a language model from its last hidden state.

    Args:
        x_BTD: final hidden states [batch, time, embed]; their dtype is the compute dtype of the matmuls
            (accumulation is float32).
        head: projection [embed, vocab], or the embedding table [vocab, embed] when `tied`; any float dtype, it
            is cast chunk by chunk.
        targets_BT: int token ids [batch, time].
        weights_BT: float32 [batch, time]; 0 leaves a token out. Not differentiated.
        chunks: chunks of each shard of the vocabulary, fewer if they would be smaller than 512 ids. The loss needs
            memory for a float32 chunk of logits, 4 * batch * time * vocab / chunks bytes. One chunk saves its logits
            for the backward pass and thus a matmul; several recompute them.
        tied: `head` is an embedding table, which is not transposed.
        z_loss: coefficient of log(Z)^2; 0 leaves the term out.
        label_smoothing: probability spread evenly over the vocabulary.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        names: logical names of the dims of `head` as stored; default ("embed", "vocab"), reversed when tied.
        sharder: mesh and rules; None runs unsharded.

    Returns:
        `cross_entropy` and, with a coefficient, `z_loss`: (sum, weight) float32 scalars over the batch. The
        z-loss sum already carries its coefficient, so that the loss is the plain sum of the terms.

    Raises:
        ValueError: shapes do not fit, or options are out of range.
    """
    _check(x_BTD, head, targets_BT, weights_BT, chunks, tied, label_smoothing)
    if names is None:
        names = ("vocab", "embed") if tied else ("embed", "vocab")
    spec = _ChunkSpec.make(sharder or Sharder(), tuple(names), head.shape, chunks, tied, label_smoothing, softcap)
    weights_BT = lax.stop_gradient(weights_BT.astype(jnp.float32))
    with jax.named_scope("cross_entropy"):
        sums: Any = _sums(spec, x_BTD, head, targets_BT, weights_BT)
        total, squares = sums
        weight = weights_BT.sum()
    terms = {"cross_entropy": (total, weight)}
    if z_loss:
        terms["z_loss"] = (z_loss * squares, weight)
    return terms


def recomputes(vocab: int, chunks: int, sharder: Sharder | None = None) -> bool:
    """Returns whether the backward pass recomputes the logits: with several chunks per shard of the vocabulary."""
    part = _vocab_shards(sharder or Sharder(), vocab)[2]
    return _chunk_size(part, chunks) < part


def _vocab_shards(sharder: Sharder, vocab: int) -> tuple[tuple[str, ...], int, int]:
    """Returns the mesh axes that shard the vocabulary, the number of shards, and the ids of one, after padding.

    Storage axes (FSDP) do not count: over these the head is gathered.
    """
    if sharder.mesh is None:
        return (), 1, vocab
    gathered = storage_axes(sharder.rules or {})
    over = tuple(axis for axis in sharder.axes("vocab") if axis not in gathered)
    shards = prod(sharder.mesh.shape[axis] for axis in over)
    return over, shards, -(-vocab // shards)


def _chunk_size(part: int, chunks: int) -> int:
    """Returns the ids of a chunk."""
    return min(part, max(MIN_CHUNK, -(-part // (chunks * LANES)) * LANES))


def _check(x: Array, head: Array, targets: Array, weights: Array, chunks: int, tied: bool, smoothing: float) -> None:
    if x.ndim != 3 or head.ndim != 2 or head.shape[1 if tied else 0] != x.shape[-1]:
        expected = "[vocab, embed]" if tied else "[embed, vocab]"
        raise ValueError(f"cross_entropy: head {head.shape} does not fit x {x.shape}; expected {expected}")
    if targets.shape != x.shape[:2] or weights.shape != x.shape[:2]:
        raise ValueError(f"cross_entropy: targets {targets.shape} and weights {weights.shape} must be {x.shape[:2]}")
    if chunks < 1:
        raise ValueError(f"cross_entropy: chunks is {chunks}; expected at least 1")
    if not 0 <= smoothing < 1:
        raise ValueError(f"cross_entropy: label_smoothing is {smoothing}; expected 0 <= label_smoothing < 1")


@dataclass(frozen=True)
class _ChunkSpec:
    """Static options: chunks of the vocabulary and sharding of all tensors. Hashable."""

    sharder: Sharder
    tied: bool
    smoothing: float
    softcap: float | None
    vocab: int
    shards: int
    part: int  # ids per shard, after padding to whole shards
    size: int  # ids per chunk of a shard
    count: int  # chunks per shard
    head: Dims  # mesh axes of the head
    head_grad: Dims  # of its gradient
    stored: Dims  # of a chunk before it is gathered
    chunk_grad: Dims  # of the gradient of a chunk
    gathered: Dims  # of a chunk in the matmul
    tokens: Dims  # of [batch, time]
    vocab_axes: tuple[str, ...]  # of the shards dim

    @classmethod
    def make(cls, sharder, names, shape, chunks, tied, smoothing, softcap) -> _ChunkSpec:
        rules = (sharder.rules if sharder.mesh is not None else None) or {}
        head = dims_without_axes(names, (), rules)
        head_grad = sharder.storage_dims(names, shape) if rules else head
        vocab, embed = (0, 1) if tied else (1, 0)
        # With ZeRO, gradients of chunks are sharded over the data axis like the state.
        zero_axes = tuple(a for a in head_grad[embed] if a not in head[embed])
        fsdp_axes = tuple(a for dim in head for a in dim if a in storage_axes(rules))  # shard embed until the gather
        vocab_axes, shards, part = _vocab_shards(sharder, shape[vocab])
        size = _chunk_size(part, chunks)
        dims = (lambda embed: (vocab_axes, (), embed)) if tied else (lambda embed: (embed, vocab_axes, ()))
        return cls(
            sharder, tied, smoothing, softcap, shape[vocab], shards, part, size, count=-(-part // size),
            head=head, head_grad=head_grad, stored=dims(fsdp_axes), chunk_grad=dims((*fsdp_axes, *zero_axes)),
            gathered=dims(()), tokens=dims_without_axes(("batch", "context"), (), rules), vocab_axes=vocab_axes,
        )  # fmt: skip

    @property
    def dim(self) -> int:
        """The vocabulary dim of the [embed, shards, part] view; [shards, part, embed] when tied."""
        return 1 if self.tied else 2

    @property
    def has_masked_ids(self) -> bool:
        """True if some ids of some chunk are padding or in an earlier chunk."""
        return self.part % self.size != 0 or self.part * self.shards != self.vocab

    def view(self, head: Array, dtype: Any) -> Array:
        """Returns the head with its vocabulary split into shards; cast first if that moves or pads data."""
        extra = self.part * self.shards - self.vocab
        embed = head.shape[1 if self.tied else 0]
        if extra:
            head = jnp.pad(head.astype(dtype), ((0, extra), (0, 0)) if self.tied else ((0, 0), (0, extra)))
        elif self.is_resharded:
            head = head.astype(dtype)
        shape = (self.shards, self.part, embed) if self.tied else (embed, self.shards, self.part)
        return self.sharder.constrain_dims(head.reshape(shape), self.stored)

    @property
    def is_resharded(self) -> bool:
        """True if the view has another sharding than the head."""
        vocab, embed = self.head if self.tied else self.head[::-1]
        return vocab != self.vocab_axes or embed != self.stored[2 if self.tied else 0]

    def chunk(self, view: Array, index: Array, dtype: Any) -> tuple[Array, Array, Array]:
        """Returns chunk `index` for the matmul, its start in the part, and its vocabulary ids [shards, size].

        The last chunk may overlap the one before, so that all have one size; ids of an earlier chunk and padding are
        -1.
        """
        start = jnp.minimum(index * self.size, self.part - self.size)
        w = lax.dynamic_slice_in_dim(view, start, self.size, self.dim)
        # Cast and constrain to shards before the gather, so that the compute dtype is sent.
        w = self.sharder.constrain_dims(self.sharder.constrain_dims(w.astype(dtype), self.stored), self.gathered)
        column = start + jnp.arange(self.size, dtype=jnp.int32)
        ids = column + self.part * jnp.arange(self.shards, dtype=jnp.int32)[:, None]
        if self.has_masked_ids:
            ids = jnp.where((column >= index * self.size) & (ids < self.vocab), ids, -1)
        return w, start, ids

    def logits(self, x: Array, w: Array) -> Array:
        """Returns float32 logits [batch, time, shards, size], capped."""
        logits = jnp.einsum("btd,ncd->btnc" if self.tied else "btd,dnc->btnc", x, w, preferred_element_type=jnp.float32)
        logits = self.sharder.constrain_dims(logits, (*self.tokens, self.vocab_axes, ()))
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def unsplit(self, view: Array) -> Array:
        """Inverts `view` for a gradient."""
        rest = slice(self.vocab)
        flat = view.reshape(-1, view.shape[-1])[rest] if self.tied else view.reshape(view.shape[0], -1)[:, rest]
        return self.sharder.constrain_dims(flat, self.head_grad)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(spec: _ChunkSpec, x: Array, head: Array, targets: Array, weights: Array) -> tuple[Array, Array]:
    """Returns the weighted sums of the cross-entropy and of log(Z)^2."""
    return _sums_fwd(spec, x, head, targets, weights)[0]


def _sums_fwd(spec: _ChunkSpec, x: Array, head: Array, targets: Array, weights: Array):
    # Gathered once over the sequence-parallel axes and saved, as the backward pass follows immediately.
    x = spec.sharder.constrain_dims(x, (*spec.tokens, ()))
    z, label, total, logits = _statistics(spec, x, head, targets)
    nll = z - (1 - spec.smoothing) * label
    if spec.smoothing:
        nll -= spec.smoothing / spec.vocab * total
    sums = (jnp.sum(weights * nll), jnp.sum(weights * jnp.square(z)))
    return sums, (x, head, targets, weights, z, logits)


def _statistics(spec: _ChunkSpec, x: Array, head: Array, targets: Array) -> tuple[Array, Array, Array, Array | None]:
    """Returns log Z, the label's logit and the sum of logits, float32 [batch, time]; and logits of a single chunk."""
    view = spec.view(head, x.dtype)
    dims = (*spec.tokens, spec.vocab_axes)

    def body(carry, index):
        top, z, label, total = carry
        w, _, ids = spec.chunk(view, index, x.dtype)
        logits = spec.logits(x, w)
        if spec.has_masked_ids:
            logits = jnp.where(ids >= 0, logits, MASKED)
        new = jnp.maximum(top, logits.max(-1))
        z = z * jnp.exp(top - new) + jnp.exp(logits - new[..., None]).sum(-1)
        label += jnp.where(ids == targets[..., None, None], logits, 0.0).sum(-1)
        if spec.smoothing:
            total += jnp.where(ids >= 0, logits, 0.0).sum(-1)
        return tuple(spec.sharder.constrain_dims(a, dims) for a in (new, z, label, total)), logits

    zeros = spec.sharder.constrain_dims(jnp.zeros((*targets.shape, spec.shards), jnp.float32), dims)
    start = (zeros + MASKED, zeros, zeros, zeros)
    if spec.count == 1:
        (top, z, label, total), single_logits = body(start, jnp.int32(0))
    else:
        indices = jnp.arange(spec.count, dtype=jnp.int32)
        (top, z, label, total), single_logits = lax.scan(lambda c, i: (body(c, i)[0], None), start, indices)
    highest = top.max(-1)
    z = highest + jnp.log((z * jnp.exp(top - highest[..., None])).sum(-1))
    return z, label.sum(-1), total.sum(-1), single_logits


def _sums_bwd(spec: _ChunkSpec, residuals, cotangents):
    x, head, targets, weights, z, single_logits = residuals
    g_nll, g_squares = cotangents
    view = spec.view(head, x.dtype)
    scale = (weights * (g_nll + 2 * g_squares * z))[..., None, None]  # of the probabilities
    label_scale = (weights * g_nll * (1 - spec.smoothing))[..., None, None]  # of the label
    id_scale = (weights * g_nll * spec.smoothing / spec.vocab)[..., None, None]  # of every id
    dx_dims = (*spec.tokens, spec.vocab_axes, ())

    def body(carry, index):
        dx, dview = carry
        w, start, ids = spec.chunk(view, index, x.dtype)
        logits = spec.logits(x, w) if single_logits is None else single_logits
        d = scale * jnp.exp(logits - z[..., None, None]) - jnp.where(ids == targets[..., None, None], label_scale, 0.0)
        if spec.smoothing:
            d -= id_scale
        if spec.softcap is not None:
            d *= 1 - jnp.square(logits / spec.softcap)
        if spec.has_masked_ids:
            d = jnp.where(ids >= 0, d, 0.0)
        d = spec.sharder.constrain_dims(d.astype(x.dtype), dx_dims)
        equation = "btnc,ncd->btnd" if spec.tied else "btnc,dnc->btnd"
        dx += jnp.einsum(equation, d, w, preferred_element_type=jnp.float32)
        dw = jnp.einsum("btd,btnc->ncd" if spec.tied else "btd,btnc->dnc", x, d)
        # Reduced into the shards in the compute dtype, then cast.
        dw = spec.sharder.constrain_dims(dw, spec.chunk_grad).astype(dview.dtype)
        if spec.part % spec.size:  # the last chunk overlaps the one before
            dw += lax.dynamic_slice_in_dim(dview, start, spec.size, spec.dim)
        dview = lax.dynamic_update_slice_in_dim(dview, dw, start, spec.dim)
        return (spec.sharder.constrain_dims(dx, dx_dims), spec.sharder.constrain_dims(dview, spec.chunk_grad)), None

    dx = jnp.zeros((*targets.shape, spec.shards, x.shape[-1]), jnp.float32)
    dview = jnp.zeros(view.shape, head.dtype)
    start = (spec.sharder.constrain_dims(dx, dx_dims), spec.sharder.constrain_dims(dview, spec.chunk_grad))
    if spec.count == 1:
        (dx, dview), _ = body(start, jnp.int32(0))
    else:
        (dx, dview), _ = lax.scan(body, start, jnp.arange(spec.count, dtype=jnp.int32))
    # A matmul, because jnp.sum would communicate in float32, and a bfloat16 lax.reduce inside a shard_map over other
    # axes gets a copy in its reducer, on which XLA's CPU compiler aborts (AllReducePromotion).
    dx = dx.astype(x.dtype)
    dx = dx[:, :, 0] if spec.shards == 1 else jnp.einsum("btnd,n->btd", dx, jnp.ones((spec.shards,), x.dtype))
    dx = spec.sharder.constrain(dx, "batch", "sequence", None)
    return dx, spec.unsplit(dview), None, None


_sums.defvjp(_sums_fwd, _sums_bwd)
