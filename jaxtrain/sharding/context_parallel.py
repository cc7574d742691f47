"""Rows of tokens over the shards of `context`: the order of the ring, and what a config must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from jaxtrain.config.checks import divisors
from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem, join_words
from jaxtrain.sharding.rules import CONTEXT, axes_of

ANY_KERNEL = ("auto", "xla")  # values of `step.attention` that every formulation of attention across shards can do


def has_tokens(config: Config) -> bool:
    """Returns whether the second dim of a batch is of tokens: of text, or for the decoder; others need not have one."""
    return config.data.type == "text" or config.model.type == "decoder"


def zigzag(tokens: int, shards: int) -> np.ndarray:
    """Order of a row under the ring: int64 [tokens], the natural index of the token at each place.

    The row is cut into 2 * shards chunks; shard i holds chunk i and, after it, chunk 2 * shards - 1 - i. So every
    shard has as many early tokens as late ones, and causal attention is equal work for all (Brandon et al. 2023,
    arXiv:2311.09431, stripe tokens to the same end; the halves are those of Llama 3, arXiv:2407.21783, 3.3.2).

    Raises:
        ValueError: the chunks are not whole.
    """
    if tokens % (2 * shards):
        raise ValueError(f"{tokens} tokens do not split into {2 * shards} chunks")
    chunks = np.arange(tokens).reshape(2 * shards, -1)
    return np.stack([chunks[:shards], chunks[: shards - 1 : -1]], axis=1).reshape(-1)


def shards(rules: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int | None], name: str = CONTEXT) -> int | None:
    """Number of shards of a logical name; None where an axis has no known size."""
    counts = [sizes.get(axis, 1) for axis in axes_of(name, rules)]
    return None if None in counts else prod(count for count in counts if count is not None)


def check(config: Config, sizes: Mapping[str, int | None]) -> list[Problem]:
    """Checks `context_parallel` on a mesh of these sizes (None: not known).

    Returns:
        Problems with dotted keys and no places; each says what would be right.
    """
    count = shards(config.rules, sizes)
    if count is None:
        return []
    own = _own_heads(config, sizes)
    if count == 1:
        return [] if config.context_parallel == "auto" else [_useless(config)]
    found = [*_kernel(config, count, own), *_kv_heads(config, sizes)]
    if config.context_parallel == "ring":
        found += _ring(config, count)
    if config.context_parallel == "ulysses" and own is not None and own % count:
        found.append(_ulysses(config, count, own))
    return found


def _own_heads(config: Config, sizes: Mapping[str, int | None]) -> int | None:
    """Query heads of a device; None where they are not known, or are found with the rules not to divide."""
    over = shards(config.rules, sizes, "heads")
    if config.model.type != "decoder" or over is None or config.model.heads % over:
        return None
    return config.model.heads // over


def _useless(config: Config) -> Problem:
    axes = axes_of(CONTEXT, config.rules)
    more = f"mesh.{axes[0]} above 1" if axes else "a rule `context: context` with mesh.context above 1"
    kind = config.context_parallel
    message = f"{kind} crosses the shards of a sequence, and the layout makes none; expected auto, or {more}"
    return Problem("", "context_parallel", message)


def _kernel(config: Config, count: int, own: int | None) -> Iterator[Problem]:
    """Ring and gather test the order of queries and keys that lie apart, which the platforms' kernels cannot."""
    kernel, formulation, other = config.step.attention, config.context_parallel, "context_parallel: ulysses"
    if formulation == "auto" and own is not None and own % count:
        formulation, other = "gather", f"heads that the {count} shards of context divide"
    if formulation in ("ring", "gather") and kernel not in ANY_KERNEL:
        message = f"`{kernel}` needs whole sequences, and context_parallel: {formulation} keeps them in shards; "
        yield Problem("", "step.attention", f"{message}expected {join_words(ANY_KERNEL)}, or {other}")


def _kv_heads(config: Config, sizes: Mapping[str, int | None]) -> Iterator[Problem]:
    """Each device must hold the key/value heads of its own query heads."""
    heads, kv_heads = ([a for a in axes_of(n, config.rules) if sizes.get(a, 1) != 1] for n in ("heads", "kv_heads"))
    if config.model.type == "decoder" and heads != kv_heads and config.model.kv_heads != 1:
        message = "attention across shards of a sequence needs `heads` and `kv_heads` on the same axes; found "
        where = "kv_heads" if "kv_heads" in config.rules else "heads"
        yield Problem("", f"rules.{where}", f"{message}{join_words(heads, 'and')}, and {join_words(kv_heads, 'and')}")


def _ring(config: Config, count: int) -> Iterator[Problem]:
    if not has_tokens(config):
        message = "ring permutes the tokens of a row, and rows of a user's own data for a user's own model may hold "
        yield Problem("", "context_parallel", f"{message}anything; expected auto, ulysses or gather")
    elif config.data.sequence % count == 0 and config.data.sequence % (2 * count):  # the rest is found with the rules
        chunks, tokens = 2 * count, config.data.sequence
        above = -(-tokens // chunks) * chunks
        nearest = join_words([above - chunks, above] if above > chunks else [above])
        message = f"{tokens} tokens cannot be split into {chunks} chunks, two for each of the {count} shards of context"
        yield Problem(
            "", "data.sequence", f"{message} (ring); expected {nearest}, or context_parallel: ulysses or gather"
        )


def _ulysses(config: Config, count: int, own: int) -> Problem:
    over = config.model.heads // own
    split = f"{own} heads" if over == 1 else f"{config.model.heads} heads over {over} shards are {own} each, and these"
    message = f"ulysses hands heads to the {count} shards of context: {split} cannot be split; expected "
    return Problem(
        "",
        "context_parallel",
        f"{message}{join_words(divisors(own, count))} shards, or context_parallel: ring or gather",
    )
