"""The messages of the last updates, for islands that have missed a few."""

from __future__ import annotations

from typing import Any


class RecentMessages:
    """Keeps messages as long as they are together fewer bytes than the whole values, which are read instead.

    Attributes:
        kept: references to the message of each version, and its bytes; ascending.
    """

    def __init__(self) -> None:
        self.kept: dict[int, tuple[list[Any], int]] = {}

    def add(self, version: int, refs: list[Any], nbytes: int, most: int) -> None:
        """Adds the message of an update.

        Args:
            version: after it.
            refs: references to its parts, one of each server.
            nbytes: of the message; 0: there is none, and nothing is kept.
            most: bytes of the whole values.
        """
        if nbytes:
            self.kept[version] = refs, nbytes
        while self.kept and sum(size for _, size in self.kept.values()) >= most:
            del self.kept[next(iter(self.kept))]

    def since(self, held: int | None, version: int) -> tuple[list[list[Any]], int] | None:
        """Returns (references of each update, their bytes) after a version; None if the whole values are to be read.

        Args:
            held: version of the values that an island has; None: it has none.
            version: that it reads.
        """
        if held is None or held > version:
            return None
        wanted = range(held + 1, version + 1)
        if any(each not in self.kept for each in wanted):
            return None
        return [self.kept[each][0] for each in wanted], sum(self.kept[each][1] for each in wanted)
