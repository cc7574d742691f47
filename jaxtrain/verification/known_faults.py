"""Faults that real trainers had: as variants of the reference, to recognise them, and to be put in, for tests.

The two sides are independent: a variant changes the batch that one device sees; an injected fault breaks a part of the
program that runs on a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.core.gradients import Gradients, split_microbatches
from jaxtrain.core.placement import Placer
from jaxtrain.nn import attention
from jaxtrain.sharding.rules import BATCH
from jaxtrain.verification.test_batch import Batch, kept_rows, merged_documents

Flat = dict[str, np.ndarray]

MISSING, DOUBLED, SCALED = "missing-reduction", "doubled-reduction", "microbatch-scaling"
MASK, TAIL = "segment-mask", "dropped-tail"


def variants(
    gradients: Callable[[Batch], Flat], batch: Batch, shards: Mapping[str, int], accumulate: int
) -> dict[str, Flat]:
    """Name -> gradients of one device under a fault; only for batches that have weights.

    Args:
        gradients: of a batch on one device.
        batch: the first step's.
        shards: axis -> size of the axes that shard rows, in order.
        accumulate: microbatches.
    """
    if "weights" not in batch:
        return {}
    rows = len(batch["weights"])
    found = {TAIL + ": rows at the end of the batch do not count": gradients(kept_rows(batch, np.arange(rows - 1)))}
    if "segments" in batch:
        found[MASK + ": attention crosses documents"] = gradients(merged_documents(batch))
    grid = np.arange(rows).reshape(*shards.values(), -1)
    for dim, (axis, size) in enumerate(shards.items()):
        if size > 1:
            own = np.take(grid, 0, dim).reshape(-1)
            share = batch["weights"][own].sum() / batch["weights"].sum()
            part = {path: share * value for path, value in gradients(kept_rows(batch, own)).items()}
            found[f"{MISSING}: gradients are not summed over {axis}"] = part
    if accumulate > 1:
        parts = [gradients(kept_rows(batch, np.arange(start, rows, accumulate))) for start in range(accumulate)]
        mean = {path: np.mean([part[path] for part in parts], axis=0) for path in parts[0]}
        found[f"{SCALED}: each microbatch is normalised by itself"] = mean
    return found


def broken(name: str | None) -> Any:
    """A context in which one part of the program is wrong; what is traced inside stays so."""
    return nullcontext() if name is None else INJECTIONS[name]()


def _missing_reduction() -> Any:
    """The first shard of rows sees only its own gradients."""

    def change(real: Any) -> Any:
        def call(self: Gradients, params: Any, batch: Any, *rest: Any) -> Any:
            axes = self.sharder.axes(BATCH)
            count = self.sharder.mesh.shape[axes[0]] if self.sharder.mesh is not None and axes else 1
            own = jnp.arange(len(batch["weights"])) < len(batch["weights"]) // count
            weights = batch["weights"] * own[:, None]
            grads = real(self, params, {**batch, "weights": weights}, *rest).grads
            share = weights.sum() / batch["weights"].sum()
            return real(self, params, batch, *rest)._replace(grads=jax.tree.map(lambda g: share * g, grads))

        return call

    return mock.patch.object(Gradients, "__call__", change(Gradients.__call__))


def _doubled_reduction() -> Any:
    """A tensor that every member of `model` holds whole is summed over them once too often."""

    def change(real: Any) -> Any:
        def call(self: Gradients, params: Any, *rest: Any) -> Any:
            found = real(self, params, *rest)
            count = 1 if self.sharder.mesh is None else self.sharder.mesh.shape["model"]

            def more(g: jax.Array, names: Any) -> jax.Array:
                is_shared = not any("model" in axes for axes in self.sharder.storage_dims(names, g.shape))
                return count * g if is_shared else g

            return found._replace(grads=jax.tree.map(more, found.grads, self.model_def.names))

        return call

    return mock.patch.object(Gradients, "__call__", change(Gradients.__call__))


def _microbatch_scaling() -> Any:
    """Every microbatch's loss is a mean of its own."""

    def change(real: Any) -> Any:
        del real

        def call(self: Gradients, params: Any, batch: Any, key: jax.Array, loss_scale: Any) -> Any:
            whole = Gradients(self.model_def, self.sharder)
            micro = jax.tree.map(lambda x: split_microbatches(self.sharder, x, self.microbatches), dict(batch))
            parts = [
                whole(params, jax.tree.map(lambda x, i=index: x[i], micro), key, loss_scale)
                for index in range(self.microbatches)
            ]
            mean = jax.tree.map(lambda *g: sum(g) / self.microbatches, *(part.grads for part in parts))
            return whole(params, batch, key, loss_scale)._replace(grads=mean)

        return call

    return mock.patch.object(Gradients, "_accumulated", change(Gradients._accumulated))


def _segment_mask() -> Any:
    """Attention crosses the documents of a row."""

    def change(real: Any) -> Any:
        def call(*args: Any, segments_BT: jax.Array | None = None, **kwargs: Any) -> jax.Array:
            merged = None if segments_BT is None else (segments_BT > 0).astype(segments_BT.dtype)
            return real(*args, segments_BT=merged, **kwargs)

        return call

    return mock.patch.object(attention, "attention", change(attention.attention))


def _dropped_tail() -> Any:
    """The last row of a batch is lost on its way to the device."""

    def change(real: Any) -> Any:
        def call(self: Placer, step: int) -> Any:
            batch = dict(real(self, step))
            return {**batch, "weights": batch["weights"].at[-1].set(0.0)}

        return call

    return mock.patch.object(Placer, "__call__", change(Placer.__call__))


INJECTIONS: dict[str, Callable[[], Any]] = {
    MISSING: _missing_reduction,
    DOUBLED: _doubled_reduction,
    SCALED: _microbatch_scaling,
    MASK: _segment_mask,
    TAIL: _dropped_tail,
}
