"""Smaller pods of the same shape, compiled in place of a cluster too large to compile in about a minute.

A pod has fewer replicas than the cluster, each on the same devices, with the same rows and microbatches:

- fewer replicas that hold the same (`data` without ZeRO, `replica`) change nothing of what a device does, but which
  devices meet;
- fewer shards (`fsdp`, `data` with ZeRO) are larger shards, so that what a device keeps, reads and writes is a constant
  and a part that shrinks as 1 / shards: two pods tell both (`plan.extrapolate`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.sharding.layout import resolve_layout
from jaxtrain.sharding.rules import BATCH, CONTEXT, DATA_AXIS, EXPERT, SEQUENCE, axes_of, with_implied_rules

LARGEST = 2**15  # devices for which a step is compiled as it is: the compiler then takes up to about a minute
LEAST = 2  # replicas or shards of a pod: with one the program would be another


@dataclass(frozen=True)
class Pod:
    """A config and a target in place of larger ones.

    Args:
        axes: name -> size in the cluster of each mesh axis that is smaller here.
        sharded: the one among them over which weights or the optimizer's state are cut; else empty.
    """

    config: Config
    target: Target
    axes: dict[str, int]
    sharded: str = ""

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{axis} {getattr(self.config.mesh, axis)} instead of {size}" for axis, size in self.axes.items()
        )
        return f"{self.target} ({sizes})"


def pods(config: Config, target: Target, largest: int = LARGEST) -> tuple[Pod, ...]:
    """Returns what to compile in place of a config on a target: nothing, one pod, or two, the larger first.

    Nothing where the target is small enough, or the axes that are large are none of replicas or shards.

    Args:
        largest: devices for which a step is compiled as it is.
    """
    devices = target.devices
    if devices is None or devices <= largest:
        return ()
    layout = resolve_layout(config.layout, config.mesh, config.rules, devices)
    whole = _SizedConfig(config, target, layout.sizes)
    cut = whole
    for axis in _replicated(config):
        cut = cut.down(axis, largest)
    if cut.devices <= largest:
        return (cut.pod(whole),)
    for axis in _sharded(config):
        near = cut.down(axis, largest)
        far = near.down(axis, near.devices // 2)
        if far.devices < near.devices <= largest:
            return near.pod(whole, axis), far.pod(whole, axis)
    return (cut.pod(whole),) if cut.devices < devices else ()


def shards(near: Pod, far: Pod) -> tuple[int, int, int]:
    """Numbers of shards of the whole, of the larger pod and of the smaller one."""
    axis = near.sharded
    return near.axes[axis], getattr(near.config.mesh, axis), getattr(far.config.mesh, axis)


def _replicated(config: Config) -> list[str]:
    """Axes along which devices hold the same and have rows of their own."""
    rules = with_implied_rules(config.rules, config.zero)
    others = {axis for name, axes in rules.items() if name != BATCH for axis in axes}
    others |= {DATA_AXIS} if config.zero else set()
    return [axis for axis in axes_of(BATCH, rules) if axis not in others]


def _sharded(config: Config) -> list[str]:
    """Axes along which devices hold shards and have rows of their own, none that split experts or sequences."""
    rules = with_implied_rules(config.rules, config.zero)
    others = {axis for name in (EXPERT, CONTEXT, SEQUENCE) for axis in axes_of(name, rules)}
    return [axis for axis in axes_of(BATCH, rules) if axis not in (*others, *_replicated(config))]


@dataclass(frozen=True)
class _SizedConfig:
    """A config on a target with all sizes of its mesh."""

    config: Config
    target: Target
    sizes: Mapping[str, int]

    @property
    def devices(self) -> int:
        return prod(self.sizes.values())

    def down(self, axis: str, devices: int) -> _SizedConfig:
        """Shrinks the axis to this many devices or fewer, or as far as it goes."""
        cuts = sorted(self._cuts(axis), key=lambda one: -one.devices)
        return next((one for one in cuts if one.devices <= devices), cuts[-1])

    def _cuts(self, axis: str) -> Iterator[_SizedConfig]:
        """Every legal one, itself too."""
        size, spans = self.sizes[axis], self.config.mesh.dcn
        for factor in range(1, size // LEAST + 1 if size > 1 else 2):
            # Where axes span slices or nodes, whole slices are left out.
            outer = spans.get(axis, 1) if any(n > 1 for n in spans.values()) or self.target.slices > 1 else size
            target = _smaller(self.target, factor)
            if size % factor or outer % factor or (factor > 1 and outer // factor < LEAST) or target is None:
                continue
            if self.config.data.global_batch % factor == 0:
                yield self._divided(axis, factor, target)

    def _divided(self, axis: str, factor: int, target: Target) -> _SizedConfig:
        mesh, data = self.config.mesh, self.config.data
        sizes = {**self.sizes, axis: self.sizes[axis] // factor}
        dcn = {name: n // factor if name == axis else n for name, n in mesh.dcn.items()}
        made = self.config.model_copy(update={
            "mesh": mesh.model_copy(update={**sizes, "dcn": dcn}),
            "data": data.model_copy(update={"global_batch": data.global_batch // factor}),
        })  # fmt: skip
        return _SizedConfig(made, target, sizes)

    def pod(self, whole: _SizedConfig, sharded: str = "") -> Pod:
        """Returns the pod that represents the whole cluster."""
        axes = {axis: size for axis, size in whole.sizes.items() if size != self.sizes[axis]}
        return Pod(self.config, self.target, axes, sharded)


def _smaller(target: Target, factor: int) -> Target | None:
    """The target with so many times fewer slices, nodes or simulated devices; None where it cannot be cut so."""
    first = target.slices if target.platform == "tpu" else target.shape[0]
    if first % factor:
        return None
    if target.platform == "tpu":
        return replace(target, slices=first // factor)
    return replace(target, shape=(first // factor, *target.shape[1:]))
