"""Faults that real trainers had, as variants of the reference to recognise them, and as injections for tests.

The two sides are independent: a variant changes the batch that one device sees; an injection breaks a part of the
program that runs on a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.core.gradients import Gradients, split_microbatches
from jaxtrain.core.placement import Placer
from jaxtrain.nn import attention
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.verification.compare import Flat
from jaxtrain.verification.packed_batch import (
    Batch,
    repeat_rows,
    weight_rows,
    weight_tokens,
    without_document_boundaries,
)

MISSING, DOUBLED, SCALED = "missing-reduction", "doubled-reduction", "microbatch-scaling"
CONTEXT_MISSING, MASK, TAIL = "missing-context-reduction", "segment-mask", "dropped-tail"


def variants(
    gradients: Callable[[Batch], Flat], weight: Callable[[Batch], float], batch: Batch, shards: Mapping[str, int],
    microbatch_count: int, context: np.ndarray | None = None,
) -> dict[str, Flat]:  # fmt: skip
    """Returns fault -> gradients of one device with it.

    Rows are left out by their weights, or in a batch without those by repeating the others, which is the same for a
    model whose rows are independent.

    Args:
        gradients: returns those of a batch on one device.
        weight: returns the weight of the loss of a batch.
        batch: of the first step.
        shards: size of each axis that shards rows, in order.
        microbatch_count: number of microbatches.
        context: indices of the tokens of a row that the first shard of `context` holds; None: all.
    """
    out, has_weights, rows = {}, "weights" in batch, len(next(iter(batch.values())))
    only = partial(weight_rows if has_weights else repeat_rows, batch)
    if has_weights:
        out[TAIL + ": rows at the end of the batch do not count"] = gradients(only(np.arange(rows - 1)))
    if "segments" in batch:
        out[MASK + ": attention crosses documents"] = gradients(without_document_boundaries(batch))
    if has_weights and context is not None:
        part = weight_tokens(batch, context)
        share = weight(part) / weight(batch)
        own = {path: share * value for path, value in gradients(part).items()}
        out[CONTEXT_MISSING + ": loss and gradients are not summed over context"] = own
    grid = np.arange(rows).reshape(*shards.values(), -1)
    for dim, (axis, size) in enumerate(shards.items()):
        if size > 1:
            shard = np.take(grid, 0, dim).reshape(-1)
            share = weight(only(shard)) / weight(batch) / (1 if has_weights else size)
            part = {path: share * value for path, value in gradients(only(shard)).items()}
            out[f"{MISSING}: gradients are not summed over {axis}"] = part
    if microbatch_count > 1:
        starts = range(microbatch_count)
        parts = [gradients(only(np.arange(start, rows, microbatch_count))) for start in starts]
        mean = {path: np.mean([part[path] for part in parts], axis=0) for path in parts[0]}
        out[f"{SCALED}: each microbatch is normalised separately"] = mean
    return out


# Each of these replaces a method or function `real` of the program.


def _missing_reduction(real: Any, self: Gradients, params: Any, batch: Any, *rest: Any) -> Any:
    """Gradients are those of the first shard of rows."""
    axes = self.sharder.axes(BATCH)
    count = self.sharder.mesh.shape[axes[0]] if self.sharder.mesh is not None and axes else 1
    output = real(self, params, batch, *rest)
    rows = len(next(iter(batch.values())))
    if "weights" in batch:
        is_first = jnp.arange(rows) < rows // count
        part = real(self, params, {**batch, "weights": (batch["weights"].T * is_first).T}, *rest)
        share = sum(part.weights.values()) / sum(output.weights.values())
    else:
        part = real(self, params, {name: x[jnp.arange(rows) % (rows // count)] for name, x in batch.items()}, *rest)
        share = sum(part.weights.values()) / sum(output.weights.values()) / count
    return output._replace(grads=jax.tree.map(lambda g: share * g, part.grads))


def _missing_context_reduction(real: Any, self: Gradients, params: Any, batch: Any, *rest: Any) -> Any:
    """Loss and gradients are those of the first shard of each row, over the weight of whole rows."""
    count, tokens = self.sharder.size(CONTEXT), batch["weights"].shape[1]
    is_first = jnp.arange(tokens) < tokens // count
    part = real(self, params, {**batch, "weights": batch["weights"] * is_first}, *rest)
    weights = real(self, params, batch, *rest).weights
    share = sum(part.weights.values()) / sum(weights.values())
    return part._replace(grads=jax.tree.map(lambda g: share * g, part.grads), weights=weights)


def _doubled_reduction(real: Any, self: Gradients, params: Any, *rest: Any) -> Any:
    """Gradients of tensors that are replicated along `model` are summed over it once too often."""
    output = real(self, params, *rest)
    count = 1 if self.sharder.mesh is None else self.sharder.mesh.shape["model"]

    def scale(g: jax.Array, names: Any) -> jax.Array:
        is_replicated = not any("model" in axes for axes in self.sharder.storage_dims(names, g.shape))
        return count * g if is_replicated else g

    return output._replace(grads=jax.tree.map(scale, output.grads, self.model_def.names))


def _microbatch_scaling(
    real: Any, self: Gradients, params: Any, batch: Any, key: jax.Array, loss_scale: Any, other: Any
) -> Any:
    """Every microbatch's loss is normalised separately."""
    del real
    gradients = Gradients(self.model_def, self.sharder)
    micro = jax.tree.map(lambda x: split_microbatches(self.sharder, x, self.microbatches), dict(batch))
    parts = [
        gradients(params, jax.tree.map(lambda x, i=index: x[i], micro), key, loss_scale, other)
        for index in range(self.microbatches)
    ]
    mean = jax.tree.map(lambda *g: sum(g) / self.microbatches, *(part.grads for part in parts))
    return gradients(params, batch, key, loss_scale, other)._replace(grads=mean)


def _segment_mask(real: Any, *args: Any, segments_BT: jax.Array | None = None, **kwargs: Any) -> jax.Array:
    """Attention crosses the documents of a row."""
    merged = None if segments_BT is None else (segments_BT > 0).astype(segments_BT.dtype)
    return real(*args, segments_BT=merged, **kwargs)


def _dropped_tail(real: Any, self: Placer, step: int) -> Any:
    """The last row of a batch does not count."""
    batch = dict(real(self, step))
    return {**batch, "weights": batch["weights"].at[-1].set(0.0)}


# Fault -> (owner and name of what it replaces, replacement)
INJECTIONS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    MISSING: (Gradients, "__call__", _missing_reduction),
    CONTEXT_MISSING: (Gradients, "__call__", _missing_context_reduction),
    DOUBLED: (Gradients, "__call__", _doubled_reduction),
    SCALED: (Gradients, "_accumulated", _microbatch_scaling),
    MASK: (attention, "attention", _segment_mask),
    TAIL: (Placer, "__call__", _dropped_tail),
}


def injected(fault: str | None) -> Any:
    """Context in which programs are traced with a fault; None: without."""
    if fault is None:
        return nullcontext()
    owner, name, replacement = INJECTIONS[fault]
    real = getattr(owner, name)
    # A function, not a partial: as an attribute of a class it must bind `self`.
    return patch.object(owner, name, lambda *args, **kwargs: replacement(real, *args, **kwargs))
