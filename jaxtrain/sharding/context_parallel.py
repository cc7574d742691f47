"""Sequences sharded over `context`: the token order of the ring, and checks of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import numpy as np

from jaxtrain.config.checks import divisors
from jaxtrain.errors import Problem, join_words
from jaxtrain.sharding.rules import CONTEXT, Rules, axes_of

ANY_KERNEL = ("auto", "xla")  # values of `step.attention` that work with every formulation
Sizes = Mapping[str, int | None]  # of mesh axes; None: unknown


def zigzag(tokens: int, shards: int) -> np.ndarray:
    """Returns the order of a row under the ring: int64 [tokens], the natural index of the token at each position.

    The row is cut into 2 * shards chunks; shard i holds chunk i and then chunk 2 * shards - 1 - i. So every shard has
    as many early tokens as late ones, and causal attention is equal work for all. (Brandon et al. 2023,
    arXiv:2311.09431, stripe single tokens for the same reason; Llama 3, arXiv:2407.21783, 3.3.2, has these chunks.)

    Raises:
        ValueError: the row does not divide into the chunks.
    """
    if tokens % (2 * shards):
        raise ValueError(f"{tokens} tokens do not split into {2 * shards} chunks")
    chunks = np.arange(tokens).reshape(2 * shards, -1)
    return np.stack([chunks[:shards], chunks[: shards - 1 : -1]], axis=1).reshape(-1)


def shards(rules: Rules, sizes: Sizes, name: str = CONTEXT) -> int | None:
    """Returns the number of shards of a logical name; None if an axis has no known size."""
    counts = [sizes.get(axis, 1) for axis in axes_of(name, rules)]
    return None if None in counts else prod(count for count in counts if count is not None)


def check(
    formulation: str, kernel: str, rules: Rules, sizes: Sizes, heads: tuple[int, int] | None, sequence: int | None
) -> list[Problem]:
    """Checks `context_parallel` on a mesh.

    Args:
        formulation: value of `context_parallel`.
        kernel: value of `step.attention`.
        rules: logical name -> mesh axes.
        sizes: of the mesh axes.
        heads: numbers of query heads and of key/value heads; None if unknown.
        sequence: tokens of a row; None if rows are not of tokens.

    Returns:
        Problems with dotted keys, without places.
    """
    count = shards(rules, sizes)
    if count is None:
        return []
    if count == 1:
        return [] if formulation == "auto" else [_no_shards(formulation, rules)]
    head_shards = shards(rules, sizes, "heads")
    local_heads = None  # unknown, or an error of the rules
    if heads is not None and head_shards is not None and heads[0] % head_shards == 0:
        local_heads = heads[0] // head_shards
    problems = [*_kernel(formulation, kernel, count, local_heads), *_kv_heads(rules, sizes, heads)]
    if formulation == "ring":
        problems += _ring(count, sequence)
    if formulation == "ulysses" and heads is not None and local_heads is not None and local_heads % count:
        problems.append(_ulysses(count, heads[0], local_heads))
    return problems


def _no_shards(formulation: str, rules: Rules) -> Problem:
    axes = axes_of(CONTEXT, rules)
    fix = f"mesh.{axes[0]} above 1" if axes else "a rule `context: context` with mesh.context above 1"
    message = f"{formulation} needs sharded sequences, and the layout does not shard them; expected auto, or {fix}"
    return Problem("", "context_parallel", message)


def _kernel(formulation: str, kernel: str, count: int, local_heads: int | None) -> Iterator[Problem]:
    """Checks the kernel: ring and gather mask by the positions of tokens, which the platforms' kernels cannot."""
    other = "context_parallel: ulysses"
    if formulation == "auto" and local_heads is not None and local_heads % count:
        formulation, other = "gather", f"heads that the {count} shards of context divide"
    if formulation in ("ring", "gather") and kernel not in ANY_KERNEL:
        message = f"`{kernel}` needs whole sequences, and context_parallel: {formulation} keeps them sharded"
        yield Problem("", "step.attention", f"{message}; expected {join_words(ANY_KERNEL)}, or {other}")


def _kv_heads(rules: Rules, sizes: Sizes, heads: tuple[int, int] | None) -> Iterator[Problem]:
    """Checks that each device holds the key/value heads of its query heads."""
    axes, kv_axes = ([a for a in axes_of(n, rules) if sizes.get(a, 1) != 1] for n in ("heads", "kv_heads"))
    if heads is not None and axes != kv_axes and heads[1] != 1:
        message = "attention across shards of a sequence needs `heads` and `kv_heads` on the same axes; found "
        key = "kv_heads" if "kv_heads" in rules else "heads"
        yield Problem("", f"rules.{key}", f"{message}{join_words(axes, 'and')}, and {join_words(kv_axes, 'and')}")


def _ring(count: int, sequence: int | None) -> Iterator[Problem]:
    if sequence is None:
        message = "ring permutes the tokens of a row, and rows of a user's own data may hold anything else"
        yield Problem("", "context_parallel", f"{message}; expected auto, ulysses or gather")
    elif sequence % count == 0 and sequence % (2 * count):  # other sizes are an error of the rules
        chunks = 2 * count
        above = -(-sequence // chunks) * chunks
        nearest = join_words([above - chunks, above] if above > chunks else [above])
        message = f"{sequence} tokens cannot be split into {chunks} chunks, two for each of {count} shards (ring)"
        fix = f"expected {nearest}, or context_parallel: ulysses or gather"
        yield Problem("", "data.sequence", f"{message}; {fix}")


def _ulysses(count: int, heads: int, local_heads: int) -> Problem:
    split = f"{heads} heads" if heads == local_heads else f"{heads} heads over {heads // local_heads} shards"
    message = f"ulysses exchanges heads among the {count} shards of context, and {split} are {local_heads} a device"
    fix = f"expected {join_words(divisors(local_heads, count))} shards, or context_parallel: ring or gather"
    return Problem("", "context_parallel", f"{message}; {fix}")
