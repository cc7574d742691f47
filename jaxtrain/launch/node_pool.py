"""Connected nodes, their slots, and the denylist of slots and nodes that keep failing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtrain.io.addresses import address_text


class Slot(NamedTuple):
    """One worker's place on a node."""

    node: int
    index: int

    def __str__(self) -> str:
        return f"slot {self.index} of node {self.node}"


@dataclass
class ConnectedNode:
    """Node whose agent is connected to the leader.

    Attributes:
        number: index of the node.
        host: address of the node for the other nodes.
        slots: number of workers that it can run.
        port: free TCP port for the JAX coordinator of the next generation.
        memory_port: port of its server of in-memory checkpoints; 0: it has none.
        last_seen: time of its last message, in seconds of the leader's clock.
        is_idle: it has no running workers.
        runs_generation: the last generation that was started there, as it said when it joined; 0 for none.
    """

    number: int
    host: str
    slots: int
    port: int
    memory_port: int
    last_seen: float
    is_idle: bool = True
    runs_generation: int = 0

    def __str__(self) -> str:
        return f"node {self.number} ({self.host})"

    @property
    def coordinator(self) -> str:
        """HOST:PORT of the JAX coordinator of the next generation, if its process 0 is here."""
        return address_text(self.host, self.port)


@dataclass
class Denylist:
    """Slots and nodes that get no workers because they failed too often.

    A slot is denied after `limit` failures without a newer checkpoint between them. A node is denied after `limit`
    such failures on different slots, unless it is the only node left: then the node is not the cause.
    """

    limit: int
    slots: set[Slot] = field(default_factory=set)
    nodes: set[int] = field(default_factory=set)
    slot_failures: dict[Slot, int] = field(default_factory=dict)
    node_failures: dict[int, int] = field(default_factory=dict)

    def reset_counts(self) -> None:
        """Forgets counted failures after a newer checkpoint. Denied slots and nodes stay denied."""
        self.slot_failures.clear()
        self.node_failures.clear()

    def record_failure(self, slot: Slot, nodes: Iterable[int]) -> str | None:
        """Counts a failure. Returns the name of the slot or node that it puts on the denylist, if any.

        Args:
            slot: slot that failed.
            nodes: numbers of all connected nodes.
        """
        self.slot_failures[slot] = self.slot_failures.get(slot, 0) + 1
        self.node_failures[slot.node] = self.node_failures.get(slot.node, 0) + 1
        if self.slot_failures[slot] >= self.limit:
            self.slots.add(slot)
            self.node_failures[slot.node] -= self.slot_failures.pop(slot)
            return str(slot)
        has_others = any(node not in self.nodes | {slot.node} for node in nodes)
        if self.node_failures[slot.node] >= self.limit and has_others:
            self.nodes.add(slot.node)
            return f"node {slot.node}"
        return None

    def as_json(self) -> dict[str, Any]:
        """Returns all but the limit as JSON."""
        return {
            "slots": sorted(self.slots),
            "nodes": sorted(self.nodes),
            "slot_failures": [[*slot, count] for slot, count in self.slot_failures.items()],
            "node_failures": list(self.node_failures.items()),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Restores what `as_json` returned."""
        self.slots, self.nodes = {Slot(*slot) for slot in saved["slots"]}, set(saved["nodes"])
        self.slot_failures = {Slot(node, index): count for node, index, count in saved["slot_failures"]}
        self.node_failures = dict(saved["node_failures"])

    def is_denied(self, slot: Slot) -> bool:
        """Returns whether the slot gets no worker."""
        return slot in self.slots or slot.node in self.nodes


class NodePool:
    """Connected nodes and their usable slots in the order of ranks."""

    def __init__(self, denylist: Denylist, spares: int) -> None:
        """Creates the node pool.

        Args:
            denylist: slots and nodes that get no workers.
            spares: slots held back while all others are connected.
        """
        self.nodes: dict[int, ConnectedNode] = {}
        self.denylist, self._spares, self.most_slots = denylist, spares, 0

    def add(self, node: ConnectedNode) -> None:
        """Adds a node that joined."""
        self.nodes[node.number] = node
        self.most_slots = max(self.most_slots, sum(node.slots for node in self.nodes.values()))

    def memory_ring(self, node: ConnectedNode) -> list[str]:
        """Returns HOST:PORT of all memory servers as a ring from `node` on, which copies to itself and the next one."""
        ring = sorted((other for other in self.nodes.values() if other.memory_port), key=lambda n: n.number)
        start = next((index for index, other in enumerate(ring) if other.number >= node.number), 0)
        return [f"{other.host}:{other.memory_port}" for other in ring[start:] + ring[:start]]

    def usable_slots(self) -> list[Slot]:
        """Returns the slots for the next generation: not denied, and without the spares that replace nobody."""
        every = [Slot(n.number, i) for n in self.nodes.values() for i in range(n.slots)]
        allowed = sorted(slot for slot in every if not self.denylist.is_denied(slot))
        return allowed[: max(1, self.most_slots - self._spares)]
