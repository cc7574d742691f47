"""Checks of a config's pipeline before JAX starts: its schedule, its rules and its layers."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.schema import MeshConfig, PipelineConfig
from jaxtrain.errors import Problem, ScheduleError, join_words
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.check import axis_sizes
from jaxtrain.sharding.rules import CONTEXT, LAYERS, PIPELINE_AXIS, VOCAB, Rules, axes_of


def check_pipeline(
    pipeline: PipelineConfig, mesh: MeshConfig, rules: Rules, microbatches: int, layers: tuple[int, int] | None,
    devices: int | None, *, uses_ring: bool,
) -> list[Problem]:  # fmt: skip
    """Returns the problems of a config's pipeline, with dotted keys and without locations.

    Args:
        pipeline: the `pipeline` section.
        mesh: sizes of the axes.
        rules: logical name -> mesh axes.
        microbatches: microbatches of a step.
        layers: number of layers, and of those that must be in one stage; None if unknown.
        devices: number of devices; None if unknown.
        uses_ring: whether attention crosses the shards of a sequence by a ring.
    """
    sizes, problems = axis_sizes(mesh, devices)
    stages = sizes[PIPELINE_AXIS]
    if problems or stages is None or stages == 1:
        return []
    problems = [Problem("", key, message) for key, message in _rule_problems(rules, sizes, uses_ring)]
    try:
        table = load_table(pipeline.schedule, stages, microbatches, pipeline.virtual_stages)
    except ScheduleError as error:
        key = "pipeline.virtual_stages" if "chunks:" in str(error) else "pipeline.schedule"
        return [*problems, *(Problem("", key, line.removeprefix("schedule: ")) for line in str(error).splitlines())]
    except OSError as error:
        return [*problems, Problem("", "pipeline.schedule", f"{pipeline.schedule}: {error.strerror}")]
    if layers is not None and (problem := partition_problem(*layers, table)):
        hint = " (model.sliding_window_pattern)" if layers[1] > 1 else ""
        problems.append(Problem("", "model.layers", problem + hint))
    return problems


def _rule_problems(rules: Rules, sizes: dict[str, int | None], uses_ring: bool) -> Iterator[tuple[str, str]]:
    """Yields (key, message). Only layers and the vocabulary may be sharded over the pipeline axis."""
    if axes_of(LAYERS, rules) != (PIPELINE_AXIS,):
        yield f"rules.{LAYERS}", f"the stages of mesh.{PIPELINE_AXIS} hold layers; expected `{LAYERS}: {PIPELINE_AXIS}`"
    for name, axes in rules.items():
        if PIPELINE_AXIS in axes and name not in (LAYERS, VOCAB):
            message = f"axis `{PIPELINE_AXIS}` holds layers; expected it only in rules.{LAYERS} and rules.{VOCAB}"
            yield f"rules.{name}", message
    if uses_ring and any(sizes[axis] != 1 for axis in axes_of(CONTEXT, rules)):
        # A permutation waits for all devices, and other stages run other actions.
        message = f"a ring can not run within the stages of mesh.{PIPELINE_AXIS}; expected ulysses or gather"
        yield "context_parallel", message


def partition_problem(layers: int, group: int, table: Table) -> str | None:
    """Returns why layers in groups of `group` can not be split over the virtual stages; None if they can.

    Stages may hold unequal numbers of layers.
    """
    virtual_stages = table.virtual_stage.size
    stages = f"{table.stages} stages of {table.chunks} chunks" if table.chunks > 1 else f"{table.stages} stages"
    if layers % group:
        near = sorted({max(n, virtual_stages) * group for n in (layers // group, layers // group + 1)})
        return f"{layers} layers are not whole groups of {group}, as stages need; expected e.g. {join_words(near)}"
    if layers // group < virtual_stages:
        groups = f" in groups of {group}" if group > 1 else ""
        return f"{layers} layers{groups} are too few for {stages}; expected at least {virtual_stages * group}"
    return None
