"""Smaller pods of the same shape, compiled instead of a cluster too large to compile in about a minute.

A pod has fewer replicas or shards than the cluster; each has the same devices, rows and microbatches:

- fewer replicas of the same state (`data` without ZeRO, `replica`) change only which devices communicate;
- with fewer shards (`fsdp`, `data` with ZeRO) each is larger, so the bytes that a device holds, reads and writes are a
  constant plus a part in 1 / shards: two pods determine both (`predict.extrapolate`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.sharding.layout import resolve_layout
from jaxtrain.sharding.rules import BATCH, CONTEXT, DATA_AXIS, EXPERT, SEQUENCE, axes_of, with_implied_rules

MAX_DEVICES = 2**15  # of a step that is compiled as it is, in up to about a minute
MIN_SIZE = 2  # replicas or shards of a pod: with one the program would differ


@dataclass(frozen=True)
class Pod:
    """A smaller config and target, compiled instead of larger ones.

    Args:
        axes: mesh axis that is smaller here -> its size in the full cluster.
        sharded: the one of these axes that shards weights or optimizer state; else empty.
    """

    config: Config
    target: Target
    axes: dict[str, int]
    sharded: str = ""

    def __str__(self) -> str:
        sizes = (f"{axis} {getattr(self.config.mesh, axis)} instead of {size}" for axis, size in self.axes.items())
        return f"{self.target} ({', '.join(sizes)})"


def smaller_pods(config: Config, target: Target, max_devices: int = MAX_DEVICES) -> tuple[Pod, ...]:
    """Returns the pods to compile instead of a config on a target: none, one, or two with the larger first.

    None if the target is small enough, or if its large axes are neither replicas nor shards.

    Args:
        config: of the full cluster.
        target: the full cluster.
        max_devices: number of devices up to which a step is compiled as it is.
    """
    if target.devices is None or target.devices <= max_devices:
        return ()
    full = _Cluster(config, target, resolve_layout(config.layout, config.mesh, config.axis_rules, target.devices).sizes)
    smaller = full
    for axis in _replica_axes(config):
        smaller = smaller.shrink(axis, max_devices)
    if smaller.devices <= max_devices:
        return (smaller.pod(full),)
    for axis in _shard_axes(config):
        near = smaller.shrink(axis, max_devices)
        far = near.shrink(axis, near.devices // 2)
        if far.devices < near.devices <= max_devices:
            return near.pod(full, axis), far.pod(full, axis)
    return (smaller.pod(full),) if smaller.devices < full.devices else ()


def shard_counts(near: Pod, far: Pod) -> tuple[int, int, int]:
    """Numbers of shards of the full cluster, of the larger pod and of the smaller one."""
    axis = near.sharded
    return near.axes[axis], getattr(near.config.mesh, axis), getattr(far.config.mesh, axis)


def _replica_axes(config: Config) -> list[str]:
    """Axes whose devices hold the same state and different rows."""
    rules = with_implied_rules(config.axis_rules, config.zero)
    others = {axis for name, axes in rules.items() if name != BATCH for axis in axes}
    others |= {DATA_AXIS} if config.zero else set()
    return [axis for axis in axes_of(BATCH, rules) if axis not in others]


def _shard_axes(config: Config) -> list[str]:
    """Axes whose devices hold shards and different rows, without those that split experts or sequences."""
    rules = with_implied_rules(config.axis_rules, config.zero)
    others = {axis for name in (EXPERT, CONTEXT, SEQUENCE) for axis in axes_of(name, rules)}
    return [axis for axis in axes_of(BATCH, rules) if axis not in (*others, *_replica_axes(config))]


@dataclass(frozen=True)
class _Cluster:
    """A config on a target, with the sizes of all mesh axes."""

    config: Config
    target: Target
    sizes: dict[str, int]

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    def shrink(self, axis: str, devices: int) -> _Cluster:
        """Shrinks the axis until at most `devices` remain, or as far as possible."""
        clusters = sorted(self._divisions(axis), key=lambda one: -one.devices)
        return next((one for one in clusters if one.devices <= devices), clusters[-1])

    def _divisions(self, axis: str) -> Iterator[_Cluster]:
        """Every legal division of the axis, by 1 too."""
        size, dcn = self.sizes[axis], self.config.mesh.dcn
        # Axes that span slices or nodes lose whole slices.
        spans = self.target.slices > 1 or any(n > 1 for n in dcn.values())
        outer = dcn.get(axis, 1) if spans else size
        for factor in range(1, size // MIN_SIZE + 1 if size > 1 else 2):
            target = _divide_target(self.target, factor)
            if size % factor or outer % factor or (factor > 1 and outer // factor < MIN_SIZE) or target is None:
                continue
            if self.config.data.global_batch % factor == 0:
                yield self._divide(axis, factor, target)

    def _divide(self, axis: str, factor: int, target: Target) -> _Cluster:
        mesh, data = self.config.mesh, self.config.data
        sizes = {**self.sizes, axis: self.sizes[axis] // factor}
        dcn = {name: n // factor if name == axis else n for name, n in mesh.dcn.items()}
        config = self.config.model_copy(update={
            "mesh": mesh.model_copy(update={**sizes, "dcn": dcn}),
            "data": data.model_copy(update={"global_batch": data.global_batch // factor}),
        })  # fmt: skip
        return _Cluster(config, target, sizes)

    def pod(self, full: _Cluster, sharded: str = "") -> Pod:
        """Returns this cluster as a pod of the full one."""
        axes = {axis: size for axis, size in full.sizes.items() if size != self.sizes[axis]}
        return Pod(self.config, self.target, axes, sharded)


def _divide_target(target: Target, factor: int) -> Target | None:
    """The target with slices, nodes or simulated devices divided by a factor; None if it does not divide them."""
    if target.platform == "tpu":
        return None if target.slices % factor else replace(target, slices=target.slices // factor)
    first, *rest = target.shape
    return None if first % factor else replace(target, shape=(first // factor, *rest))
