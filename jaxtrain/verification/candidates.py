"""Layouts and meshes to verify: every split of the devices that passes the layout check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import UserError
from jaxtrain.config.load import load
from jaxtrain.config.schema import LAYOUT_KEYS, Config
from jaxtrain.config.shipped import layout_names
from jaxtrain.config.show import as_dict
from jaxtrain.errors import did_you_mean, join_words
from jaxtrain.planning.legal import effect, factorisations, problems
from jaxtrain.sharding.axes import AXES, shape_text
from jaxtrain.sharding.rules import BATCH, PIPELINE_AXIS, axes_of

Load = Callable[[str], Config]
MICROBATCHES = 4  # for pipeline stages to share
OWN = "(its own)"  # the layout that the config itself describes


@dataclass(frozen=True)
class Candidate:
    """One layout on one mesh; `sizes` holds all axes."""

    layout: str
    config: Config

    @property
    def mesh(self) -> str:
        """`data 2 x model 4`."""
        return shape_text({axis: getattr(self.config.mesh, axis) for axis in AXES})


def candidates(
    small: Config, names: Sequence[str], devices: int, *, folder: Path | None = None, load_layout: Load | None = None
) -> tuple[list[Candidate], dict[str, str]]:
    """Every legal mesh of every layout asked for, and why a layout has none.

    A layout's mesh keeps the axes that it sets itself above 1 there; its rules' other axes may take part, and so may
    the axis of -1, which stays where the layout sets no other: tp without `model` is none. Meshes of most axes come
    first in each layout, and the first of them is tried with two microbatches as well.

    Args:
        small: the user's config, made small.
        names: layouts, or `all`.
        devices: to share out.
        folder: of the user's config; layouts are looked for beside it too.
        load_layout: the user's config under a layout of that name; default: the defaults under it.

    Raises:
        UserError: a layout that does not exist.
    """
    known = layout_names(folder)
    for name in names:
        if name not in (*known, OWN, "all") and not name.endswith((".yaml", ".yml")):
            raise UserError(
                f"--layouts: no layout `{name}`; there is {join_words(known, 'and')}{did_you_mean(name, known)}"
            )
    wanted = [OWN, *known] if "all" in names else list(names)
    found: list[Candidate] = []
    refused: dict[str, str] = {}
    seen: set[str] = set()
    for name in wanted:
        layout = small if name == OWN else _with_layout(small, (load_layout or _defaults)(name))
        legal, reason = _legal(layout, devices)
        if not legal:
            refused[name] = reason
        fresh = sorted((c for c in legal if effect(c) not in seen), key=_tests, reverse=True)
        seen |= {effect(config) for config in fresh}
        more = [_accumulated(fresh[0])] if fresh else []
        found += [Candidate(name, config) for config in [*fresh, *more]]
    return found, refused


def _defaults(name: str) -> Config:
    return load(None, f"layout={name}")


def _with_layout(small: Config, other: Config) -> Config:
    """The small config under the layout of the other."""
    return small.model_copy(update={key: getattr(other, key) for key in ("layout", *LAYOUT_KEYS)})


def _legal(config: Config, devices: int) -> tuple[list[Config], str]:
    """The config on every mesh that the doctor passes; else the reason of the first that it does not."""
    legal, reason = [], "no mesh of these devices has its axes"
    given = {axis for axis in AXES if getattr(config.mesh, axis) != 1}
    own = {axis for axis in given if getattr(config.mesh, axis) != -1} or given
    possible = given | {axis for axes in config.rules.values() for axis in axes}
    for sizes in factorisations([axis for axis in AXES if axis in possible], devices):
        if any(sizes.get(axis, 1) == 1 for axis in own):
            continue
        placed = Config(**{**as_dict(config), "mesh": {axis: sizes.get(axis, 1) for axis in AXES}})
        if sizes.get(PIPELINE_AXIS, 1) > 1:
            placed = _accumulated(placed, MICROBATCHES)
        found = problems(placed, devices)
        if not found:
            legal.append(placed)
        else:
            reason = found[0]
    return legal, reason


def _tests(config: Config) -> tuple[int, bool]:
    """Returns how much a mesh tests: its number of axes, and whether they split the batch."""
    axes = [axis for axis in AXES if getattr(config.mesh, axis) > 1]
    return len(axes), any(axis in axes for axis in axes_of(BATCH, config.rules))


def _accumulated(config: Config, microbatches: int = 2) -> Config:
    """The same with so many microbatches."""
    return config.model_copy(update={"step": config.step.model_copy(update={"microbatches": microbatches})})
