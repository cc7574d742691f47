"""Layout choices for a config on a number of devices; all give the same result.

A choice is a mesh, a ZeRO stage, sequence parallelism, the form of context parallelism, a pipeline schedule, a number
of microbatches, and a rematerialisation policy. Rules are those of all shipped layouts together: an axis of one device
has no effect. Model, data, global batch and numerics are the config's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from jaxtrain.config.checks import divisors
from jaxtrain.config.load import load
from jaxtrain.config.schema import Config, DataConfig, OptimizerConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.config.show import text
from jaxtrain.core.layout_check import check_config, check_schedule
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import CONTEXT, DATA_AXIS, PIPELINE_AXIS, SEQUENCE, Rules

SHIPPED = ("3d", "cp_ulysses", "ep_tp", "pp", "pp_fsdp")  # their rules together are those of all shipped layouts
VIRTUAL_STAGES = (2, 4)  # for interleaved_1f1b
MICROBATCHES_PER_STAGE = 8  # at most
REMAT: tuple[str | tuple[str, ...], ...] = ("none", "dots", "full", ("attention",))
# With remat full: the most expensive values to recompute for their size, and all that full keeps.
OFFLOAD = (("attention",), ("input",))


@dataclass(frozen=True)
class LayoutChoice:
    """One layout with its step options.

    Args:
        sizes: of all mesh axes, in the order of AXES.
        sequence_parallel: the model axis also shards the sequence outside of matmuls.
        zero, context_parallel, schedule, virtual_stages, microbatches: as the config's keys.
        remat: policy, or names of the values that stay on the device.
        offload: names of the values that are offloaded to the host.
    """

    sizes: tuple[int, ...]
    sequence_parallel: bool = True
    zero: int = 0
    context_parallel: str = "auto"
    schedule: str = "1f1b_aligned"
    virtual_stages: int | None = None
    microbatches: int = 1
    remat: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: Config, sizes: Mapping[str, int]) -> LayoutChoice:
        """Returns the choice of a config's layout, with these mesh sizes."""
        pipeline, step = config.pipeline, config.step
        return cls(
            tuple(sizes[axis] for axis in AXES), "model" in config.axis_rules.get(SEQUENCE, ()), config.zero,
            config.context_parallel if sizes[CONTEXT] > 1 else "auto", pipeline.schedule, pipeline.virtual_stages,
            step.microbatches, step.remat_policy, step.offloaded,
        )  # fmt: skip

    @cached_property
    def axis_sizes(self) -> dict[str, int]:
        """Axis -> size."""
        return dict(zip(AXES, self.sizes))

    def size(self, *axes: str) -> int:
        """Product of the sizes of some axes."""
        count = 1
        for axis in axes:
            count *= self.axis_sizes[axis]
        return count

    @property
    def fsdp_sizes(self) -> tuple[int, ...]:
        """Sizes of the equivalent mesh without ZeRO stage 3, whose replicas shard along `fsdp`."""
        if self.zero < 3:
            return self.sizes
        moved = {**self.axis_sizes, "fsdp": self.size(DATA_AXIS, "fsdp"), DATA_AXIS: 1}
        return tuple(moved[axis] for axis in AXES)

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    @property
    def mesh(self) -> str:
        """`data 2 x fsdp 8`."""
        return shape_text(self.axis_sizes)

    @property
    def step_keys(self) -> dict[str, Any]:
        """Keys of the config's `step` section."""
        names = () if isinstance(self.remat, str) else self.remat
        saved = {**dict.fromkeys(names, "device"), **dict.fromkeys(self.offload, "host")}
        remat = self.remat if isinstance(self.remat, str) else "full"
        return {"microbatches": self.microbatches, "remat": remat, "remat_save": saved}

    @property
    def options_text(self) -> str:
        """Options besides the mesh: `zero 1, no sequence parallelism, 4 microbatches, remat full`."""
        out = [f"zero {self.zero}"] if self.zero else []
        out += ["no sequence parallelism"] if self.size("model") > 1 and not self.sequence_parallel else []
        out += [self.context_parallel] if self.size(CONTEXT) > 1 else []
        virtual = f" x {self.virtual_stages}" if self.virtual_stages else ""
        out += [self.schedule + virtual] if self.size(PIPELINE_AXIS) > 1 else []
        out += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        out.append(f"remat {self.remat if isinstance(self.remat, str) else text(list(self.remat))}")
        out += [f"offload {text(list(self.offload))}"] if self.offload else []
        return ", ".join(out)

    def __str__(self) -> str:
        return f"{self.mesh}, {self.options_text}"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key that prefers fewer axes and options among equally good choices."""
        axes, remat = sum(size > 1 for size in self.sizes), [*REMAT, self.remat].index(self.remat)
        return axes, self.zero, bool(self.offload), self.microbatches, remat, self.sizes[-1]


@dataclass(frozen=True)
class Workload:
    """Sections and values of a config that all its layout choices share."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    precision: str
    attention: str
    vocab: int
    vocab_chunks: int


@dataclass(eq=False)
class SearchSpace:
    """Legal choices for a config.

    Args:
        config: whose model, data, optimizer, precision and `mesh.replica` all choices share.
        devices: number of devices.
        vocab: vocabulary size.
        slices: TPU slices on the data center's network; an axis must span them.
        refused: problem -> number of meshes that have it.
    """

    config: Config
    devices: int
    vocab: int
    slices: int = 1
    refused: Counter[str] = field(default_factory=Counter)
    _tables: dict[tuple, Table | None] = field(default_factory=dict)

    @cached_property
    def workload(self) -> Workload:
        """Sections and values of the config that all choices share."""
        config = self.config
        return Workload(
            config.model, config.data, config.optimizer, config.precision, config.step.attention, self.vocab,
            config.loss.vocab_chunks,
        )  # fmt: skip

    @cached_property
    def shipped_rules(self) -> Rules:
        """Rules of all shipped layouts together, axes in the order of the mesh."""
        merged: dict[str, set[str]] = {}
        for name in SHIPPED:
            for dim, axes in load(None, f"layout={name}").axis_rules.items():
                merged.setdefault(dim, set()).update(axes)
        return {dim: tuple(axis for axis in AXES if axis in axes) for dim, axes in merged.items()}

    def rules(self, choice: LayoutChoice) -> Rules:
        """Rules of a choice; they name only axes larger than one."""
        sizes = choice.axis_sizes
        rules = {dim: tuple(a for a in axes if sizes[a] > 1) for dim, axes in self.shipped_rules.items()}
        if not choice.sequence_parallel:
            rules[SEQUENCE] = tuple(a for a in rules[SEQUENCE] if a != "model")
        return {dim: axes for dim, axes in rules.items() if axes}

    def to_config(self, choice: LayoutChoice, layout: str = "search") -> Config:
        """The config of a choice."""
        base, sizes = self.config, choice.axis_sizes
        pipeline = {"schedule": choice.schedule, "virtual_stages": choice.virtual_stages}
        return base.model_copy(update={
            "layout": layout, "mesh": type(base.mesh)(**sizes, dcn=self._dcn(sizes)), "rules": self.rules(choice),
            "zero": choice.zero, "context_parallel": choice.context_parallel,
            "pipeline": base.pipeline.model_copy(update=pipeline),
            "step": base.step.model_copy(update=choice.step_keys),
        })  # fmt: skip

    def _dcn(self, sizes: dict[str, int]) -> dict[str, int]:
        """Lets the outermost possible axis span the slices; {} if none can, which the layout check refuses."""
        if self.slices == 1:
            return {}
        return next(({axis: self.slices} for axis, size in sizes.items() if size % self.slices == 0), {})

    def __iter__(self) -> Iterator[LayoutChoice]:
        for choice in self.mesh_choices():
            yield from self.variants(choice)

    def mesh_choices(self) -> Iterator[LayoutChoice]:
        """Every choice of mesh, rules, ZeRO stage and microbatches that passes the layout check."""
        for sizes in self._meshes():
            for choice in self._mesh_variants(LayoutChoice(sizes)):
                if self._is_legal(choice):
                    yield from (replace(choice, zero=zero) for zero in self._zero_stages(choice))

    def _meshes(self) -> Iterator[tuple[int, ...]]:
        model, replicas = self.config.model, max(1, self.config.mesh.replica)
        if self.devices % replicas:
            return
        axes = [a for a in AXES if a != "replica" and (a != "expert" or model.moe)]
        for sizes in factorisations(axes, self.devices // replicas):
            if model.layers % sizes[PIPELINE_AXIS] == 0:
                yield tuple({"replica": replicas, **sizes}.get(axis, 1) for axis in AXES)

    def _mesh_variants(self, choice: LayoutChoice) -> Iterator[LayoutChoice]:
        """A mesh with each option of sequence parallelism, context parallelism and microbatches."""
        preferred = self.config.context_parallel if self.config.context_parallel != "auto" else "ulysses"
        contexts = ("auto",)
        if choice.size(CONTEXT) > 1:
            contexts = tuple(dict.fromkeys((preferred, "ulysses", "ring", "gather")))
        rows, shards = self.config.data.global_batch, choice.size("data", "fsdp", "expert")
        if rows % shards:
            self.refused[f"data.global_batch of {rows} sequences can not be split over {shards} devices"] += 1
            return
        counts = microbatch_counts(rows // shards, choice.size(PIPELINE_AXIS))
        for sequence in (True, False) if choice.size("model") > 1 and choice.size(CONTEXT) == 1 else (True,):
            for context in contexts:
                for count in counts:
                    yield replace(choice, sequence_parallel=sequence, context_parallel=context, microbatches=count)

    def _zero_stages(self, choice: LayoutChoice) -> tuple[int, ...]:
        """Returns the stages that are layouts of their own: 3 is the axis `fsdp`, and 2 is 1 with one microbatch."""
        if choice.size(DATA_AXIS) == 1:
            return (0,)
        return (0, 1) if choice.microbatches == 1 else (0, 1, 2)

    def _is_legal(self, choice: LayoutChoice) -> bool:
        problems = check_config(self.to_config(choice), self.devices, self.vocab)
        if problems:
            self.refused[str(problems[0])] += 1
        return not problems

    def variants(self, choice: LayoutChoice) -> Iterator[LayoutChoice]:
        """A mesh choice with every schedule, rematerialisation policy and offload."""
        for schedule, virtual_stages in self._schedules(choice):
            scheduled = replace(choice, schedule=schedule, virtual_stages=virtual_stages)
            for remat in dict.fromkeys((*REMAT, self.config.step.remat_policy)):
                yield replace(scheduled, remat=remat)
            if choice.size(PIPELINE_AXIS) == 1:
                yield from (replace(scheduled, remat="full", offload=names) for names in OFFLOAD)

    def _schedules(self, choice: LayoutChoice) -> Iterator[tuple[str, int | None]]:
        """Schedules whose virtual stages divide the layers; `schedule_table` makes the final check."""
        stages, layers = choice.size(PIPELINE_AXIS), self.config.model.layers
        if stages == 1:
            yield LayoutChoice.schedule, None
            return
        for name, schedule in SCHEDULES.items():
            for virtual_stages in VIRTUAL_STAGES if not schedule.chunks else (None,):
                if layers % (stages * (virtual_stages or schedule.chunks[0])) == 0:
                    yield name, virtual_stages

    def schedule_table(self, choice: LayoutChoice) -> Table | None:
        """Table of a choice's schedule; None for one stage, or if the stages can not run it."""
        stages = choice.size(PIPELINE_AXIS)
        if stages == 1:
            return None
        context = choice.context_parallel if choice.size(CONTEXT) > 1 else ""
        key = choice.schedule, choice.virtual_stages, stages, choice.microbatches, context
        if key not in self._tables:
            table = None
            if not check_schedule(self.to_config(choice), self.devices):
                table = load_table(choice.schedule, stages, choice.microbatches, choice.virtual_stages)
            self._tables[key] = table
        return self._tables[key]


def microbatch_counts(rows: int, stages: int) -> list[int]:
    """Numbers of microbatches into which a device's rows of a step can be split, each at least twice the last.

    Stages need at least as many microbatches as stages, and at most MICROBATCHES_PER_STAGE times that.
    """
    out: list[int] = []
    for count in divisors(rows, 1, count=rows):
        if stages > 1 and not stages <= count <= MICROBATCHES_PER_STAGE * stages:
            continue
        if not out or count >= 2 * out[-1]:
            out.append(count)
    return out


def factorisations(axes: Sequence[str], devices: int) -> Iterator[dict[str, int]]:
    """Yields every way to write `devices` as a product of the sizes of these axes."""
    if not axes:
        if devices == 1:
            yield {}
        return
    for size in divisors(devices, devices, count=devices):
        for rest in factorisations(axes[1:], devices // size):
            yield {axes[0]: size, **rest}
