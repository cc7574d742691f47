"""Status of the islands of a run, from the file that the coordinator writes every second."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError

SERVER, LOG, STATUS = "server", "pushes.jsonl", "status.json"  # folder of the servers in that of a run, its files
NOBODY = -1  # nobody's push ended a wait: an island left, or the grace was over
STALE = 10.0  # seconds without a new status after which nobody seems to run
COLUMNS = (
    "island",
    "clock",
    "staleness",
    "tokens",
    "tokens/s",
    "sent MB",
    "read MB",
    "waited s",
    "late",
    "dropped",
    "loss",
    "seen",
)


def read_status(directory: Path) -> dict[str, Any]:
    """Returns the status of a run. Raises UserError if its folder has none."""
    try:
        return json.loads((directory / SERVER / STATUS).read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{directory}: no run of islands ({SERVER}/{STATUS} cannot be read); expected its folder"
        ) from None


def status_table(status: Mapping[str, Any], now: float | None = None) -> str:
    """Returns lines for a terminal: what each island has done, who is there, and how old this is."""
    age = (time.time() if now is None else now) - status["time"]
    rows = [COLUMNS, *(_row(index, island, status) for index, island in status["islands"].items())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    ended = f"; the run has ended, or its server is gone for {age:.0f} s" if age > STALE else ""
    problem = [status["problem"]] if status.get("problem") else []
    return "\n".join([f"updates {status['version']}, step {status['clock']}{ended}", *problem, *lines])


def _row(index: str, island: Mapping[str, Any], status: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = max(island.get("seconds", 0.0), 1e-9)
    tokens = island.get("tokens", 0.0)
    state = "gone" if not island["is_there"] else "waits" if island["waits"] else f"{island['seen']:.1f} s ago"
    return (
        index, str(island["clock"]), str(island["staleness"]), f"{tokens:,.0f}", f"{tokens / seconds:,.0f}",
        f"{island.get('sent_bytes', 0) / 1e6:,.1f}", f"{island.get('received_bytes', 0) / 1e6:,.1f}",
        f"{island.get('waited', 0):.1f}", f"{island.get('late', 0):.0f}",
        f"{island.get('dropped', 0):.0f}", f"{island['loss']:.4f}" if "loss" in island else "", state,
    )  # fmt: skip
