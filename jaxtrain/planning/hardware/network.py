"""Seconds of a collective on the network that joins its devices.

Latency and bandwidth (Hockney's alpha and beta) of ring algorithms, as NCCL and the TPU compiler use them:

- GPUs under one switch: what a device sends over its NVLink bandwidth, and a step of latency for each of n - 1.
- GPUs of several nodes: the ring enters and leaves each node over the network cards of all its members; what takes
  longer counts, the way inside or the way between.
- TPU slice: a group that lies along some dims of the torus gathers over all of their links at once, two of a dim that
  is a ring and one of a line. An all-to-all crosses the middle of its longest dim.
- several slices: inside of them, then between them, each device with its share.
- simulated devices: all members of a group meet, then each reads and writes its whole tensor in the host's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

from jaxtrain.planning.hardware.calibration import Calibration
from jaxtrain.planning.hardware.chips import Chip, Link, SharedMemory, Switch, Torus
from jaxtrain.planning.hardware.targets import Target

SAMPLED = 4  # groups of a collective that are priced; the slowest counts


@dataclass(frozen=True)
class DevicePosition:
    """Position of a device: its slice or NVLink domain, the chip's coordinates in the torus, the core on the chip."""

    domain: int
    coords: tuple[int, ...] = ()
    core: int = 0


@dataclass(frozen=True)
class CollectiveTime:
    """One run of a collective. `seconds` is None where nobody knows the network."""

    seconds: float | None
    network: str


def places(target: Target, devices: Sequence[Any]) -> list[DevicePosition]:
    """Returns the positions of JAX devices, in the order of a mesh: `Mesh.devices.flat`."""
    chip = target.chip
    if chip is not None and isinstance(chip.inside, Switch):
        domain = chip.inside.domain(target.shape[1])
        return [DevicePosition(device.id // domain) for device in devices]
    if chip is not None and isinstance(chip.inside, Torus):
        dims = chip.inside.dims
        return [
            DevicePosition(getattr(d, "slice_index", 0) or 0, tuple(d.coords[:dims]), getattr(d, "core_on_chip", 0))
            for d in devices
        ]
    return [DevicePosition(device.process_index) for device in devices]


@dataclass(frozen=True)
class Fabric:
    """The network under a mesh.

    Args:
        chip: None where nothing is known of the network: prices have no seconds then.
        shares: achieved.
        torus: sizes of a slice's dims; empty of GPUs.
        places: of the devices in the order of the mesh.
    """

    chip: Chip | None
    shares: Calibration
    torus: tuple[int, ...]
    places: Sequence[DevicePosition]

    def price(self, op: str, groups: Sequence[Sequence[int]], sent: float) -> CollectiveTime:
        """One run of a collective.

        Args:
            op: as in `communication.Collective`.
            groups: device numbers that take part together; of a permute (source, target).
            sent: bytes that a device sends around a ring, as in `communication.Collective`.
        """
        if op == "collective-permute":
            return self._permute(groups, sent)
        size = max(map(len, groups))
        full = _full(op, sent, size)
        step = max(1, len(groups) // SAMPLED)
        priced = [self._group(op, group, full) for group in groups[::step] if len(group) == size]
        return max(priced, key=lambda one: one.seconds or 0.0)

    def to_host(self, size: float) -> CollectiveTime:
        """One copy of so many bytes between a device and its host."""
        way = None if self.chip is None else self.chip.host
        if way is None:
            return CollectiveTime(None, "host")
        return CollectiveTime(float(way.latency) + size / (float(way.bandwidth) * self.shares.host), way.name)

    def _group(self, op: str, group: Sequence[int], full: float) -> CollectiveTime:
        members = [self.places[device] for device in group]
        inside, outside = (None, None) if self.chip is None else (self.chip.inside, self.chip.outside)
        domains = len({place.domain for place in members})
        if isinstance(inside, SharedMemory):
            return _shared(op, len(members), full, inside)
        if inside is None or outside is None:
            return CollectiveTime(None, "host" if domains == 1 else "network")
        if isinstance(inside, Switch):
            return self._switched(op, len(members), domains, full, inside, outside)
        return self._torus(op, members, domains, full, inside, outside)

    def _switched(self, op: str, n: int, domains: int, full: float, inside: Switch, outside: Link) -> CollectiveTime:
        nvlink, card = self._inner(inside.bandwidth), self._outer(outside)
        passes, own = (2 if op == "all-reduce" else 1), n // domains
        steps = (n - domains) * float(inside.latency) + (domains - 1) * float(outside.latency)
        delay = float(inside.start) + passes * steps
        if domains == 1:
            return CollectiveTime(delay + passes * full * (n - 1) / n / nvlink, inside.name)
        if op in ("all-to-all", "ragged-all-to-all"):
            ways = full * (own - 1) / n / nvlink, full * (n - own) / n / card
        else:
            ways = full * (n - 1) / n / nvlink, full * (domains - 1) / domains / (own * card)
        return CollectiveTime(delay + passes * max(ways), outside.name if own == 1 else f"{inside.name}+{outside.name}")

    def _torus(
        self, op: str, members: Sequence[DevicePosition], domains: int, full: float, inside: Torus, outside: Link
    ) -> CollectiveTime:
        passes = 2 if op == "all-reduce" else 1
        here = [place for place in members if place.domain == members[0].domain]
        seconds = passes * self._slice(op, here, full * len(here) / len(members) if _is_exchange(op) else full, inside)
        if domains == 1:
            return CollectiveTime(seconds, inside.name)
        share = full * (len(members) - len(here)) / len(members) if _is_exchange(op) else full / len(here)
        crossing = share * (1 if _is_exchange(op) else (domains - 1) / domains) / self._outer(outside)
        seconds += passes * (crossing + (domains - 1) * float(outside.latency))
        return CollectiveTime(seconds, outside.name if len(here) == 1 else f"{inside.name}+{outside.name}")

    def _slice(self, op: str, members: Sequence[DevicePosition], full: float, torus: Torus) -> float:
        """Seconds of one pass of a group inside of a slice."""
        if len(members) == 1:
            return 0.0
        chips = {place.coords for place in members}
        assert self.chip is not None
        shared = self.chip.devices // max(1, len(members) // len(chips))  # groups that use a chip's links at once
        if len(chips) == 1:  # the two halves of a chip
            return full / 2 / (6 * self._inner(torus.link))
        link, lines = self._inner(torus.link) / shared, self._lines(chips, torus)
        delay = float(torus.latency) * sum(count // 2 if ring else count - 1 for count, ring, _ in lines)
        if _is_exchange(op):
            # All that one half of a dim has for the other crosses its middle, of a ring at two places.
            return delay + max(full * count / (8 if ring else 4) * apart / link for count, ring, apart in lines)
        width = sum((2 if ring else 1) / apart for _, ring, apart in lines)
        return delay + full * (len(chips) - 1) / len(chips) / (width * link)

    def _lines(self, chips: set[tuple[int, ...]], torus: Torus) -> list[tuple[int, bool, int]]:
        """(members, whether they form a ring, distance between neighbours) of each dim along which a group lies."""
        lines = []
        for size, along in zip(self.torus, zip(*chips)):
            at = sorted(set(along))
            if len(at) > 1:
                apart = min(b - a for a, b in pairwise(at))
                lines.append((len(at), torus.is_ring(size) and len(at) * apart == size, apart))
        return lines

    def _permute(self, pairs: Sequence[Sequence[int]], sent: float) -> CollectiveTime:
        ends = [(self.places[source], self.places[target]) for source, target in pairs]
        crosses = any(a.domain != b.domain for a, b in ends)
        inside, outside = (None, None) if self.chip is None else (self.chip.inside, self.chip.outside)
        if isinstance(inside, SharedMemory):
            return _shared("collective-permute", inside.devices, sent, inside)
        if inside is None or outside is None:
            return CollectiveTime(None, "network" if crosses else "host")
        if crosses:
            return CollectiveTime(float(outside.latency) + sent / self._outer(outside), outside.name)
        if isinstance(inside, Switch):
            return CollectiveTime(float(inside.start) + sent / self._inner(inside.bandwidth), inside.name)
        hops = max(self._hops(a.coords, b.coords, inside) for a, b in ends)
        return CollectiveTime(
            hops * float(inside.latency) + max(1, hops) * sent / self._inner(inside.link), inside.name
        )

    def _hops(self, a: tuple[int, ...], b: tuple[int, ...], torus: Torus) -> int:
        distances = ((abs(x - y), size) for x, y, size in zip(a, b, self.torus))
        return sum(min(d, size - d) if torus.is_ring(size) else d for d, size in distances)

    def _inner(self, bandwidth: Any) -> float:
        return float(bandwidth) * self.shares.inside

    def _outer(self, outside: Link) -> float:
        return float(outside.bandwidth) * self.shares.outside


def _shared(op: str, members: int, full: float, inside: SharedMemory) -> CollectiveTime:
    rate = inside.reduce if op in ("all-reduce", "reduce-scatter") else inside.copy
    return CollectiveTime(members * float(inside.meeting) + 2 * full / float(rate), inside.name)


def _is_exchange(op: str) -> bool:
    return op in ("all-to-all", "ragged-all-to-all")


def _full(op: str, sent: float, size: int) -> float:
    """Bytes of the whole tensor of a group, of which a device sends a part around a ring."""
    return sent / (2 if op == "all-reduce" else 1) * size / max(1, size - 1)


def crosses(places: Sequence[DevicePosition], sizes: dict[str, int]) -> dict[str, bool]:
    """Returns whether each mesh axis larger than one leaves a node or slice anywhere."""
    lengths, out = list(sizes.values()), {}
    for at, (axis, size) in enumerate(sizes.items()):
        if size == 1:
            continue
        stride = prod(lengths[at + 1 :])
        out[axis] = any(
            places[i].domain != places[i + stride].domain
            for i in range(len(places) - stride) if i // stride % size < size - 1
        )  # fmt: skip
    return out
