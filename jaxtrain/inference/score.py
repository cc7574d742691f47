"""Log-probabilities of texts under a decoder, batched in few shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.model_def import ModelDef
from jaxtrain.sharding.rules import BATCH, CONTEXT, SEQUENCE, VOCAB
from jaxtrain.sharding.sharder import Sharder

SHORTEST = 32  # tokens of the shortest padded row
CHUNK = 64  # tokens of a row whose logits exist at the same time

Pair = tuple[list[int], int]  # ids, and the number of ids to score at the end


def scoring_sharder(sharder: Sharder) -> Sharder:
    """Returns the sharder for scoring: weights as in training, rows over all axes that split tokens in training."""
    rules = dict(sharder.rules or {})
    rows = (*rules.pop(BATCH, ()), *rules.pop(CONTEXT, ()))
    rules.pop(SEQUENCE, None)
    return Sharder(sharder.mesh, {**rules, BATCH: rows})


class Scorer:
    """Scores the last tokens of rows with a decoder defined on a `scoring_sharder`.

    Rows are sorted by length and padded on the right to powers of two, or `longest`; all batches have the same number
    of rows, so that few programs are compiled.
    """

    def __init__(self, model_def: ModelDef, sharder: Sharder, longest: int, rows: int):
        """Creates the scorer.

        Args:
            model_def: model_def of the decoder.
            sharder: its sharder.
            longest: maximum tokens of a row; longer rows lose their first tokens.
            rows: rows of a batch, rounded up to a multiple of the batch axes.
        """
        self._longest, parts = longest, sharder.size(BATCH)
        self._rows = -(-rows // parts) * parts

        def run(params: Any, ids_BT: jax.Array, targets_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = model_def.bind(params)
            positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
            x_BTD, _ = model.hidden(ids_BT, positions_BT, jnp.ones_like(ids_BT))
            return _target_log_probs(model.logits, sharder, x_BTD, targets_BT)

        self._run: Callable = jax.jit(run)

    def __call__(self, params: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """Returns (sum of natural log-probabilities of the scored tokens, whether each is the likeliest) of each pair.

        A pair needs a token before the first scored one, and at most `longest` scored tokens.
        """
        scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
        for indices in self._batches(pairs):
            cut = [pairs[index][0][-(self._longest + 1) :] for index in indices]
            width = self._width(max(map(len, cut)) - 1)
            ids, targets = np.zeros((2, self._rows, width), np.int32)
            for row, one in enumerate(cut):
                ids[row, : len(one) - 1], targets[row, : len(one) - 1] = one[:-1], one[1:]
            logs, is_likeliest = map(np.asarray, self._run(params, ids, targets))
            for row, (index, one) in enumerate(zip(indices, cut)):
                scored = slice(len(one) - 1 - pairs[index][1], len(one) - 1)
                total = float(logs[row, scored].astype(np.float64).sum())
                scores[index] = (total, bool(is_likeliest[row, scored].all()))
        return scores

    def _batches(self, pairs: Sequence[Pair]) -> Iterator[list[int]]:
        order = sorted(range(len(pairs)), key=lambda index: -len(pairs[index][0]))
        for start in range(0, len(order), self._rows):
            yield order[start : start + self._rows]

    def _width(self, tokens: int) -> int:
        """Returns the tokens of a padded row."""
        return min(max(SHORTEST, 1 << (tokens - 1).bit_length()), max(self._longest, tokens))


def _target_log_probs(
    logits: Callable, sharder: Sharder, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns float32 log-probabilities of the targets and whether each is the likeliest token, both [B, T].

    Computes a chunk of tokens at a time, so that few logits exist at once.
    """
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
    _, chunks = jax.lax.scan(part, None, xs)
    logs, is_likeliest = (jnp.moveaxis(chunk, 0, 1).reshape(B, T) for chunk in chunks)
    return logs, is_likeliest
