"""Checks of the section `sync` beside those of single values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.errors import join_words

KeysAndMessage = tuple[tuple[str, ...], str]
Divisors = Callable[[int, int], list[int]]


def streaming_problems(sync: SyncConfig, divisors: Divisors) -> Iterator[KeysAndMessage]:
    """Checks that fragments take turns at whole steps, one after another.

    Args:
        sync: the section.
        divisors: (number, near) -> some of its divisors.
    """
    if sync.strategy != "streaming_diloco":
        return
    every, fragments, tau = sync.every, sync.streaming.fragments, sync.streaming.tau
    if every % fragments:
        sizes = join_words(divisors(every, fragments))
        message = f"{fragments} fragments cannot take turns within {every} steps; expected a divisor, e.g. {sizes}"
        yield ("sync.streaming.fragments", "sync.every"), message
    elif tau >= every // fragments:
        message = f"a fragment is due every {every // fragments} steps, and travels alone; expected at most"
        yield ("sync.streaming.tau", "sync.every", "sync.streaming.fragments"), f"{message} {every // fragments - 1}"


def optimizer_problems(sync: SyncConfig, optimizer: str) -> Iterator[KeysAndMessage]:
    """Checks that muloco has Muon inside."""
    if sync.strategy == "muloco" and optimizer != "muon":
        message = f"muloco is diloco with Muon as the inner optimizer, and it is {optimizer}; expected optimizer.name"
        yield ("sync.strategy", "optimizer.name"), f"{message}=muon, or diloco"
