"""Result of a search: the ranking as a table and as JSON, and the winner as a layout file."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType
from rich.text import Text

from jaxtrain.config.schema import Config
from jaxtrain.config.show import text
from jaxtrain.io import html
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.figure import Displayed, Plot, as_html, as_text, draw, new_figure, plain_text
from jaxtrain.planning.cost.estimate import Estimate
from jaxtrain.planning.report import values
from jaxtrain.planning.report.terminal import plain_table, section
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search.families import FamilyResult, why_estimate_is_worse, why_plan_is_worse
from jaxtrain.sharding.axes import AXES

Objective = Literal["time", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = ("time", "memory", "cost")
Value = tuple[float, float]  # the objective, then step seconds
SIGNATURE = "found by `jaxtrain plan --search`"  # in the first line of a layout file


def objective_value(objective: Objective, needs: float, step_seconds: float, devices: int) -> Value:
    """Value that a search minimises: seconds of a step, bytes of a device, or device-seconds of a step."""
    first = {"time": step_seconds, "memory": needs, "cost": step_seconds * devices}[objective]
    return first, step_seconds


@dataclass(frozen=True)
class RankedLayout:
    """One layout of a ranking.

    Args:
        config: with this layout.
        plan: of the compiled step; None if only estimated.
        is_cached: the plan was compiled by an earlier search.
        error: message if compiling failed; else empty.
        unfinished: why compiling started but did not finish; else empty.
        reason: why it is not the first; for the first, its bottleneck.
    """

    estimate: Estimate
    config: Config
    target: str
    plan: Plan | None = None
    is_cached: bool = False
    error: str = ""
    unfinished: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        """True if the step fits, as compiled or else as estimated; False if it could not be compiled."""
        if self.error:
            return False
        return self.estimate.fits() if self.plan is None else self.plan.fits is not False

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step; None if it was compiled and the network is unknown."""
        return self.estimate.step_seconds if self.plan is None else self.plan.step_seconds

    @property
    def needs(self) -> float:
        """Bytes of memory of a device."""
        return self.estimate.needs if self.plan is None or not self.plan.needs else self.plan.needs

    @property
    def source(self) -> str:
        """`compiled`, `cached`, `estimate` or `not compiled`."""
        if self.plan is None:
            return "not compiled" if self.error else "estimate"
        return "cached" if self.is_cached else "compiled"

    @property
    def figures(self) -> tuple[str, str, str]:
        """Step time, tokens/s and MFU as texts, of the compiled step or else as estimated; empty if unknown."""
        seconds, mfu = self.step_seconds, self.plan.mfu if self.plan else None
        tokens = self.config.data.global_batch * self.config.data.sequence
        rate = f"{tokens / seconds:,.0f}" if seconds else ""
        step = values.format_seconds(seconds) if seconds else ""
        return step, rate, "" if mfu is None else values.format_percent(mfu)

    @property
    def keys(self) -> list[str]:
        """`key=value` words that belong to the layout: microbatches, remat and offload."""
        return [f"step.{name}={text(value)}" for name, value in self.estimate.choice.step_keys.items()]

    def with_reason(self, winner: RankedLayout | None, objective: str, is_assumed: bool) -> RankedLayout:
        """Adds the reason; arguments are as in `why_estimate_is_worse`."""
        reasons = (self.unfinished, self._why(winner or self, objective, is_assumed))
        return replace(self, reason=self.error or "; ".join(filter(None, reasons)))

    def _why(self, first: RankedLayout, objective: str, is_assumed: bool) -> str:
        if self is first and self.fits:
            return self.plan.bottleneck if self.plan else ""
        if self.plan and (first.plan or not self.fits):
            return why_plan_is_worse(self.plan, first.plan or self.plan, objective)
        return why_estimate_is_worse(self.estimate, first.estimate, objective, is_assumed)

    def as_dict(self) -> dict[str, Any]:
        """Converts the layout for JSON."""
        return {
            "mesh": {axis: size for axis, size in self.estimate.choice.axis_sizes.items() if size > 1},
            "options": self.estimate.choice.options_text, "keys": self.keys, "layout": layout_values(self.config),
            "target": self.target, "source": self.source, "fits": self.fits, "needs": round(self.needs),
            "step_seconds": self.step_seconds, "reason": self.reason, "estimate": self.estimate.as_dict(),
            "plan": self.plan.as_dict() if self.plan else None,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class SearchResult(Displayed):
    """Outcome of a search.

    Args:
        config: whose layout was searched.
        ranking: best first; layouts that do not fit or compile last.
        top: number of layouts to compile.
        families: best of each family, by estimate.
        counted: number of layouts estimated.
        fitting: number of layouts that may fit.
        stopped: why the search ended early; else empty.
        cache_error: why compiled plans could not be cached; else empty.
        is_assumed: the estimates' seconds mean only an order.
    """

    target: str
    objective: str
    config: Config
    ranking: tuple[RankedLayout, ...]
    top: int = 0
    families: tuple[FamilyResult, ...] = ()
    counted: int = 0
    fitting: int = 0
    stopped: str = ""
    cache_error: str = ""
    seconds: float = 0.0
    is_assumed: bool = False

    @property
    def winner(self) -> RankedLayout | None:
        """First layout that fits; None if none does."""
        return next((one for one in self.ranking if one.fits), None)

    @property
    def not_compiled(self) -> tuple[RankedLayout, ...]:
        """Layouts with a good estimate that were not compiled."""
        return tuple(one for one in self.ranking if one.plan is None and not one.error)

    def figures(self, one: RankedLayout) -> tuple[str, str, str]:
        """`RankedLayout.figures`, without seconds that mean only an order."""
        return ("", "", "") if self.is_assumed and one.plan is None else one.figures

    def as_dict(self) -> dict[str, Any]:
        """Converts the result for JSON."""
        return {
            "target": self.target, "objective": self.objective, "counted": self.counted, "fitting": self.fitting,
            "stopped": self.stopped, "cache_error": self.cache_error, "seconds": self.seconds,
            "is_assumed": self.is_assumed, "ranking": [one.as_dict() for one in self.ranking],
            "families": [one.as_dict() for one in self.families],
        }  # fmt: skip

    def summary(self) -> str:
        """Summarises how many layouts were estimated and compiled."""
        compiled = sum(one.plan is not None for one in self.ranking)
        cached = sum(one.is_cached for one in self.ranking)
        line = f"{self.counted} layouts, {self.fitting} fit by estimate, {compiled} compiled"
        line += f", {cached} of them in an earlier search" if cached else ""
        line += f" in {self.seconds:.0f} s"
        if self.stopped:
            line += f"; {self.stopped}"
            line += f": {len(self.not_compiled)} more layouts were to be compiled" if self.top else ""
        line += f"; plans could not be cached: {self.cache_error}" if self.cache_error else ""
        return line if self.winner else f"{line}; nothing fits"


def ranking_table(result: SearchResult) -> RenderableType:
    """Builds the table of the ranking."""
    unit = values.byte_unit(one.needs for one in result.ranking)
    # Estimates and compiled steps are two scales, which share no column.
    titles = ("", "layout", "estimate", "step", "tokens/s", "MFU", unit.name, "by")
    table = plain_table(*titles, right=("", *titles[2:-1]))
    has_targets = len({one.target for one in result.ranking}) > 1
    for place, one in enumerate(result.ranking, start=1):
        choice = one.estimate.choice
        name = f"{choice.mesh}{f' of {one.target}' if has_targets else ''}, {choice.options_text}"
        style = "bold" if one is result.winner else None if one.fits else "dim"
        source = one.source + (", as a pod" if one.plan and one.plan.pods else "")
        estimate = "" if result.is_assumed else values.format_seconds(one.estimate.step_seconds)
        figures = one.figures if one.plan else ("", "", "")
        needs = unit.number(one.needs) if one.plan else f"~{unit.number(one.needs)}"
        table.add_row(str(place), _name_and_reason(name, one.reason), estimate, *figures, needs, source, style=style)
    return section(f"Layouts for {result.target}", f"least {result.objective} first", table)


@draw.register
def ranking_figure(result: SearchResult) -> Plot:
    """Draws the time of a step under each layout, best first."""
    rows = [one for one in result.ranking if one.fits]
    figure, (axes,) = new_figure([1], (8, 1 + 0.35 * len(rows)))
    names = [f"{place}. {one.estimate.choice.mesh}" for place, one in enumerate(rows, start=1)]
    steps = [one.plan.step_seconds if one.plan else one.estimate.step_seconds for one in rows]
    bars = axes.barh(names, [seconds or 0.0 for seconds in steps])
    axes.bar_label(bars, [one.source for one in rows], padding=4, fontsize=9)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    return Plot(figure)


@as_html.register
def ranking_html(result: SearchResult) -> str:
    """Returns the ranking as a table for notebooks."""
    # Estimates and compiled steps are two scales, which share no column.
    titles = ("", "layout", "options", "estimate", "step", "tokens/s", "MFU", "memory", "by")
    unit = values.byte_unit(one.needs for one in result.ranking)
    rows = [
        (str(place), str(one.estimate.choice.mesh), one.estimate.choice.options_text,
         "" if result.is_assumed else values.format_seconds(one.estimate.step_seconds),
         *(one.figures if one.plan else ("", "", "")), unit(one.needs) if one.plan else f"~{unit(one.needs)}",
         "; ".join(filter(None, (one.source, one.reason))))
        for place, one in enumerate(result.ranking, start=1)
    ]  # fmt: skip
    return html.table(titles, rows, f"layouts for {result.target}, least {result.objective} first")


@as_text.register
def ranking_text(result: SearchResult) -> str:
    """Returns the ranking for terminals."""
    return plain_text(ranking_table(result))


def families_table(result: SearchResult) -> RenderableType:
    """Builds the table of families, with the reason why each lost."""
    unit = values.byte_unit(one.estimate.needs for one in result.families if one.estimate)
    table = plain_table("family", "its best", "step", unit.name, right=("step", unit.name))
    for one in result.families:
        if one.estimate is None:
            table.add_row(one.family, Text(one.reason), "", "")
            continue
        step = "" if result.is_assumed else values.format_seconds(one.estimate.step_seconds)
        best = _name_and_reason(str(one.estimate.choice), one.reason)
        table.add_row(one.family, best, step, unit.number(one.estimate.needs))
    return section("Other families", "by estimate", table)


def _name_and_reason(name: str, reason: str) -> Text:
    return Text("\n".join(filter(None, (name, reason))))


def layout_values(config: Config) -> dict[str, Any]:
    """Values of a config that belong to a layout file."""
    mesh: dict[str, Any] = {axis: size for axis in AXES if (size := getattr(config.mesh, axis)) > 1}
    if config.mesh.dcn:
        mesh["dcn"] = dict(config.mesh.dcn)
    out: dict[str, Any] = {"mesh": mesh, "rules": {name: list(axes) for name, axes in config.axis_rules.items()}}
    if config.context_parallel != "auto":
        out["context_parallel"] = config.context_parallel
    if config.zero:
        out["zero"] = config.zero
    if config.mesh.pipeline > 1 and (pipeline := config.pipeline.model_dump(exclude_defaults=True)):
        out["pipeline"] = pipeline
    return out


def layout_text(result: SearchResult, one: RankedLayout) -> str:
    """Text of a layout file: its figures and step keys as comments, mesh and rules."""
    formats = zip(("{} a step", "{} tokens/s", "MFU {}"), result.figures(one))
    figures = [*(form.format(figure) for form, figure in formats if figure)]
    figures.append(f"{values.format_bytes(one.needs)} per device")
    source = "estimated, not compiled" if one.plan is None else values.pods_text(one.plan) or "compiled"
    lines = [
        f"# {one.estimate.choice.mesh}: {SIGNATURE} for {result.target}, least {result.objective}.",
        f"# Predicted ({source}): {', '.join(figures)}.",
        f"# Use with: {' '.join(one.keys)}",
    ]
    for key, value in layout_values(one.config).items():
        if key == "rules":
            lines += [f"{key}:", *(f"  {name}: {text(axes)}" for name, axes in value.items())]
        else:
            lines.append(f"{key}: {text(value)}")
    return "\n".join([*lines, ""])


def write_layout(result: SearchResult, path: str | os.PathLike[str], one: RankedLayout | None = None) -> Path:
    """Writes the winner (or `one`) as a layout file, atomically; `layout: PATH` then uses it.

    Raises:
        ValueError: nothing fits.
        OSError: the file can not be written.
    """
    one = one or result.winner
    if one is None:
        raise ValueError("no layout fits, so there is none to write")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, layout_text(result, one))
    return file


def can_overwrite(path: str | os.PathLike[str]) -> bool:
    """Returns whether `write_layout` may write here by default: the file is absent, or a search wrote it."""
    file = Path(path)
    return not file.exists() or SIGNATURE in file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
