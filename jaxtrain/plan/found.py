"""What a search found: the ranking as a table, as JSON, and the winner as a layout file. No JAX."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxtrain.config.output import text
from jaxtrain.config.schema import Config
from jaxtrain.mesh.axes import AXES
from jaxtrain.plan import rivals
from jaxtrain.plan.formula import Estimate
from jaxtrain.plan.result import Plan
from jaxtrain.plan.rivals import Loser


@dataclass(frozen=True)
class Ranked:
    """One layout of the ranking.

    Args:
        config: with this layout.
        plan: of the compiled step; None where only the formulas judged it.
        cached: the plan is of an earlier search.
        error: why it could not be compiled; else empty.
        reason: why it is not the first; of the first, what limits it.
    """

    estimate: Estimate
    config: Config
    target: str
    plan: Plan | None = None
    cached: bool = False
    error: str = ""
    reason: str = ""

    @property
    def fits(self) -> bool:
        """As compiled, else by the formulas; what could not be compiled does not."""
        if self.error:
            return False
        return self.estimate.fits() if self.plan is None else self.plan.fits is not False

    @property
    def step_seconds(self) -> float | None:
        """None where the compiler was asked and nobody knows the network."""
        return self.estimate.step_seconds if self.plan is None else self.plan.step_seconds

    @property
    def needs(self) -> float:
        """Bytes of a device."""
        return self.estimate.needs if self.plan is None or not self.plan.needs else self.plan.needs

    @property
    def source(self) -> str:
        """`compiled`, `cached` or `formula`."""
        return "formula" if self.plan is None else "cached" if self.cached else "compiled"

    @property
    def keys(self) -> list[str]:
        """`key=value` of what goes with the layout: microbatches, remat and offload."""
        return [f"step.{name}={text(_plain(value))}" for name, value in self.estimate.choice.step.items()]

    def explained(self, winner: Ranked | None, objective: str, assumed: bool) -> Ranked:
        """With its reason."""
        if self.error:
            return replace(self, reason=self.error)
        if winner is None or self is winner:
            own = self.plan.limit if self.plan else ""
            return replace(self, reason=own if self.fits else self._why_not())
        if self.plan is not None and winner.plan is not None and objective == "time":
            return replace(self, reason=rivals.of_plans(self.plan, winner.plan))
        if self.plan is not None and not self.fits:
            return replace(self, reason=self._why_not())
        return replace(self, reason=rivals.against(self.estimate, winner.estimate, objective, assumed))

    def _why_not(self) -> str:
        return rivals.of_plans(self.plan, self.plan) if self.plan else ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mesh": {axis: size for axis, size in self.estimate.choice.by_axis.items() if size > 1},
            "options": self.estimate.choice.options, "keys": self.keys, "layout": layout(self.config),
            "target": self.target, "source": self.source, "fits": self.fits, "needs": round(self.needs),
            "step_seconds": self.step_seconds, "reason": self.reason, "estimate": self.estimate.as_dict(),
            "plan": self.plan.as_dict() if self.plan else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The outcome of a search.

    Args:
        config: that was asked about.
        ranking: best first; what does not fit or compile last.
        losers: the best of each family that people know, by the formulas.
        counted, fitting: numbers of layouts looked at, and of those that may fit.
        stopped: why not all was compiled; else empty.
        assumed: the formulas' seconds mean nothing but an order.
    """

    target: str
    objective: str
    config: Config
    ranking: tuple[Ranked, ...]
    losers: tuple[Loser, ...] = ()
    counted: int = 0
    fitting: int = 0
    stopped: str = ""
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "target": self.target, "objective": self.objective, "counted": self.counted, "fitting": self.fitting,
            "stopped": self.stopped, "seconds": self.seconds, "assumed": self.assumed,
            "ranking": [one.as_dict() for one in self.ranking], "losers": [one.as_dict() for one in self.losers],
        }  # fmt: skip

    def summary(self) -> str:
        """How many layouts were looked at, compiled and left, in a line."""
        compiled = sum(one.plan is not None for one in self.ranking)
        cached = sum(one.cached for one in self.ranking)
        of_cache = f", {cached} of them earlier" if cached else ""
        line = f"{self.counted} layouts, {self.fitting} fit by formula, {compiled} compiled{of_cache}"
        left = f"; {self.stopped}: {len(self.untried)} more were worth compiling" if self.stopped else ""
        none = "" if self.winner else "; nothing fits"
        return f"{line} in {self.seconds:.0f} s{left}{none}"


def table(found: Found) -> Table:
    """The ranking."""
    out = _table(f"Layouts for {found.target}, least {found.objective} first", "", "layout", "step", "tokens/s", "MFU")
    out.add_column("GB", justify="right", no_wrap=True)
    out.add_column("by", no_wrap=True)
    several = len({one.target for one in found.ranking}) > 1
    for place, one in enumerate(found.ranking, start=1):
        choice = one.estimate.choice
        seconds = None if found.assumed else one.step_seconds
        tokens = one.config.data.global_batch * one.config.data.sequence
        mfu = one.plan.mfu if one.plan else None
        name = ", ".join(filter(None, (choice.mesh + (f" of {one.target}" if several else ""), choice.options)))
        out.add_row(
            str(place), _reasoned(name, one.reason), "" if not seconds else f"{seconds:.3g} s",
            "" if not seconds else f"{tokens / seconds:,.0f}", "" if mfu is None else f"{mfu:.1%}",
            _gigabytes(one.needs), one.source, style="bold" if one is found.winner else None if one.fits else "dim",
        )  # fmt: skip
    return out


def losers_table(found: Found) -> Table:
    """The best of each family, and why it lost."""
    out = _table("What lost, by formula", "family", "its best", "step")
    out.add_column("GB", justify="right", no_wrap=True)
    for one in found.losers:
        known = one.estimate
        step = "" if known is None or found.assumed else f"{known.step_seconds:.3g} s"
        best = _reasoned("" if known is None else str(known.choice), one.reason)
        out.add_row(one.family, best, step, "" if known is None else _gigabytes(known.needs))
    return out


def _table(title: str, *names: str) -> Table:
    out = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        is_text = name in ("layout", "family", "its best")
        out.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text)
    return out


def _reasoned(name: str, reason: str) -> Text:
    """A name, and under it why."""
    return Text("\n".join(filter(None, (name, reason))))


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f}" if size >= 1e8 else f"{size / 1e9:.2g}"


def layout(config: Config) -> dict[str, Any]:
    """What a layout file holds of a config."""
    mesh: dict[str, Any] = {axis: size for axis in AXES if (size := getattr(config.mesh, axis)) > 1}
    if config.mesh.dcn:
        mesh["dcn"] = dict(config.mesh.dcn)
    out: dict[str, Any] = {"mesh": mesh, "rules": {name: list(axes) for name, axes in config.rules.items()}}
    if config.context != "auto":
        out["context"] = config.context
    if config.zero:
        out["zero"] = config.zero
    if config.mesh.pipeline > 1:
        pipeline = config.pipeline.model_dump(exclude_none=True)
        out["pipeline"] = pipeline
    return out


def layout_text(found: Found, one: Ranked) -> str:
    """A layout file: its figures, the keys that go with it, mesh and rules."""
    seconds = one.step_seconds
    tokens = one.config.data.global_batch * one.config.data.sequence
    figures = [] if found.assumed or not seconds else [f"{seconds:.3g} s a step", f"{tokens / seconds:,.0f} tokens/s"]
    if one.plan and one.plan.mfu is not None:
        figures.append(f"MFU {one.plan.mfu:.1%}")
    figures.append(f"{_size(one.needs)} of a device")
    word = "estimated by formula, not compiled" if one.plan is None else "compiled"
    lines = [
        f"# {one.estimate.choice.mesh}: found by `jaxtrain plan --search` for {one.target}, least {found.objective}.",
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


def write_layout(found: Found, path: str | os.PathLike[str], one: Ranked | None = None) -> Path:
    """Writes the winner (or `one`) as a layout file, whole or not at all: then `layout: PATH` uses it.

    Raises:
        ValueError: nothing fits.
        OSError: the file cannot be written.
    """
    one = one or found.winner
    if one is None:
        raise ValueError("no layout fits, so there is none to write")
    file = Path(os.path.expanduser(path))
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    part.write_text(layout_text(found, one), encoding="utf-8")
    os.replace(part, file)
    return file


def _size(size: float) -> str:
    """In GB, or MB of little."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
