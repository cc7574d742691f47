"""Checks of a config's pipeline before JAX starts: its schedule, its rules and its layers."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem, ScheduleError, join_words
from jaxtrain.models.spec import model_spec
from jaxtrain.pipeline.schedules.files import load
from jaxtrain.pipeline.schedules.table import Table
from jaxtrain.sharding.check import axis_sizes
from jaxtrain.sharding.rules import CONTEXT, LAYERS, PIPELINE_AXIS, VOCAB, axes_of


def check_pipeline(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """Returns the problems of the config's pipeline, with dotted keys, without places."""
    del vocab  # checked with the layout
    sizes, problems = axis_sizes(config.mesh, devices or config.simulate)
    stages = sizes[PIPELINE_AXIS]
    if problems or stages is None or stages == 1:
        return []
    problems = [Problem("", key, message) for key, message in _rules(config, sizes)]
    try:
        table = load(config.pipeline.schedule, stages, config.step.microbatches, config.pipeline.virtual_stages)
    except ScheduleError as error:
        key = "pipeline.virtual_stages" if "chunks:" in str(error) else "pipeline.schedule"
        return [*problems, *(Problem("", key, line.removeprefix("schedule: ")) for line in str(error).splitlines())]
    except OSError as error:
        return [*problems, Problem("", "pipeline.schedule", f"{config.pipeline.schedule}: {error.strerror}")]
    layers = model_spec(config.model).layers(config.model)
    if layers is not None and (problem := misfit(*layers, table)):
        hint = " (model.sliding_window_pattern)" if layers[1] > 1 else ""
        problems.append(Problem("", "model.layers", problem + hint))
    return problems


def _rules(config: Config, sizes: dict[str, int | None]) -> Iterator[tuple[str, str]]:
    """Stages hold layers, and together they may hold the vocabulary; they pass on whole activations."""
    if axes_of(LAYERS, config.rules) != (PIPELINE_AXIS,):
        yield f"rules.{LAYERS}", f"the stages of mesh.{PIPELINE_AXIS} hold layers; expected `{LAYERS}: {PIPELINE_AXIS}`"
    for name, axes in config.rules.items():
        if PIPELINE_AXIS in axes and name not in (LAYERS, VOCAB):
            yield (
                f"rules.{name}",
                f"axis `{PIPELINE_AXIS}` holds layers; expected it in rules.{LAYERS} and rules.{VOCAB} alone",
            )
    if config.context_parallel == "ring" and any(sizes[axis] != 1 for axis in axes_of(CONTEXT, config.rules)):
        # A permutation waits for all devices, and those of another stage are at another action.
        yield (
            "context_parallel",
            f"stages of mesh.{PIPELINE_AXIS} work by turns, and a ring needs all at once; expected ulysses or gather",
        )


def misfit(layers: int, group: int, table: Table) -> str | None:
    """Returns why layers that go together by `group` can not be split over the virtual stages, or None.

    Stages may hold unequal numbers of layers.
    """
    parts = table.virtual.size
    what = f"{table.stages} stages of {table.chunks} chunks" if table.chunks > 1 else f"{table.stages} stages"
    if layers % group:
        near = sorted({max(n, parts) * group for n in (layers // group, layers // group + 1)})
        return (
            f"{layers} layers are not whole groups of {group}, which stages share out; expected e.g. {join_words(near)}"
        )
    if layers // group < parts:
        groups = f" in groups of {group}" if group > 1 else ""
        return f"{layers} layers{groups} are too few for {what}; expected at least {parts * group}"
    return None
