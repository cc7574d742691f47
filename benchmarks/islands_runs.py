"""Runs of benchmarks/islands.py: which ways to agree each part compares, for how long, and their configs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"embed": 128, "layers": 5, "mlp": 384, "heads": 4, "kv_heads": 2},
    "5M": {"embed": 256, "layers": 6, "mlp": 768, "heads": 4, "kv_heads": 2},
    "quick": {"embed": 32, "layers": 2, "mlp": 64, "heads": 2},
}
ROWS, SEQUENCE = 2, 64  # of a step of an island
EVERY = 16
OUTER = {"lr": 0.8, "momentum": 0.5}
DILOCO = {"strategy": "diloco", "every": EVERY, "outer": OUTER}
STREAMING = {"fragments": 4, "tau": 2, "alpha": 0.0}
ALONE = {"servers": 0}  # islands agree among themselves
# Ways to agree: sections of the config. Gossip of four islands has mixed them all after two exchanges.
WAYS: dict[str, dict[str, Any]] = {
    "bsp": {"sync": {"strategy": "bsp"}},
    "ssp": {"sync": {"strategy": "ssp", "stale": {"bound": 3}}},
    "asp": {"sync": {"strategy": "asp"}},
    "diloco": {"sync": DILOCO},
    "diloco without server": {"sync": DILOCO, "islands": ALONE},
    "streaming": {"sync": {**DILOCO, "strategy": "streaming_diloco", "streaming": STREAMING}, "islands": ALONE},
    "gossip": {
        "sync": {"strategy": "gossip", "every": EVERY // 2, "gossip": {"graph": "exponential"}}, "islands": ALONE,
    },
    "bsp int8": {"sync": {"strategy": "bsp", "compress": {"gradients": "int8"}}},
    "bsp int4": {"sync": {"strategy": "bsp", "compress": {"gradients": "int4"}}},
    "diloco int8": {"sync": {**DILOCO, "compress": {"deltas": "int8"}}},
    "diloco int4": {"sync": {**DILOCO, "compress": {"deltas": "int4"}}},
}  # fmt: skip
FEW_BITS = ("bsp int8", "bsp int4", "diloco int8", "diloco int4")
ALL = tuple(way for way in WAYS if way not in FEW_BITS)
RATE = {"bsp": 2e-3}  # those that sync.py tries first
OTHER_RATE = 1e-3
PARTS = ("loss", "links", "head", "scale", "slow", "lossy", "cut", "long_cut")
PACE, SLOW = 0.1, 3.0  # seconds of a step, and how many times that an island takes which is slow
LOSS, CUT, LONG_CUT = 0.01, 30.0, 120.0  # share of the packets, seconds, seconds


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        part: of the benchmark.
        way: to agree.
        steps: of each island.
        islands: their number.
        size: of the model.
        mbit: speed of the links of the islands, Mbit/s; None: no limit.
        pace: seconds that a step of each island takes besides its computation.
        validations: during the run.
        head_mbit: speed of the link of the head.
        lost: share of the packets that each link loses, in each direction.
        cut: seconds for which the link of the last island is cut, once island 0 has done half of its steps.
    """

    part: str
    way: str
    steps: int
    islands: int = 4
    size: str = "1M"
    mbit: float | None = None
    pace: tuple[float, ...] = ()
    validations: int = 0
    head_mbit: float | None = None
    lost: float = 0.0
    cut: float = 0.0

    @property
    def every(self) -> int:
        """Steps between exchanges."""
        return WAYS[self.way]["sync"].get("every", 1)

    @property
    def key(self) -> dict[str, Any]:
        """The run as JSON has it."""
        return asdict(self) | {"pace": list(self.pace)}


DEFAULTS = {each.name: each.default for each in fields(Run) if each.default is not MISSING}


def with_defaults(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run of a file, which may be older than some fields."""
    return {**DEFAULTS, **run}


def run_of(record: Mapping[str, Any]) -> Run:
    """The run of a record, which has its figures, too."""
    return Run(**{each.name: record[each.name] for each in fields(Run)})


def runs_of(part: str, mbit: float, quick: bool) -> list[Run]:
    """The runs of a part."""
    if quick:
        return quick_runs(part, mbit)

    def planned(way: str, size: str = "1M", islands: int = 4, **more: Any) -> Run:
        rounds, steps = part_steps(part, size)
        local = WAYS[way]["sync"].get("every", 1) > 1
        return Run(part, way, rounds * EVERY if local else steps, islands, size, **more)

    plain = ("bsp", "diloco")
    if part in ("loss", "cut"):
        return [planned(way, mbit=mbit, validations=15, cut=CUT if part == "cut" else 0.0) for way in ALL]
    if part == "long_cut":
        ways, pace = ("diloco", "diloco without server"), (PACE,) * 2
        return [Run(part, way, 2800, 2, "quick", mbit, pace, 6, cut=LONG_CUT) for way in ways]
    if part == "lossy":
        return [planned(way, mbit=mbit / 4, validations=10, lost=lost) for way in ALL for lost in (0.0, LOSS)]
    if part == "links":  # without a limit: see `scale`
        return [planned(way, mbit=speed) for speed in (mbit, mbit / 4, mbit * 4) for way in plain]
    if part == "head":
        return [planned(way, mbit=speed, head_mbit=speed) for speed in (mbit, mbit * 4) for way in plain]
    if part == "scale":
        runs = [planned(way, size, islands) for way in plain for size in ("1M", "5M") for islands in (8, 4, 2, 1)]
        return runs + [planned(way, size) for way in FEW_BITS for size in ("1M", "5M")]
    paces = ((PACE,) * 4, (PACE, PACE, PACE, SLOW * PACE))
    return [planned(way, pace=pace, validations=8) for way in ALL for pace in paces]


def quick_runs(part: str, mbit: float) -> list[Run]:
    """Smallest runs of a part."""
    pace = (0.1, 0.1)
    return {
        "loss": [
            Run(part, "bsp", 12, 2, "quick", mbit, (), 3),
            Run(part, "diloco", 48, 2, "quick", mbit, (), 3),
            Run(part, "diloco without server", 48, 2, "quick", mbit, (), 3),
            Run(part, "streaming", 48, 2, "quick", mbit, (), 3),
        ],
        "lossy": [Run(part, "diloco", 48, 2, "quick", mbit, (), 3, lost=lost) for lost in (0.0, LOSS)],
        "cut": [Run(part, "diloco", 480, 2, "quick", mbit, pace, 6, cut=CUT / 2)],
        "head": [Run(part, "bsp", 12, 2, "quick", mbit, head_mbit=mbit)],
        "scale": [Run(part, "bsp int8", 12, 2, "quick"), Run(part, "bsp", 12, 2, "quick")],
    }.get(part, [])


def part_steps(part: str, size: str) -> tuple[int, int]:
    """Rounds of EVERY steps of those that train alone in between, and steps of the others."""
    if part == "scale":
        return (6, 40) if size == "1M" else (4, 24)
    return {"links": (5, 24), "head": (5, 24), "slow": (12, 80), "lossy": (20, 100)}.get(part, (60, 240))


def settings_of(run: Run, folder: Path) -> dict[str, Any]:
    """The config of a run."""
    recorder = {"type": "islands_recorder:Recorder", "options": {"pace": list(run.pace)}}
    way = WAYS[run.way]
    return {
        "name": "run", "dir": str(folder), "steps": run.steps, "precision": "fp32", "layout": "ddp",
        "mesh": {"data": 1}, "model": SIZES[run.size], "sync": way["sync"],
        "islands": {"count": run.islands, **way.get("islands", {})},
        "data": {
            "sources": [{"path": "stdlib"}], "sequence": SEQUENCE, "global_batch": ROWS * run.islands,
            "validation_fraction": 0.05,
        },
        "optimizer": {"lr": RATE.get(way["sync"]["strategy"], OTHER_RATE)},
        "schedule": {"name": "constant", "warmup_steps": 20},
        "eval": {"every": run.steps // max(run.validations, 1), "batches": 8 if run.validations else 1},
        "checkpoint": {"every": run.steps}, "callbacks": [recorder],
        "log": {"sample_tokens": 0, "tensorboard": False, "every": 1},
    }  # fmt: skip


def config_of(run: Run, folder: Path) -> Path:
    """Writes the config of a run."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(settings_of(run, folder)))
    return file
