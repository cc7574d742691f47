"""Validation: loss and derived metrics of several datasets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.core.placement import placer
from jaxtrain.core.program import Program
from jaxtrain.errors import EndOfData
from jaxtrain.models.model_def import NOTHING, NonTrainable, leaks_in_one_line

CROSS_ENTROPY = "cross_entropy"  # the loss term, nats per token, that perplexity is computed from


def validate(
    program: Program, sets: Mapping[str, Any], params: Any, batches: int, other: NonTrainable = NOTHING
) -> dict[str, float]:
    """Computes the metrics of every dataset under its prefix, such as `eval/` or `eval/NAME/`.

    `loss` and its terms; for models with a cross-entropy also
    `perplexity`: exp of the cross-entropy per target;
    `bits_per_byte`, for text: cross-entropy * targets / (bytes * ln 2), with targets and bytes of the whole dataset.
    Targets are all tokens of a document but the first, and EOS. Bytes are those of the text in UTF-8; EOS has none. So
    EOS is the only special token that counts, and the tokenizer `bytes` has as many targets as bytes.

    Args:
        program: with the compiled evaluation.
        sets: prefix -> dataset.
        params: with the shardings of the train state.
        batches: largest number of batches of each dataset; sums and weights are added over them.
        other: variables of the model that are not trained.

    Returns:
        prefixed name -> value.
    """
    metrics: dict[str, float] = {}
    for prefix, dataset in sets.items():
        scores = _with_derived(
            _means(program, dataset, params, batches, other), getattr(dataset, "targets_per_byte", None)
        )
        metrics |= {f"{prefix}{name}": value for name, value in scores.items()}
    return metrics


def _means(program: Program, dataset: Any, params: Any, batches: int, other: NonTrainable) -> dict[str, float]:
    """Returns `loss`, its terms, and the model's own metrics."""
    place, own = placer(dataset, program), program.eval_metrics
    sums: Any = None
    for index in range(min(batches, getattr(dataset, "batches", None) or batches)):
        try:
            batch = place(index)
        except EndOfData:
            if sums is None:
                raise
            break
        with leaks_in_one_line(program.config.model):
            found = program.evaluate(params, batch, other), own(params, batch, other)
        if sums is not None:
            # At most two batches are in flight, because their arrays take memory. Without a bound XLA on CPU was also
            # seen to hang: one device waited in an all-reduce, the other one for fewer than 32 programs in flight.
            jax.block_until_ready(sums)
            found = jax.tree.map(jax.numpy.add, sums, found)
        sums = found
    (terms, counts), pairs = sums
    host = {name: (float(s), float(w)) for name, (s, w) in jax.device_get(terms).items()}
    means = {name: s / w if w else 0.0 for name, (s, w) in host.items()}
    metrics = {name: float(value) for name, value in jax.device_get(program.metrics(counts)).items()}
    metrics |= {name: float(s) / float(w) if w else 0.0 for name, (s, w) in jax.device_get(pairs).items()}
    return {"loss": sum(means.values()), **means, **metrics}


def _with_derived(means: dict[str, float], targets_per_byte: float | None) -> dict[str, float]:
    """Returns the means with perplexity and bits per byte, if there is a cross-entropy."""
    if CROSS_ENTROPY not in means:
        return means
    nats = means[CROSS_ENTROPY]
    metrics = {**means, "perplexity": math.exp(nats) if nats < 700 else math.inf}
    if targets_per_byte is not None:
        metrics["bits_per_byte"] = nats * targets_per_byte / math.log(2)
    return metrics
