"""The messages of the last updates, for islands that have missed a few."""

from __future__ import annotations

from typing import Any


class RecentMessages:
    """Keeps messages as long as they are together fewer bytes than the whole values, which are read instead."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[list[Any], int]] = {}  # by version, ascending

    def add(self, version: int, refs: list[Any], nbytes: int, most: int) -> None:
        """Adds the message of an update.

        Args:
            version: after it.
            refs: references to its parts, one of each server.
            nbytes: of the message.
            most: bytes of the whole values.
        """
        self._kept[version] = refs, nbytes
        while self._kept and sum(size for _, size in self._kept.values()) >= most:
            del self._kept[next(iter(self._kept))]

    def since(self, held: int | None, version: int) -> tuple[list[list[Any]], int] | None:
        """Returns (references of each update, their bytes) after a version; None if the whole values are to be read.

        Args:
            held: version of the values that an island has; None: it has none.
            version: that it reads.
        """
        if held is None or held > version:
            return None
        wanted = range(held + 1, version + 1)
        if any(each not in self._kept for each in wanted):
            return None
        return [self._kept[each][0] for each in wanted], sum(self._kept[each][1] for each in wanted)
