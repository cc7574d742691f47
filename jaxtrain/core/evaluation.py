"""Validation: the loss of several sets of documents, and what it says in other units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.core.placement import placer
from jaxtrain.core.program import Program

TERM = "cross_entropy"  # the loss term, nats per token, that perplexity is of


def validate(program: Program, sets: Mapping[str, Any], params: Any, batches: int) -> dict[str, float]:
    """Metrics of every set under its prefix, such as `eval/` and `eval/NAME/`: `loss`, its terms, and

    `perplexity`: exp of the cross-entropy per target, for models with such a term.
    `bits_per_byte`: cross-entropy * targets / (bytes * ln 2), with targets and bytes those of the whole set, for text.
    Targets are all tokens of a document but its first, and eos; bytes are those of its text in UTF-8, and eos has none.
    So no special token but eos is counted, and with the tokenizer `bytes` there are as many targets as bytes.

    Args:
        program: gives the compiled evaluation.
        sets: prefix -> dataset.
        params: in the shards of the train state.
        batches: of each set at most; sums are over sums of weights, over these batches together.
    """
    found: dict[str, float] = {}
    for prefix, split in sets.items():
        scores = _derived(_means(program, split, params, batches), getattr(split, "targets_per_byte", None))
        found |= {f"{prefix}{name}": value for name, value in scores.items()}
    return found


def _means(program: Program, split: Any, params: Any, batches: int) -> dict[str, float]:
    """`loss` and its terms."""
    place = placer(split, program)
    sums: dict[str, Any] = {}
    for index in range(min(batches, getattr(split, "batches", None) or batches)):
        terms = program.evaluate(params, place(index))
        sums = terms if not sums else jax.tree.map(jax.numpy.add, sums, terms)
    host = {name: (float(s), float(w)) for name, (s, w) in jax.device_get(sums).items()}
    means = {name: s / w if w else 0.0 for name, (s, w) in host.items()}
    return {"loss": sum(means.values()), **means}


def _derived(means: dict[str, float], targets_per_byte: float | None) -> dict[str, float]:
    """The means, with the same in other units where there is a cross-entropy."""
    if TERM not in means:
        return means
    nats = means[TERM]
    found = {**means, "perplexity": math.exp(nats) if nats < 700 else math.inf}
    return found if targets_per_byte is None else {**found, "bits_per_byte": nats * targets_per_byte / math.log(2)}
