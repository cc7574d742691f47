"""The cheapest way to cut a graph in two."""

from __future__ import annotations

from collections import deque

NEVER = 1 << 80  # capacity of an edge that must not be cut
SOURCE, SINK = 0, 1


class Graph:
    """A directed graph with integer capacities, from node SOURCE to node SINK."""

    def __init__(self) -> None:
        self.out: list[list[int]] = [[], []]  # edges of each node; edge e ^ 1 is the way back of edge e
        self.end: list[int] = []
        self.room: list[int] = []

    def node(self) -> int:
        """A new node."""
        self.out.append([])
        return len(self.out) - 1

    def edge(self, start: int, end: int, capacity: int = NEVER) -> None:
        """An edge that costs `capacity` to cut; default: one that cannot be cut."""
        for node, other, room in ((start, end, capacity), (end, start, 0)):
            self.out[node].append(len(self.end))
            self.end.append(other)
            self.room.append(room)

    def sinks(self) -> set[int]:
        """The nodes on the sink's side of the minimal cut, of several such cuts of the one with the fewest of them.

        Dinitz's algorithm for the maximal flow: as much as fits along shortest paths, until none is left.

        Raises:
            ValueError: every cut cuts an edge that must not be cut.
        """
        while SOURCE in (level := self._levels()):
            self._fill(level)
        return set(level)

    def _levels(self) -> dict[int, int]:
        """Returns the distance to the sink along edges with free capacity, for each node that reaches it."""
        level, queue = {SINK: 0}, deque([SINK])
        while queue:
            node = queue.popleft()
            for edge in self.out[node]:
                before = self.end[edge]
                if before not in level and self.room[edge ^ 1]:
                    level[before] = level[node] + 1
                    queue.append(before)
        return level

    def _fill(self, level: dict[int, int]) -> None:
        """Sends flow along paths that go down the levels, until none has room."""
        at = dict.fromkeys(level, 0)  # the first edge of each node that may lead on
        path: list[int] = []
        while True:
            node = self.end[path[-1]] if path else SOURCE
            if node == SINK:
                flow = min(self.room[edge] for edge in path)
                if flow >= NEVER:
                    raise ValueError("the graph cannot be cut")
                for edge in path:
                    self.room[edge] -= flow
                    self.room[edge ^ 1] += flow
                path = path[: next(i for i, edge in enumerate(path) if not self.room[edge])]
            elif at[node] < len(self.out[node]):
                edge = self.out[node][at[node]]
                if self.room[edge] and level.get(self.end[edge], -1) == level[node] - 1:
                    path.append(edge)
                else:
                    at[node] += 1
            elif path:
                at[self.end[path.pop() ^ 1]] += 1
            else:
                return
