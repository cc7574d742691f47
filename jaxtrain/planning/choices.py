"""Layout choices for a config on a number of devices; none changes its results.

Meshes x ZeRO stage x sequence parallelism x how attention crosses shards x pipeline schedule x microbatches x what is
computed again. Rules are those of the shipped layouts, all of them together: an axis of one device has no effect.
The model, the data, the global batch and the numerics are the config's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from jaxtrain.config.checks import divisors
from jaxtrain.config.load import load
from jaxtrain.config.schema import Config
from jaxtrain.config.show import text
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.pipeline.schedules.files import load as load_table
from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.planning.legal import factorisations
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import CONTEXT, DATA_AXIS, PIPELINE_AXIS, SEQUENCE, Rules

SHIPPED = ("3d", "cp_ulysses", "ep_tp", "pp", "pp_fsdp")  # whose rules, together, are those of all shipped layouts
ISLANDS = "replica"
CHUNKS = (2, 4)  # of interleaved_1f1b
ROUNDS = 8  # microbatches are at most so many a stage
REMAT: tuple[str | tuple[str, ...], ...] = ("none", "dots", "full", ("attention",))
OFFLOAD = (("attention",), ("input",))  # beside full: what is dearest to compute again, for its size; all that is kept


@dataclass(frozen=True)
class Choice:
    """One way.

    Args:
        sizes: of all mesh axes.
        sequence: sequence parallelism, where `model` is above 1.
        zero, context, schedule, chunks, accumulate, remat, offload: as the config's keys.
    """

    sizes: tuple[int, ...]
    sequence: bool = True
    zero: int = 0
    context: str = "auto"
    schedule: str = "1f1b_aligned"
    chunks: int | None = None
    accumulate: int = 1
    remat: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Config, sizes: Mapping[str, int]) -> Choice:
        """Returns the choice that the layout of a config is, with these mesh sizes."""
        pipeline, step = config.pipeline, config.step
        return cls(
            tuple(sizes[axis] for axis in AXES), "model" in config.rules.get(SEQUENCE, ()), config.zero,
            config.context_parallel if sizes[CONTEXT] > 1 else "auto", pipeline.schedule, pipeline.virtual_stages,
            step.microbatches,
            step.remat_policy, step.offloaded,
        )  # fmt: skip

    @cached_property
    def by_axis(self) -> dict[str, int]:
        """Axis -> size."""
        return dict(zip(AXES, self.sizes))

    def size(self, *axes: str) -> int:
        """Devices along some axes together."""
        count = 1
        for axis in axes:
            count *= self.by_axis[axis]
        return count

    @property
    def twin(self) -> tuple[int, ...]:
        """Sizes of the mesh that does the same without ZeRO stage 3: its replicas along `fsdp`."""
        if self.zero < 3:
            return self.sizes
        moved = {**self.by_axis, "fsdp": self.size(DATA_AXIS, "fsdp"), DATA_AXIS: 1}
        return tuple(moved[axis] for axis in AXES)

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    @property
    def mesh(self) -> str:
        """`data 2 x fsdp 8`."""
        return shape_text(self.by_axis)

    @property
    def layout(self) -> dict[str, Any]:
        """Keys of a layout besides mesh and rules that are not the default's."""
        out: dict[str, Any] = {}
        if self.zero:
            out["zero"] = self.zero
        if self.context != "auto":
            out["context_parallel"] = self.context
        if self.size(PIPELINE_AXIS) > 1:
            out["pipeline"] = {"schedule": self.schedule} | ({"virtual_stages": self.chunks} if self.chunks else {})
        return out

    @property
    def step(self) -> dict[str, Any]:
        """Keys of `step` that go with it."""
        names = () if isinstance(self.remat, str) else self.remat
        saved = {**dict.fromkeys(names, "device"), **dict.fromkeys(self.offload, "host")}
        remat = self.remat if isinstance(self.remat, str) else "full"
        return {"microbatches": self.accumulate, "remat": remat, "remat_save": saved}

    @property
    def options(self) -> str:
        """Options beside the mesh, in words: `zero 1, tp without sp, 4 microbatches, remat full`."""
        out = [f"zero {self.zero}"] if self.zero else []
        out += ["no sequence parallelism"] if self.size("model") > 1 and not self.sequence else []
        out += [self.context] if self.size(CONTEXT) > 1 else []
        out += [self.schedule + (f" x {self.chunks}" if self.chunks else "")] if self.size(PIPELINE_AXIS) > 1 else []
        out += [f"{self.accumulate} microbatches"] if self.accumulate > 1 else []
        out.append(f"remat {self.remat if isinstance(self.remat, str) else text(list(self.remat))}")
        out += [f"offload {text(list(self.offload))}"] if self.offload else []
        return ", ".join(out)

    def __str__(self) -> str:
        return f"{self.mesh}, {self.options}"

    @property
    def complexity(self) -> tuple[int, ...]:
        """Sort key of equally good choices: the one with fewer axes and options is preferred."""
        axes, remat = sum(size > 1 for size in self.sizes), [*REMAT, self.remat].index(self.remat)
        return axes, self.zero, bool(self.offload), self.accumulate, remat, self.sizes[-1]


@dataclass(eq=False)
class Space:
    """The choices for a config.

    Args:
        config: whose model, data, optimizer, precision and `mesh.replica` all choices share.
        devices: to share out.
        vocab: size of the vocabulary.
        slices: that the data center's network joins; an axis must span them.
    """

    config: Config
    devices: int
    vocab: int
    slices: int = 1
    refused: dict[str, int] = field(default_factory=dict)  # problem -> meshes that have it
    _tables: dict[tuple, Table | None] = field(default_factory=dict)

    @cached_property
    def rules(self) -> Rules:
        """Rules of the shipped layouts together, axes in the order of the mesh."""
        found: dict[str, set[str]] = {}
        for name in SHIPPED:
            for dim, axes in load(None, f"layout={name}").rules.items():
                found.setdefault(dim, set()).update(axes)
        return {dim: tuple(axis for axis in AXES if axis in axes) for dim, axes in found.items()}

    def configured(self, choice: Choice, layout: str = "search") -> Config:
        """The config of a choice; its rules name the axes larger than one."""
        sizes = choice.by_axis
        rules = {dim: tuple(a for a in axes if sizes[a] > 1) for dim, axes in self.rules.items()}
        if not choice.sequence:
            rules[SEQUENCE] = tuple(a for a in rules[SEQUENCE] if a != "model")
        base = self.config
        step = base.step.model_copy(update=choice.step)
        mesh = type(base.mesh)(**sizes, dcn=self._dcn(sizes))
        pipeline = base.pipeline.model_copy(update={"schedule": choice.schedule, "virtual_stages": choice.chunks})
        return base.model_copy(update={
            "layout": layout, "mesh": mesh, "rules": {dim: axes for dim, axes in rules.items() if axes},
            "zero": choice.zero, "context_parallel": choice.context, "pipeline": pipeline, "step": step,
        })  # fmt: skip

    def _dcn(self, sizes: dict[str, int]) -> dict[str, int]:
        """The outermost axis that can span the slices; {} where none can, which the doctor of targets refuses."""
        if self.slices == 1:
            return {}
        return next(({axis: self.slices} for axis, size in sizes.items() if size % self.slices == 0), {})

    def __iter__(self) -> Iterator[Choice]:
        for place in self.places():
            yield from self.variants(place)

    def places(self) -> Iterator[Choice]:
        """Every choice of mesh, rules, ZeRO stage and microbatches that the mesh doctor passes."""
        for sizes in self._meshes():
            for place in self._on(Choice(sizes)):
                known: dict[tuple, bool] = {}
                for zero in self._zeros(place):
                    key = (zero == 3,)
                    if key not in known:
                        known[key] = self._passes(replace(place, zero=zero))
                    # One microbatch a step: stage 2 is stage 1.
                    if known[key] and not (zero == 2 and place.accumulate == 1):
                        yield replace(place, zero=zero)

    def _meshes(self) -> Iterator[tuple[int, ...]]:
        model, islands = self.config.model, max(1, self.config.mesh.replica)
        if self.devices % islands:
            return
        axes = [a for a in AXES if a != ISLANDS and (a != "expert" or model.moe)]
        for sizes in factorisations(axes, self.devices // islands):
            everything = {ISLANDS: islands, **sizes}
            if model.layers % everything[PIPELINE_AXIS] == 0:
                yield tuple(everything.get(axis, 1) for axis in AXES)

    def _on(self, place: Choice) -> Iterator[Choice]:
        """Yields a mesh with and without sequence parallelism, with every context formulation and number of
        microbatches.
        """
        own = self.config.context_parallel if self.config.context_parallel != "auto" else "ulysses"
        contexts = ("auto",) if place.size(CONTEXT) == 1 else tuple(dict.fromkeys((own, "ulysses", "ring", "gather")))
        rows, shards = self.config.data.global_batch, place.size("data", "fsdp", "expert")
        if rows % shards:
            reason = f"{rows} sequences of a step cannot be split over {shards} devices"
            self.refused[reason] = self.refused.get(reason, 0) + 1
            return
        counts = microbatches(rows // shards, place.size(PIPELINE_AXIS))
        for sequence in (True, False) if place.size("model") > 1 and place.size(CONTEXT) == 1 else (True,):
            for context in contexts:
                for count in counts:
                    yield replace(place, sequence=sequence, context=context, accumulate=count)

    def _zeros(self, place: Choice) -> tuple[int, ...]:
        if place.size(DATA_AXIS) == 1:
            return (0,)
        # Stage 3 is what `fsdp` does: it has no meshes of its own but the purest one.
        return (0, 1, 2, 3) if place.size(DATA_AXIS) == place.devices else (0, 1, 2)

    def _passes(self, place: Choice) -> bool:
        config = self.configured(place)
        found = check_config(config, self.devices, self.vocab)
        if found:
            self.refused[str(found[0])] = self.refused.get(str(found[0]), 0) + 1
        return not found

    def variants(self, place: Choice) -> Iterator[Choice]:
        """A place with every schedule, rematerialisation and offload."""
        remats = tuple(dict.fromkeys((*REMAT, self.config.step.remat_policy)))
        for schedule, chunks in self._schedules(place):
            for remat in remats:
                yield Choice(
                    place.sizes, place.sequence, place.zero, place.context, schedule, chunks, place.accumulate, remat
                )
            if place.size(PIPELINE_AXIS) == 1:
                yield from (replace(place, remat="full", offload=names) for names in OFFLOAD)

    def _schedules(self, place: Choice) -> Iterator[tuple[str, int | None]]:
        """Whose parts the layers can be shared out to; `table` has the last word."""
        stages, layers = place.size(PIPELINE_AXIS), self.config.model.layers
        if stages == 1:
            yield Choice.schedule, None
            return
        for name, schedule in SCHEDULES.items():
            for chunks in CHUNKS if not schedule.chunks else (None,):
                if layers % (stages * (chunks or schedule.chunks[0])) == 0:
                    yield name, chunks

    def table(self, choice: Choice) -> Table | None:
        """The table of a choice's schedule; None without stages, or where the stages cannot run it."""
        stages = choice.size(PIPELINE_AXIS)
        if stages == 1:
            return None
        crosses = choice.context if choice.size(CONTEXT) > 1 else ""
        key = choice.schedule, choice.chunks, stages, choice.accumulate, crosses
        if key not in self._tables:
            made = None
            if not check_pipeline(self.configured(choice), self.devices):
                made = load_table(choice.schedule, stages, choice.accumulate, choice.chunks)
            self._tables[key] = made
        return self._tables[key]


def microbatches(rows: int, stages: int) -> list[int]:
    """Numbers of microbatches that a device's rows of a step can be cut into, each twice the one before or more.

    Stages want as many as they are, or more, up to ROUNDS times that.
    """
    out: list[int] = []
    for count in divisors(rows, 1, count=rows):
        if stages > 1 and not stages <= count <= ROUNDS * stages:
            continue
        if not out or count >= 2 * out[-1]:
            out.append(count)
    return out
