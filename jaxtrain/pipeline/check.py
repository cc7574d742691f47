"""Checks of a config's pipeline before JAX starts: its schedule, its rules and its layers."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem, ScheduleError, join_words
from jaxtrain.models.spec import model_spec
from jaxtrain.pipeline.schedules.files import load_table
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.check import axis_sizes
from jaxtrain.sharding.rules import CONTEXT, LAYERS, PIPELINE_AXIS, VOCAB, axes_of


def check_pipeline(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """Returns the problems of the config's pipeline, with dotted keys and without locations."""
    del vocab  # checked with the layout
    sizes, problems = axis_sizes(config.mesh, devices or config.simulate)
    stages = sizes[PIPELINE_AXIS]
    if problems or stages is None or stages == 1:
        return []
    problems = [Problem("", key, message) for key, message in _rule_problems(config, sizes)]
    try:
        table = load_table(config.pipeline.schedule, stages, config.step.microbatches, config.pipeline.virtual_stages)
    except ScheduleError as error:
        key = "pipeline.virtual_stages" if "chunks:" in str(error) else "pipeline.schedule"
        return [*problems, *(Problem("", key, line.removeprefix("schedule: ")) for line in str(error).splitlines())]
    except OSError as error:
        return [*problems, Problem("", "pipeline.schedule", f"{config.pipeline.schedule}: {error.strerror}")]
    layers = model_spec(config.model).layers(config.model)
    if layers is not None and (problem := partition_problem(*layers, table)):
        hint = " (model.sliding_window_pattern)" if layers[1] > 1 else ""
        problems.append(Problem("", "model.layers", problem + hint))
    return problems


def _rule_problems(config: Config, sizes: dict[str, int | None]) -> Iterator[tuple[str, str]]:
    """Yields (key, message). Only layers and the vocabulary may be sharded over the pipeline axis."""
    if axes_of(LAYERS, config.rules) != (PIPELINE_AXIS,):
        yield f"rules.{LAYERS}", f"the stages of mesh.{PIPELINE_AXIS} hold layers; expected `{LAYERS}: {PIPELINE_AXIS}`"
    for name, axes in config.rules.items():
        if PIPELINE_AXIS in axes and name not in (LAYERS, VOCAB):
            message = f"axis `{PIPELINE_AXIS}` holds layers; expected it only in rules.{LAYERS} and rules.{VOCAB}"
            yield f"rules.{name}", message
    if config.context_parallel == "ring" and any(sizes[axis] != 1 for axis in axes_of(CONTEXT, config.rules)):
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
