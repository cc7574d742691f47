"""Layouts and meshes to verify: every factorisation of the devices that passes the layout check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import UserError
from jaxtrain.config.checks import cross_problems
from jaxtrain.config.load import load
from jaxtrain.config.schema import LAYOUT_KEYS, Config
from jaxtrain.config.shipped import layout_names
from jaxtrain.config.show import as_dict
from jaxtrain.core.layout_check import check_layout
from jaxtrain.errors import did_you_mean, join_words
from jaxtrain.planning.choices import factorisations
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import BATCH, CONTEXT, PIPELINE_AXIS, axes_of

PIPELINE_MICROBATCHES = 4
OWN = "(its own)"  # the layout of the config itself


@dataclass(frozen=True)
class Candidate:
    """One layout on one mesh; `config.mesh` holds the sizes of all axes."""

    layout: str
    config: Config

    @property
    def mesh(self) -> str:
        """`data 2 x model 4`."""
        return shape_text(_mesh_sizes(self.config))


def candidates(
    config: Config, names: Sequence[str], devices: int, *, folder: Path | None = None,
    load_layout: Callable[[str], Config] = lambda name: load(None, f"layout={name}"),
) -> tuple[list[Candidate], dict[str, str]]:  # fmt: skip
    """Lists every legal mesh of the requested layouts, and why a layout has none.

    Axes that a layout sets above 1 stay above 1; other axes of its rules may be used too, and so may the axis of -1,
    which stays above 1 if the layout sets no other: tp without `model` is none. In each layout, meshes with most axes
    come first, and the first of them is tried with two microbatches as well.

    Args:
        config: the user's config, shrunk.
        names: of layouts, or `all`.
        devices: number of devices.
        folder: of the user's config, which may hold layouts too.
        load_layout: returns the user's config under a layout; default: the default config under it.

    Returns:
        The candidates, and layout -> reason.

    Raises:
        UserError: a layout that does not exist.
    """
    shipped = layout_names(folder)
    for name in names:
        if name not in (*shipped, OWN, "all") and not name.endswith((".yaml", ".yml")):
            hint = did_you_mean(name, shipped)
            raise UserError(f"--layouts: no layout `{name}`; expected one of {join_words(shipped)}{hint}")
    accepted: list[Candidate] = []
    refused: dict[str, str] = {}
    seen: set[str] = set()
    for name in [OWN, *shipped] if "all" in names else names:
        layout = config
        if name != OWN:
            loaded = load_layout(name)
            layout = config.model_copy(update={key: getattr(loaded, key) for key in ("layout", *LAYOUT_KEYS)})
        legal, reason = _legal_meshes(layout, devices)
        if not legal:
            refused[name] = reason
        new = sorted((one for one in legal if layout_key(one) not in seen), key=_coverage, reverse=True)
        seen |= {layout_key(one) for one in new}
        accumulated = [_with_microbatches(new[0], 2)] if new else []
        accepted += [Candidate(name, one) for one in [*new, *accumulated]]
    return accepted, refused


def layout_problems(config: Config, devices: int, vocab: int | None = None) -> list[str]:
    """Problems of a config on a number of devices, as a run reports them before JAX starts."""
    problems = check_layout(config, devices, vocab)
    return [*(problem.message for problem in cross_problems(config)), *map(str, problems)]


def layout_key(config: Config) -> str:
    """Canonical form of a layout on its mesh: layouts with the same key are the same computation."""
    sizes = _mesh_sizes(config)
    rules = {name: [a for a in axes if sizes.get(a, 1) > 1] for name, axes in sorted(config.axis_rules.items())}
    rules = {name: axes for name, axes in rules.items() if axes}
    zero = config.zero if sizes["data"] > 1 else 0
    context = config.context_parallel if CONTEXT in rules else "auto"
    return f"{[(a, n) for a, n in sizes.items() if n > 1]} {rules} {zero} {context} {config.step.microbatches}"


def _mesh_sizes(config: Config) -> dict[str, int]:
    return {axis: getattr(config.mesh, axis) for axis in AXES}


def _legal_meshes(config: Config, devices: int) -> tuple[list[Config], str]:
    """The config on every mesh that passes the layout check; and the problem of the last that does not."""
    legal, reason = [], "no mesh of these devices has its axes"
    given = {axis for axis, size in _mesh_sizes(config).items() if size != 1}
    required = {axis for axis in given if getattr(config.mesh, axis) != -1} or given
    possible = given | {axis for axes in config.axis_rules.values() for axis in axes}
    for sizes in factorisations([axis for axis in AXES if axis in possible], devices):
        if any(sizes.get(axis, 1) == 1 for axis in required):
            continue
        meshed = Config(**{**as_dict(config), "mesh": {axis: sizes.get(axis, 1) for axis in AXES}})
        if sizes.get(PIPELINE_AXIS, 1) > 1:
            meshed = _with_microbatches(meshed, PIPELINE_MICROBATCHES)
        if problems := layout_problems(meshed, devices):
            reason = problems[0]
        else:
            legal.append(meshed)
    return legal, reason


def _coverage(config: Config) -> tuple[int, bool]:
    """Sort key by how much a mesh tests: its number of axes, and whether they split the batch."""
    axes = [axis for axis, size in _mesh_sizes(config).items() if size > 1]
    return len(axes), any(axis in axes for axis in axes_of(BATCH, config.axis_rules))


def _with_microbatches(config: Config, count: int) -> Config:
    return config.model_copy(update={"step": config.step.model_copy(update={"microbatches": count})})
