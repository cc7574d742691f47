"""Seconds of a collective on the network that connects its devices.

Latency and bandwidth (Hockney's alpha and beta) of ring algorithms, as NCCL and the TPU compiler use them:

- GPUs under one switch: bytes over the NVLink bandwidth, plus n - 1 steps of latency.
- GPUs of several nodes: the ring enters and leaves each node over the network cards of all its members; the slower of
  the two networks counts.
- TPU slice: a group along some dims of the torus gathers over all of their links at once, two of a ring and one of a
  line. An all-to-all crosses the middle of its longest dim.
- several slices: first inside of them, then between them, each device with its shard.
- replicas with a slow link between them (`--dcn`): all devices of a replica share it; it or the network inside counts,
  whichever is slower.
- simulated devices: all members of a group meet, then each reads and writes its full tensor in the host's memory.
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

MAX_GROUPS = 4  # groups of a collective that are priced; the slowest counts
EXCHANGES = ("all-to-all", "ragged-all-to-all")


@dataclass(frozen=True)
class DevicePosition:
    """Position of a device: its slice or NVLink domain, its chip's coordinates in the torus, its core on the chip."""

    domain: int
    coords: tuple[int, ...] = ()
    core: int = 0


@dataclass(frozen=True)
class CollectiveTime:
    """Time of one run of a collective. `seconds` is None if the network is unknown."""

    seconds: float | None
    network: str


def device_positions(target: Target, devices: Sequence[Any]) -> list[DevicePosition]:
    """Positions of JAX devices, in the order of `Mesh.devices.flat`."""
    network = target.chip.inside if target.chip else None
    if isinstance(network, Switch):
        return [DevicePosition(device.id // network.domain_size(target.shape[1])) for device in devices]
    if isinstance(network, Torus):
        return [
            DevicePosition(
                getattr(d, "slice_index", 0) or 0, tuple(d.coords[: network.dims]), getattr(d, "core_on_chip", 0)
            )
            for d in devices
        ]
    return [DevicePosition(device.process_index) for device in devices]


@dataclass(frozen=True)
class SlowLink:
    """Link between replicas, the outermost mesh axis.

    Args:
        name: such as `10Gbit`.
        bandwidth: bytes/s that a replica sends, all its devices together.
        replicas: size of the axis.
    """

    name: str
    bandwidth: float
    replicas: int


@dataclass(frozen=True)
class Fabric:
    """Network under a mesh.

    Args:
        chip: None if unknown: times have no seconds then.
        calibration: fractions of the bandwidths that programs reach.
        torus: sizes of a slice's dims; empty for GPUs.
        positions: of the devices, in the order of the mesh.
        slow_link: between replicas; None: the network of the target.
    """

    chip: Chip | None
    calibration: Calibration
    torus: tuple[int, ...]
    positions: Sequence[DevicePosition]
    slow_link: SlowLink | None = None

    def collective_time(self, op: str, groups: Sequence[Sequence[int]], sent: float) -> CollectiveTime:
        """Time of one run of a collective.

        Args:
            op: as in `hlo.collectives.Collective`.
            groups: device numbers that take part together; for a permute (source, target).
            sent: bytes that a device sends around a ring, as in `hlo.collectives.Collective`.
        """
        if op == "collective-permute":
            return self._between_replicas(op, max(groups, key=self._replica_count), sent, self._permute(groups, sent))
        size = max(map(len, groups))
        tensor = _tensor_bytes(op, sent, size)
        step = max(1, len(groups) // MAX_GROUPS)
        times = [
            self._between_replicas(op, group, tensor, self._group(op, group, tensor))
            for group in groups[::step] if len(group) == size
        ]  # fmt: skip
        return max(times, key=lambda one: one.seconds or 0.0)

    def exchange_time(self, sent: float) -> CollectiveTime:
        """Time in which every device sends `sent` bytes to other replicas."""
        if (link := self.slow_link) is not None:
            return CollectiveTime(sent * self._devices_of_replica / link.bandwidth, link.name)
        outside = None if self.chip is None else self.chip.outside
        if outside is None:
            return CollectiveTime(None, "network")
        return CollectiveTime(sent / self._outside_rate(outside), outside.name)

    def _between_replicas(self, op: str, group: Sequence[int], tensor: float, time: CollectiveTime) -> CollectiveTime:
        """Returns the time of a group, or that on the slow link between its replicas if it is longer."""
        if self.slow_link is None or time.seconds is None or (count := self._replica_count(group)) == 1:
            return time
        members = len(group) / count
        if op == "collective-permute":
            sent = tensor
        elif op in EXCHANGES:
            sent = tensor * (len(group) - members) / len(group)
        else:
            sent = (2 if op == "all-reduce" else 1) * tensor * (count - 1) / count / members
        slow = self.exchange_time(sent)
        return max(time, slow, key=lambda one: one.seconds or 0.0)

    def _replica_count(self, group: Sequence[int]) -> int:
        """Returns the number of replicas of a group of devices."""
        return len({device // self._devices_of_replica for device in group})

    @property
    def _devices_of_replica(self) -> int:
        return len(self.positions) // self.slow_link.replicas if self.slow_link else len(self.positions)

    def host_copy_time(self, size: float) -> CollectiveTime:
        """Time of one copy of `size` bytes between a device and its host."""
        link = None if self.chip is None else self.chip.host
        if link is None:
            return CollectiveTime(None, "host")
        return CollectiveTime(float(link.latency) + size / (float(link.bandwidth) * self.calibration.host), link.name)

    def _group(self, op: str, group: Sequence[int], tensor: float) -> CollectiveTime:
        members = [self.positions[device] for device in group]
        inside, outside = (None, None) if self.chip is None else (self.chip.inside, self.chip.outside)
        domains = len({position.domain for position in members})
        if isinstance(inside, SharedMemory):
            return _shared_memory(op, len(members), tensor, inside)
        if inside is None or outside is None:
            return CollectiveTime(None, "host" if domains == 1 else "network")
        if isinstance(inside, Switch):
            return self._switched(op, len(members), domains, tensor, inside, outside)
        return self._slices(op, members, domains, tensor, inside, outside)

    def _switched(self, op: str, n: int, domains: int, tensor: float, inside: Switch, outside: Link) -> CollectiveTime:
        nvlink, card = self._inside_rate(inside.bandwidth), self._outside_rate(outside)
        passes, per_domain = (2 if op == "all-reduce" else 1), n // domains
        latency = (n - domains) * float(inside.latency) + (domains - 1) * float(outside.latency)
        delay = float(inside.start) + passes * latency
        if domains == 1:
            return CollectiveTime(delay + passes * tensor * (n - 1) / n / nvlink, inside.name)
        if op in EXCHANGES:
            seconds = tensor * (per_domain - 1) / n / nvlink, tensor * (n - per_domain) / n / card
        else:
            seconds = tensor * (n - 1) / n / nvlink, tensor * (domains - 1) / domains / (per_domain * card)
        network = outside.name if per_domain == 1 else f"{inside.name}+{outside.name}"
        return CollectiveTime(delay + passes * max(seconds), network)

    def _slices(
        self, op: str, members: Sequence[DevicePosition], domains: int, tensor: float, inside: Torus, outside: Link
    ) -> CollectiveTime:
        passes, is_exchange = 2 if op == "all-reduce" else 1, op in EXCHANGES
        local = [position for position in members if position.domain == members[0].domain]
        local_tensor = tensor * len(local) / len(members) if is_exchange else tensor
        seconds = passes * self._slice(local, local_tensor, inside, is_exchange)
        if domains == 1:
            return CollectiveTime(seconds, inside.name)
        shard = tensor * (len(members) - len(local)) / len(members) if is_exchange else tensor / len(local)
        crossing = shard * (1 if is_exchange else (domains - 1) / domains) / self._outside_rate(outside)
        seconds += passes * (crossing + (domains - 1) * float(outside.latency))
        return CollectiveTime(seconds, outside.name if len(local) == 1 else f"{inside.name}+{outside.name}")

    def _slice(self, members: Sequence[DevicePosition], tensor: float, torus: Torus, is_exchange: bool) -> float:
        """Seconds of one pass of a group inside a slice."""
        if len(members) == 1:
            return 0.0
        chips = {position.coords for position in members}
        assert self.chip is not None
        sharing = self.chip.devices // max(1, len(members) // len(chips))  # groups that use a chip's links at once
        if len(chips) == 1:  # the two halves of a chip
            return tensor / 2 / (6 * self._inside_rate(torus.link))
        link, dims = self._inside_rate(torus.link) / sharing, self._dims(chips, torus)
        delay = float(torus.latency) * sum(count // 2 if is_ring else count - 1 for count, is_ring, _ in dims)
        if is_exchange:
            # All bytes from one half of a dim to the other cross its middle, in a ring at two places.
            return delay + max(tensor * count / (8 if is_ring else 4) * gap / link for count, is_ring, gap in dims)
        links = sum((2 if is_ring else 1) / gap for _, is_ring, gap in dims)
        return delay + tensor * (len(chips) - 1) / len(chips) / (links * link)

    def _dims(self, chips: set[tuple[int, ...]], torus: Torus) -> list[tuple[int, bool, int]]:
        """(members, whether they form a ring, distance between neighbours) of each dim along which a group extends."""
        dims = []
        for size, coords in zip(self.torus, zip(*chips)):
            indices = sorted(set(coords))
            if len(indices) > 1:
                gap = min(b - a for a, b in pairwise(indices))
                dims.append((len(indices), torus.is_ring(size) and len(indices) * gap == size, gap))
        return dims

    def _permute(self, pairs: Sequence[Sequence[int]], sent: float) -> CollectiveTime:
        ends = [(self.positions[source], self.positions[target]) for source, target in pairs]
        is_crossing = any(a.domain != b.domain for a, b in ends)
        inside, outside = (None, None) if self.chip is None else (self.chip.inside, self.chip.outside)
        if isinstance(inside, SharedMemory):
            return _shared_memory("collective-permute", inside.devices, sent, inside)
        if inside is None or outside is None:
            return CollectiveTime(None, "network" if is_crossing else "host")
        if is_crossing:
            return CollectiveTime(float(outside.latency) + sent / self._outside_rate(outside), outside.name)
        if isinstance(inside, Switch):
            return CollectiveTime(float(inside.start) + sent / self._inside_rate(inside.bandwidth), inside.name)
        hops = max(self._hops(a.coords, b.coords, inside) for a, b in ends)
        return CollectiveTime(
            hops * float(inside.latency) + max(1, hops) * sent / self._inside_rate(inside.link), inside.name
        )

    def _hops(self, a: tuple[int, ...], b: tuple[int, ...], torus: Torus) -> int:
        distances = ((abs(x - y), size) for x, y, size in zip(a, b, self.torus))
        return sum(min(d, size - d) if torus.is_ring(size) else d for d, size in distances)

    def _inside_rate(self, bandwidth: Any) -> float:
        return float(bandwidth) * self.calibration.inside

    def _outside_rate(self, outside: Link) -> float:
        return float(outside.bandwidth) * self.calibration.outside


def _shared_memory(op: str, members: int, tensor: float, memory: SharedMemory) -> CollectiveTime:
    rate = memory.reduce if op in ("all-reduce", "reduce-scatter") else memory.copy
    return CollectiveTime(members * float(memory.barrier) + 2 * tensor / float(rate), memory.name)


def _tensor_bytes(op: str, sent: float, size: int) -> float:
    """Bytes of a group's full tensor, from those that a device sends around a ring."""
    return sent / (2 if op == "all-reduce" else 1) * size / max(1, size - 1)


def axes_crossing_domains(positions: Sequence[DevicePosition], sizes: dict[str, int]) -> dict[str, bool]:
    """Returns whether each mesh axis larger than one connects devices of different nodes or slices."""
    lengths, out = list(sizes.values()), {}
    for index, (axis, size) in enumerate(sizes.items()):
        if size == 1:
            continue
        stride = prod(lengths[index + 1 :])
        out[axis] = any(
            positions[i].domain != positions[i + stride].domain
            for i in range(len(positions) - stride) if i // stride % size < size - 1
        )  # fmt: skip
    return out
