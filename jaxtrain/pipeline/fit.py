"""Whether a config's pipeline can run: its schedule, its rules and its layers, before JAX starts. No JAX."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.config.cross import divisors
from jaxtrain.config.errors import Problem, join
from jaxtrain.config.schema import Config
from jaxtrain.mesh.check import axis_sizes
from jaxtrain.mesh.rules import CONTEXT, LAYERS, STAGES, axes_of
from jaxtrain.pipeline.check import ScheduleError
from jaxtrain.pipeline.custom import load
from jaxtrain.pipeline.table import Table

VOCAB = "vocab"


def check_pipeline(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """All problems of the config's pipeline, with dotted keys and no places; see `models.check.check_config`."""
    del vocab  # embedding and head are the mesh doctor's
    sizes, problems = axis_sizes(config.mesh, devices or config.simulate)
    stages = sizes[STAGES]
    if problems or stages is None or stages == 1:
        return []
    problems = [Problem("", key, message) for key, message in _rules(config, sizes)]
    try:
        table = load(config.pipeline.schedule, stages, config.step.accumulate, config.pipeline.chunks)
    except ScheduleError as error:
        key = "pipeline.chunks" if "chunks:" in str(error) else "pipeline.schedule"
        return [*problems, *(Problem("", key, line.removeprefix("schedule: ")) for line in str(error).splitlines())]
    except OSError as error:
        return [*problems, Problem("", "pipeline.schedule", f"{config.pipeline.schedule}: {error.strerror}")]
    if config.model.type == "decoder":
        problems += [Problem("", key, message) for key, message in _layers(config, table)]
    return problems


def _rules(config: Config, sizes: dict[str, int | None]) -> Iterator[tuple[str, str]]:
    """Stages hold layers, and together they may hold the vocabulary; they pass on whole activations."""
    if axes_of(LAYERS, config.rules) != (STAGES,):
        yield f"rules.{LAYERS}", f"the stages of mesh.{STAGES} hold layers; expected `{LAYERS}: {STAGES}`"
    for name, axes in config.rules.items():
        if STAGES in axes and name not in (LAYERS, VOCAB):
            yield (
                f"rules.{name}",
                f"axis `{STAGES}` holds layers; expected it in rules.{LAYERS} and rules.{VOCAB} alone",
            )
    if config.context == "ring" and any(sizes[axis] != 1 for axis in axes_of(CONTEXT, config.rules)):
        # A permutation inside of a branch waits for devices that are in another branch.
        yield (
            "context",
            f"stages of mesh.{STAGES} work by turns, and a ring needs all at once; expected ulysses or gather",
        )


def _layers(config: Config, table: Table) -> Iterator[tuple[str, str]]:
    """Every virtual stage has as many layers, of whole groups of windows."""
    layers, period, parts = config.model.layers, config.model.window_every, table.virtual.size
    if layers % (parts * period) == 0:
        return
    group = f" in groups of {period} (model.window_every)" if period > 1 else ""
    what = f"{table.stages} stages of {table.chunks} chunks" if table.chunks > 1 else f"{table.stages} stages"
    above = -(-layers // (parts * period)) * parts * period
    near = join([above - parts * period, above] if above > parts * period else [above])
    fit = join(divisors(layers // period, parts)) if layers % period == 0 else "none"
    yield (
        "model.layers",
        f"{layers} layers{group} do not fit {what}; numbers that work: {near}; parts that work: {fit}",
    )
