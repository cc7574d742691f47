"""Share of the rows of a global batch that a process reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class DataShard:
    """Share of the rows of a global batch. Processes that hold the same rows have the same index.

    Attributes:
        index: of the share, in the order of the first rows.
        count: number of shares.
        rows: positions in the global batch, ascending; empty: all.
        peers: processes that hold these rows, ascending.
        leaders: first process of each share.
    """

    index: int = 0
    count: int = 1
    rows: tuple[int, ...] = ()
    peers: tuple[int, ...] = (0,)
    leaders: tuple[int, ...] = (0,)


WHOLE = DataShard()
_current: ContextVar[DataShard | None] = ContextVar("data_shard", default=None)


@contextmanager
def reading(shard: DataShard) -> Iterator[None]:
    """Makes `current_shard` return a share, in this thread, while a user's function or iterable runs."""
    token = _current.set(shard)
    try:
        yield
    finally:
        _current.reset(token)


def current_shard() -> DataShard | None:
    """Returns the share of the run whose data is being opened or read in this thread; None outside of it."""
    return _current.get()
