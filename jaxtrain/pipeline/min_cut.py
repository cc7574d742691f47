"""Minimum cut of a directed graph."""

from __future__ import annotations

from collections import deque

UNCUTTABLE = 1 << 80  # capacity of an edge that must not be cut
SOURCE, SINK = 0, 1


class Graph:
    """A directed graph with integer capacities, from node SOURCE to node SINK."""

    def __init__(self) -> None:
        self.edges: list[list[int]] = [[], []]  # edges of each node; edge e ^ 1 is the reverse of edge e
        self.target: list[int] = []
        self.residual: list[int] = []  # residual capacity of each edge

    def add_node(self) -> int:
        """Adds a node and returns its number."""
        self.edges.append([])
        return len(self.edges) - 1

    def add_edge(self, start: int, end: int, capacity: int = UNCUTTABLE) -> None:
        """Adds an edge that costs `capacity` to cut. By default it must not be cut."""
        for node, target, residual in ((start, end, capacity), (end, start, 0)):
            self.edges[node].append(len(self.target))
            self.target.append(target)
            self.residual.append(residual)

    def sink_side(self) -> set[int]:
        """Returns the nodes on the sink's side of the minimum cut; of several, the cut with the fewest such nodes.

        Dinic's algorithm: finds the maximum flow by blocking flows along shortest paths.

        Raises:
            ValueError: every cut contains an edge that must not be cut.
        """
        while SOURCE in (level := self._levels()):
            self._augment(level)
        return set(level)

    def _levels(self) -> dict[int, int]:
        """Returns the distance to the sink along edges with residual capacity, for each node that reaches it."""
        level, queue = {SINK: 0}, deque([SINK])
        while queue:
            node = queue.popleft()
            for edge in self.edges[node]:
                before = self.target[edge]
                if before not in level and self.residual[edge ^ 1]:
                    level[before] = level[node] + 1
                    queue.append(before)
        return level

    def _augment(self, level: dict[int, int]) -> None:
        """Adds a blocking flow: along paths of decreasing level, until none has residual capacity."""
        next_edge = dict.fromkeys(level, 0)  # index of the first edge of each node that is not exhausted
        path: list[int] = []
        while True:
            node = self.target[path[-1]] if path else SOURCE
            if node == SINK:
                flow = min(self.residual[edge] for edge in path)
                if flow >= UNCUTTABLE:
                    raise ValueError("the graph cannot be cut")
                for edge in path:
                    self.residual[edge] -= flow
                    self.residual[edge ^ 1] += flow
                path = path[: next(i for i, edge in enumerate(path) if not self.residual[edge])]
            elif next_edge[node] < len(self.edges[node]):
                edge = self.edges[node][next_edge[node]]
                if self.residual[edge] and level.get(self.target[edge], -1) == level[node] - 1:
                    path.append(edge)
                else:
                    next_edge[node] += 1
            elif path:
                next_edge[self.target[path.pop() ^ 1]] += 1
            else:
                return
