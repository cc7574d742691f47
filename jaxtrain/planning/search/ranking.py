"""Result of a search: the ranking as a table and as JSON, and the winner as a layout file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from jaxtrain.config.schema import Config
from jaxtrain.config.show import text
from jaxtrain.io.atomic import write_atomic
from jaxtrain.planning.cost.estimate import Estimate
from jaxtrain.planning.report import values as view
from jaxtrain.planning.report.terminal import plain, section
from jaxtrain.planning.report.values import byte_scale, duration, percent, volume
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search import families
from jaxtrain.planning.search.families import Loser
from jaxtrain.sharding.axes import AXES

SIGN = "found by `jaxtrain plan --search`"


@dataclass(frozen=True)
class Ranked:
    """One layout of the ranking.

    Args:
        config: with this layout.
        plan: of the compiled step; None where only the formulas judged it.
        cached: the plan is of an earlier search.
        error: what broke down when it was compiled; else empty.
        late: why it was begun to be compiled and not ended; else empty.
        reason: why it is not the first; of the first, what limits it.
    """

    estimate: Estimate
    config: Config
    target: str
    plan: Plan | None = None
    cached: bool = False
    error: str = ""
    late: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        """True if the step fits, as compiled or else by the formulas; False if it could not be compiled."""
        if self.error:
            return False
        return self.estimate.fits() if self.plan is None else self.plan.fits is not False

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None if it was compiled and the network is unknown."""
        return self.estimate.step_seconds if self.plan is None else self.plan.step_seconds

    @property
    def needs(self) -> float:
        """Bytes of a device."""
        return self.estimate.needs if self.plan is None or not self.plan.needs else self.plan.needs

    @property
    def source(self) -> str:
        """`compiled`, `cached`, `formula`, or `not compiled` of what broke down."""
        if self.plan is None:
            return "not compiled" if self.error else "formula"
        return "cached" if self.cached else "compiled"

    @property
    def figures(self) -> tuple[str, str, str]:
        """Step time, tokens/s and MFU as texts; empty where they are not known."""
        seconds, mfu = self.step_seconds, self.plan.mfu if self.plan else None
        rate = f"{self.config.data.global_batch * self.config.data.sequence / seconds:,.0f}" if seconds else ""
        return duration(seconds) if seconds else "", rate, "" if mfu is None else percent(mfu)

    @property
    def keys(self) -> list[str]:
        """`key=value` of what goes with the layout: microbatches, remat and offload."""
        return [f"step.{name}={text(_plain(value))}" for name, value in self.estimate.choice.step.items()]

    def explained(self, winner: Ranked | None, objective: str, assumed: bool) -> Ranked:
        """Name with its reason."""
        return replace(
            self, reason=self.error or "; ".join(filter(None, (self.late, self._why(winner, objective, assumed))))
        )

    def _why(self, winner: Ranked | None, objective: str, assumed: bool) -> str:
        first = winner or self
        if self is first and self.fits:
            return self.plan.limit if self.plan else ""
        if self.plan and (first.plan or not self.fits):
            return families.of_plans(self.plan, first.plan or self.plan, objective)
        return families.against(self.estimate, first.estimate, objective, assumed)

    def as_dict(self) -> dict[str, Any]:
        """Returns the entry for JSON."""
        return {
            "mesh": {axis: size for axis, size in self.estimate.choice.by_axis.items() if size > 1},
            "options": self.estimate.choice.options, "keys": self.keys, "layout": layout(self.config),
            "target": self.target, "source": self.source, "fits": self.fits, "needs": round(self.needs),
            "step_seconds": self.step_seconds, "reason": self.reason, "estimate": self.estimate.as_dict(),
            "plan": self.plan.as_dict() if self.plan else None,
        }  # fmt: skip


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    Args:
        config: that was asked about.
        ranking: best first; what does not fit or compile last.
        top: how many were to be compiled.
        losers: the best of each family that people know, by the formulas.
        counted, fitting: numbers of layouts looked at, and of those that may fit.
        stopped: why not all was compiled; else empty.
        unkept: why what was compiled is not kept for another search; else empty.
        assumed: the formulas' seconds mean nothing but an order.
    """

    target: str
    objective: str
    config: Config
    ranking: tuple[Ranked, ...]
    top: int = 0
    losers: tuple[Loser, ...] = ()
    counted: int = 0
    fitting: int = 0
    stopped: str = ""
    unkept: str = ""
    seconds: float = 0.0
    assumed: bool = False

    @property
    def winner(self) -> Ranked | None:
        """The first of those that fit; None where nothing fits."""
        return next((one for one in self.ranking if one.fits), None)

    @property
    def untried(self) -> tuple[Ranked, ...]:
        """Good by the formulas, and not compiled."""
        return tuple(one for one in self.ranking if one.plan is None and not one.error)

    def figures(self, one: Ranked) -> tuple[str, str, str]:
        """`Ranked.figures`, but for seconds that mean nothing."""
        return ("", "", "") if self.assumed and one.plan is None else one.figures

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return {
            "target": self.target, "objective": self.objective, "counted": self.counted, "fitting": self.fitting,
            "stopped": self.stopped, "unkept": self.unkept, "seconds": self.seconds, "assumed": self.assumed,
            "ranking": [one.as_dict() for one in self.ranking], "losers": [one.as_dict() for one in self.losers],
        }  # fmt: skip

    def summary(self) -> str:
        """Summarises how many layouts were considered, compiled and left out."""
        compiled = sum(one.plan is not None for one in self.ranking)
        cached = sum(one.cached for one in self.ranking)
        of_cache = f", {cached} of them earlier" if cached else ""
        line = f"{self.counted} layouts, {self.fitting} fit by formula, {compiled} compiled{of_cache}"
        left = f": {len(self.untried)} more were worth compiling" if self.top else ""
        stopped = f"; {self.stopped}{left}" if self.stopped else ""
        unkept = f"; not kept for another search: {self.unkept}" if self.unkept else ""
        none = "" if self.winner else "; nothing fits"
        return f"{line} in {self.seconds:.0f} s{stopped}{unkept}{none}"


def table(found: SearchResult) -> RenderableType:
    """The ranking."""
    size = byte_scale(one.needs for one in found.ranking)
    titles = ("", "layout", "step", "tokens/s", "MFU", size.name, "by")
    out = plain(*titles, right=("", *titles[2:-1]))
    several = len({one.target for one in found.ranking}) > 1
    for place, one in enumerate(found.ranking, start=1):
        choice = one.estimate.choice
        name = ", ".join(filter(None, (choice.mesh + (f" of {one.target}" if several else ""), choice.options)))
        style = "bold" if one is found.winner else None if one.fits else "dim"
        out.add_row(
            str(place),
            _reasoned(name, one.reason),
            *found.figures(one),
            size.number(one.needs),
            one.source + (", as a pod" if one.plan and one.plan.pods else ""),
            style=style,
        )
    return section(f"Layouts for {found.target}", f"least {found.objective} first", out)


def losers_table(found: SearchResult) -> RenderableType:
    """The best of each family, and why it lost."""
    size = byte_scale(one.estimate.needs for one in found.losers if one.estimate)
    out = plain("family", "its best", "step", size.name, right=("step", size.name))
    for one in found.losers:
        known = one.estimate
        best = _reasoned("" if known is None else str(known.choice), one.reason)
        step = "" if known is None or found.assumed else duration(known.step_seconds)
        out.add_row(one.family, best, step, "" if known is None else size.number(known.needs))
    return section("What lost", "by formula", out)


def _reasoned(name: str, reason: str) -> Text:
    """A name, and under it why."""
    return Text("\n".join(filter(None, (name, reason))))


def layout(config: Config) -> dict[str, Any]:
    """Returns the part of a config that a layout file holds."""
    mesh: dict[str, Any] = {axis: size for axis in AXES if (size := getattr(config.mesh, axis)) > 1}
    if config.mesh.dcn:
        mesh["dcn"] = dict(config.mesh.dcn)
    out: dict[str, Any] = {"mesh": mesh, "rules": {name: list(axes) for name, axes in config.rules.items()}}
    if config.context_parallel != "auto":
        out["context_parallel"] = config.context_parallel
    if config.zero:
        out["zero"] = config.zero
    if config.mesh.pipeline > 1 and (pipeline := config.pipeline.model_dump(exclude_defaults=True)):
        out["pipeline"] = pipeline
    return out


def layout_text(found: SearchResult, one: Ranked) -> str:
    """A layout file: its figures, the keys that go with it, mesh and rules."""
    texts = zip(("{} a step", "{} tokens/s", "MFU {}"), found.figures(one))
    figures = [*(text.format(figure) for text, figure in texts if figure), f"{volume(one.needs)} of a device"]
    word = "estimated by formula, not compiled" if one.plan is None else view.origin(one.plan) or "compiled"
    lines = [
        f"# {one.estimate.choice.mesh}: {SIGN} for {one.target}, least {found.objective}.",
        f"# Predicted ({word}): {', '.join(figures)}.",
        f"# Goes with: {' '.join(one.keys)}",
    ]
    return "\n".join([*lines, *_yaml(layout(one.config)), ""])


def _yaml(values: Mapping[str, Any]) -> list[str]:
    out = []
    for key, value in values.items():
        if key == "rules":
            out += [f"{key}:", *(f"  {name}: {text(axes)}" for name, axes in value.items())]
        else:
            out.append(f"{key}: {text(value)}")
    return out


def write_layout(found: SearchResult, path: str | os.PathLike[str], one: Ranked | None = None) -> Path:
    """Writes the winner (or `one`) as a layout file, whole or not at all: then `layout: PATH` uses it.

    Raises:
        ValueError: nothing fits.
        OSError: the file cannot be written.
    """
    one = one or found.winner
    if one is None:
        raise ValueError("no layout fits, so there is none to write")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, layout_text(found, one))
    return file


def is_free(path: str | os.PathLike[str]) -> bool:
    """Returns whether `write_layout` may write here unasked: there is no file, or one that it wrote."""
    file = Path(path)
    return not file.exists() or SIGN in file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
