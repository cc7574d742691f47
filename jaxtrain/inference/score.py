"""Log-probabilities that a decoder gives to texts, batched in few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.definition import Definition
from jaxtrain.sharding.rules import BATCH, CONTEXT, SEQUENCE, VOCAB
from jaxtrain.sharding.sharder import Sharder

SHORTEST = 32  # tokens of the shortest padded row
CHUNK = 64  # tokens of a row whose logits exist at a time

Pair = tuple[list[int], int]  # ids, and how many of the last are to be scored


def scoring_sharder(sharder: Sharder) -> Sharder:
    """The placement for scoring: weights as in training, rows over all axes that split tokens, each row whole."""
    rules = dict(sharder.rules or {})
    rows = (*rules.pop(BATCH, ()), *rules.pop(CONTEXT, ()))
    rules.pop(SEQUENCE, None)
    return Sharder(sharder.mesh, {**rules, BATCH: rows})


class Scorer:
    """Scores the last tokens of rows with a decoder defined on a `scoring` sharder.

    Rows are sorted by length and padded on the right to powers of two, or `longest`; batches have the same number of
    rows, so that few programs are compiled.
    """

    def __init__(self, definition: Definition, sharder: Sharder, longest: int, rows: int):
        """
        Args:
            definition: of the decoder.
            sharder: its placement.
            longest: tokens that are read at once; of longer rows the first are dropped.
            rows: of a batch; rounded up to what the axes of the batch divide.
        """
        self._longest, parts = longest, sharder.size(BATCH)
        self._rows = -(-rows // parts) * parts

        def run(params: Any, ids_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = definition.bind(params)
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
            x_BTD, _ = model.hidden(ids_BT, positions_BT, jnp.ones_like(ids_BT))
            return _target_log_probs(model.logits, sharder, x_BTD, targets_BT)

        self._run: Callable = jax.jit(run)

    def __call__(self, params: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(sum of natural log-probabilities of the scored tokens, whether each is the likeliest) of each pair.

        A pair needs a token before the first that is scored, and at most `longest` scored ones.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for places in self._batches(pairs):
            cut = [pairs[place][0][-(self._longest + 1) :] for place in places]
            width = self._width(max(map(len, cut)) - 1)
            ids, targets = np.zeros((2, self._rows, width), np.int32)
            for row, one in enumerate(cut):
                ids[row, : len(one) - 1], targets[row, : len(one) - 1] = one[:-1], one[1:]
            logs, is_likeliest = map(np.asarray, self._run(params, ids, targets))
            for row, (place, one) in enumerate(zip(places, cut)):
                scored = slice(len(one) - 1 - pairs[place][1], len(one) - 1)
                total = float(logs[row, scored].astype(np.float64).sum())
                found[place] = (total, bool(is_likeliest[row, scored].all()))
        return found

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[int]]:
        order = sorted(range(len(pairs)), key=lambda place: -len(pairs[place][0]))
        for start in range(0, len(order), self._rows):
            yield order[start : start + self._rows]

    def _width(self, tokens: int) -> int:
        """Tokens of a padded row."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), max(self._longest, tokens))


def _target_log_probs(
    logits: Callable, sharder: Sharder, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """float32 log-probabilities and bool [B, T], a chunk of tokens at a time, so that few logits exist at once."""
    B, T, D = x_BTD.shape
    count = T // CHUNK if T % CHUNK == 0 else 1

    def part(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x_BCD, targets_BC = inputs
        logits_BCV = sharder.constrain(logits(x_BCD), BATCH, None, VOCAB)
        own_BC = jnp.take_along_axis(logits_BCV, targets_BC[..., None], -1)[..., 0]
        logs_BC = own_BC - jax.nn.logsumexp(logits_BCV, -1)
        return None, (logs_BC, jnp.argmax(logits_BCV, -1) == targets_BC)

    cut = partial(jnp.moveaxis, source=1, destination=0)
    xs = (cut(x_BTD.reshape(B, count, T // count, D)), cut(targets_BT.reshape(B, count, T // count)))
    _, found = jax.lax.scan(part, None, xs)
    logs, is_likeliest = (jnp.moveaxis(one, 0, 1).reshape(B, T) for one in found)
    return logs, is_likeliest
