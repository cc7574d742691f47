"""Text generation with a KV cache: temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.mesh.rules import BATCH, CONTEXT, SEQUENCE
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import Definition


def sample(
    logits_BV: jax.Array, key: jax.Array, *, temperature: float, top_k: int | None, top_p: float | None
) -> jax.Array:
    """One token per row, int32 [B]. `temperature` 0 is greedy.

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


def decoding(sharder: Sharder) -> Sharder:
    """The placement for decoding: weights as in training, the few tokens in flight on every device.

    With the batch unsharded, weights stored in shards are used as they are instead of being gathered each token.
    """
    rules = {name: axes for name, axes in (sharder.rules or {}).items() if name not in (BATCH, SEQUENCE, CONTEXT)}
    return Sharder(sharder.mesh, rules)


class Generator:
    """Extends prompts with a decoder defined on a `decoding` sharder. Compiled once per prompt bucket."""

    def __init__(
        self,
        definition: Definition,
        vocab: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
    ):
        self._definition = definition

        def choose(logits_BV: jax.Array, key: jax.Array) -> jax.Array:
            # Rows beyond the tokenizer's vocabulary only pad the table.
            known = jnp.where(jnp.arange(logits_BV.shape[-1]) < vocab, logits_BV, -jnp.inf)
            return sample(known, key, temperature=temperature, top_k=top_k, top_p=top_p)

        def prefill(params: Any, tokens_BT: jax.Array, length: jax.Array, key: jax.Array, capacity: int) -> tuple:
            model = definition.bind(params)
            cache = model.empty_cache(tokens_BT.shape[0], capacity)
            logits_BV, cache = model.decode(tokens_BT, cache, length)
            return choose(logits_BV, key), cache

        def extend(params: Any, token_B: jax.Array, cache: Any, key: jax.Array) -> tuple:
            logits_BV, cache = definition.bind(params).decode(token_B[:, None], cache)
            return choose(logits_BV, key), cache

        self._prefill: Callable = jax.jit(prefill, static_argnames="capacity")
        self._extend: Callable = jax.jit(extend, donate_argnums=2)

    def __call__(self, params: Any, prompt: np.ndarray, tokens: int, *, seed: int, eos: int | None) -> Iterator[int]:
        """Yields up to `tokens` new token ids after a prompt (int [T], T >= 1), and stops at `eos`."""
        bucket = 1 << max(len(prompt) - 1, 15).bit_length()  # few distinct lengths, few compilations
        padded = np.zeros((1, bucket), np.int32)
        padded[0, : len(prompt)] = prompt
        key = jax.random.key(seed)
        length = np.int32(len(prompt))
        token, cache = self._prefill(params, padded, length, jax.random.fold_in(key, 0), capacity=bucket + tokens)
        for index in range(1, tokens + 1):
            value = int(token[0])
            if value == eos:
                return
            yield value
            if index < tokens:
                token, cache = self._extend(params, token, cache, jax.random.fold_in(key, index))
