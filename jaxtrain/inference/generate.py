"""Text generation with a KV cache: temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.models.model_def import ModelDef
from jaxtrain.sharding.rules import BATCH, CONTEXT, ROWS, SEQUENCE
from jaxtrain.sharding.sharder import Sharder


def sample(
    logits_BV: jax.Array, key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None
) -> jax.Array:
    """Samples one token per row, int32 [B]. `temperature` 0 is greedy.

    top_k keeps the k most likely tokens; top_p keeps the smallest set whose probability reaches p (nucleus
    sampling, Holtzman et al. 2020, arXiv 1904.09751), at least one token.
    """
    if temperature == 0:
        return jnp.argmax(logits_BV, -1).astype(jnp.int32)
    logits_BV = logits_BV / temperature
    if top_k is not None:
        kth = jax.lax.top_k(logits_BV, min(top_k, logits_BV.shape[-1]))[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= kth, logits_BV, -jnp.inf)
    if top_p is not None:
        ordered = jnp.sort(logits_BV, -1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) - jax.nn.softmax(ordered, -1)
        last = jnp.sum(before < top_p, -1, keepdims=True) - 1
        cutoff = jnp.take_along_axis(ordered, jnp.maximum(last, 0), -1)
        logits_BV = jnp.where(logits_BV >= cutoff, logits_BV, -jnp.inf)
    return jax.random.categorical(key, logits_BV, -1).astype(jnp.int32)


def decoding_sharder(sharder: Sharder, rows: int = 1) -> Sharder:
    """Returns the sharder for decoding `rows` prompts. It shards weights and heads as in training: no weight moves.

    The rows of the KV cache are split over all axes that split tokens in training, if they divide `rows`. The tokens in
    flight are few, so they are replicated over axes that shard weights (FSDP): the weights are then used in their
    shards instead of being gathered for each token.
    """
    rules = dict(sharder.rules or {})
    split = [axis for name in (BATCH, CONTEXT) for axis in rules.get(name, ())]
    rules = {name: axes for name, axes in rules.items() if name not in (BATCH, SEQUENCE, CONTEXT)}
    of_weights = {axis for axes in rules.values() for axis in axes}
    of_heads = {axis for name in ("heads", "kv_heads") for axis in rules.get(name, ())}
    free: list[str] = []
    for axis in sorted((axis for axis in split if axis not in of_heads), key=lambda axis: axis in of_weights):
        if sharder.mesh is not None and rows % _size(sharder, (*free, axis)) == 0:
            free.append(axis)
    rules |= {ROWS: tuple(free), BATCH: tuple(axis for axis in free if axis not in of_weights)}
    return Sharder(sharder.mesh, rules)


def padded_rows(sharder: Sharder, rows: int) -> int:
    """Rounds `rows` up to a number that can be split over all axes of `decoding_sharder`'s cache; 1 stays 1."""
    heads = {axis for name in ("heads", "kv_heads") for axis in sharder.axes(name)}
    parts = _size(sharder, [axis for name in (BATCH, CONTEXT) for axis in sharder.axes(name) if axis not in heads])
    return rows if rows == 1 else -(-rows // parts) * parts


def _size(sharder: Sharder, axes: Iterable[str]) -> int:
    return 1 if sharder.mesh is None else prod(sharder.mesh.shape[axis] for axis in axes)


class Generator:
    """Extends prompts with a decoder defined on a `decoding_sharder`. Compiles once per prompt bucket and batch."""

    def __init__(
        self,
        model_def: ModelDef,
        vocab: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
    ):
        self._definition = model_def
        learned = model_def.parameters.get("positions")
        self._longest = None if learned is None else learned["table"].shape[0]

        def choose(logits_BV: jax.Array, key: jax.Array) -> jax.Array:
            # Rows beyond the tokenizer's vocabulary only pad the table.
            masked = jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab, logits_BV, -jnp.inf)
            return sample(masked, key, temperature=temperature, top_k=top_k, top_p=top_p)

        def prefill(params: Any, tokens_BT: jax.Array, length_B: jax.Array, key: jax.Array, capacity: int) -> tuple:
            model = model_def.bind(params)
            cache = model.empty_cache(tokens_BT.shape[0], capacity)
            logits_BV, cache = model.decode(tokens_BT, cache, length_B)
            return choose(logits_BV, key), cache

        def extend(params: Any, token_B: jax.Array, cache: Any, key: jax.Array) -> tuple:
            logits_BV, cache = model_def.bind(params).decode(token_B[:, None], cache)
            return choose(logits_BV, key), cache

        self._prefill: Callable = jax.jit(prefill, static_argnames="capacity")
        self._extend: Callable = jax.jit(extend, donate_argnums=2)

    def __call__(
        self, params: Any, prompt: np.ndarray, tokens: int, *, seed: int, stops: Collection[int] = ()
    ) -> Iterator[int]:
        """Yields up to `tokens` new token ids after a prompt (int [T], T >= 1), until one of `stops`; see `batch`."""
        steps = self.batch(params, [prompt], tokens, seed=seed, stops=stops)
        return (token for (token,) in steps if token is not None)

    def batch(
        self,
        params: Any,
        prompts: Sequence[np.ndarray],
        tokens: int,
        *,
        seed: int,
        stops: Collection[int] = (),
        rows: int = 1,
    ) -> Iterator[list[int | None]]:
        """Yields, up to `tokens` times, the next token id of every prompt; None from its first one of `stops` on.

        Args:
            params: weights.
            prompts: int [T] each, T >= 1. They are padded on the right, and every row has its own cache positions:
                a greedy continuation does not depend on the other prompts.
            tokens: number of new tokens.
            seed: random seed of the sampling.
            stops: tokens that end a text.
            rows: rows of the batch; extra rows repeat the last prompt.

        Raises:
            UserError: a prompt and its new tokens exceed the model's learned positions.
        """
        longest = max(map(len, prompts))
        if self._longest is not None and longest + tokens > self._longest:
            message = f"a prompt of {longest} tokens and {tokens} new ones are more than the model's {self._longest}"
            raise UserError(f"generate: {message} learned positions; expected fewer tokens, or a shorter prompt")
        return self._steps(params, prompts, tokens, seed, stops, max(rows, len(prompts)))

    def _steps(
        self, params: Any, prompts: Sequence[np.ndarray], tokens: int, seed: int, stops: Collection[int], count: int
    ) -> Iterator[list[int | None]]:
        """Runs the steps of `batch`."""
        longest = max(map(len, prompts))
        bucket = 1 << max(longest - 1, 15).bit_length()  # few distinct lengths, so few compilations
        padded, lengths = np.zeros((count, bucket), np.int32), np.zeros(count, np.int32)
        for row in range(count):
            prompt = prompts[min(row, len(prompts) - 1)]
            padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        key = jax.random.key(seed)
        token, cache = self._prefill(params, padded, lengths, jax.random.fold_in(key, 0), capacity=bucket + tokens)
        is_open = [True] * len(prompts)
        for index in range(1, tokens + 1):
            values = np.asarray(token)[: len(prompts)].tolist()
            is_open = [alive and value not in stops for alive, value in zip(is_open, values)]
            if not any(is_open):
                return
            yield [value if alive else None for alive, value in zip(is_open, values)]
            if index < tokens:
                token, cache = self._extend(params, token, cache, jax.random.fold_in(key, index))
