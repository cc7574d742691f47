"""Who is there: the nodes and their slots, which of them are black-listed, and who takes part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Slot(NamedTuple):
    """A place for one worker."""

    node: int
    index: int

    def __str__(self) -> str:
        return f"slot {self.index} of node {self.node}"


@dataclass
class Node:
    """A node whose agent is connected.

    Attributes:
        host: where the other nodes reach it.
        slots: places for workers.
        port: free there, for the coordinator of the next generation.
        memory: port of its stock of states; 0: it has none.
        seen: when it was last heard of, in seconds of the leader's clock.
        is_idle: it has no workers left.
    """

    number: int
    host: str
    slots: int
    port: int
    memory: int
    seen: float
    is_idle: bool = True

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"


@dataclass
class Failures:
    """Failures in a row, without progress between them, and who is black-listed for them.

    A slot that fails `limit` times is listed. A node on which so many fail on different slots is listed whole, unless
    there is no other: then it is not the node.
    """

    limit: int
    slots: dict[Slot, int] = field(default_factory=dict)
    nodes: dict[int, int] = field(default_factory=dict)
    listed: set[Slot] = field(default_factory=set)
    listed_nodes: set[int] = field(default_factory=set)

    def progressed(self) -> None:
        """A newer checkpoint: earlier failures no longer count, but who is listed stays so."""
        self.slots.clear()
        self.nodes.clear()

    def blame(self, slot: Slot, nodes: Iterable[int]) -> str | None:
        """Counts a failure; the name of the slot or node that is black-listed for it."""
        self.slots[slot] = self.slots.get(slot, 0) + 1
        self.nodes[slot.node] = self.nodes.get(slot.node, 0) + 1
        if self.slots[slot] >= self.limit:
            self.listed.add(slot)
            self.nodes[slot.node] -= self.slots.pop(slot)
            return str(slot)
        if self.nodes[slot.node] >= self.limit and any(node not in self.listed_nodes | {slot.node} for node in nodes):
            self.listed_nodes.add(slot.node)
            return f"node {slot.node}"
        return None

    def is_listed(self, slot: Slot) -> bool:
        """Whether the slot gets no worker."""
        return slot in self.listed or slot.node in self.listed_nodes


class Roster:
    """The connected nodes, and their usable slots in the order of ranks."""

    def __init__(self, failures: Failures, spares: int) -> None:
        """
        Args:
            failures: who is black-listed.
            spares: slots held back while all others are there.
        """
        self.nodes: dict[int, Node] = {}
        self.failures, self._spares, self._most = failures, spares, 0

    def add(self, node: Node) -> None:
        """A node has joined."""
        self.nodes[node.number] = node
        self._most = max(self._most, sum(node.slots for node in self.nodes.values()))

    def usable(self) -> list[Slot]:
        """Slots for the next generation: not black-listed, and without spares that nobody has to be replaced by."""
        every = [Slot(n.number, i) for n in self.nodes.values() for i in range(n.slots)]
        good = sorted(slot for slot in every if not self.failures.is_listed(slot))
        return good[: max(1, self._most - self._spares)]
