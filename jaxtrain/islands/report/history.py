"""History of a run of islands, read from its folder: the log of the coordinator, and the history of each island."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.io.jsonl import read_records
from jaxtrain.islands.status import LOG, NOBODY, SERVER, read_status
from jaxtrain.reports.history import RunHistory, read_history

Event = Mapping[str, Any]


@dataclass(frozen=True)
class IslandsHistory:
    """History of a run of islands.

    Args:
        directory: folder of the run.
        status: as the coordinator wrote it last.
        events: records of the coordinator, in order.
        runs: history of each island whose folder is here.
    """

    directory: Path
    status: Mapping[str, Any]
    events: Sequence[Event]
    runs: Mapping[int, RunHistory]

    @property
    def islands(self) -> list[int]:
        """Indices of all islands that pushed or have a folder."""
        return sorted({event["island"] for event in self.events if "island" in event} | set(self.runs))

    def named(self, event: str) -> list[Event]:
        """Returns the records of one kind."""
        return [record for record in self.events if record["event"] == event]

    def staleness(self) -> dict[int, Counter[int]]:
        """Returns for each island how many pushes had which staleness: updates since its read."""
        found: dict[int, Counter[int]] = {island: Counter() for island in self.islands}
        for push in self.named("push"):
            found[push["island"]][push["staleness"]] += 1
        return found

    def waits(self) -> dict[tuple[int, int], float]:
        """Returns (who waited, for whom) -> seconds, from a push to the update after which the island may read.

        An island waits for the one whose push made the update due; `NOBODY` if none did. One that trains on meanwhile
        says with its next push how long it had to wait.
        """
        found: dict[tuple[int, int], float] = {}
        causes: dict[int, int] = {}  # of the last update that an island read
        for event, cause, pushed in _updates(self.events):
            for island in set(event.get("readers", ())):
                causes[island] = cause
                if island in pushed:
                    _add(found, (island, cause), max(0.0, event["time"] - pushed.pop(island)))
            if event.get("waited"):
                island = event["island"]
                _add(found, (island, causes.get(island, NOBODY)), event["waited"])
        return found


def _updates(events: Sequence[Event]) -> Iterator[tuple[Event, int, dict[int, float]]]:
    """Yields each update, and each push of an island that trains on, with who made the last update due, and who waits.

    That is (event, island, time of the push by island that still waits). An update may name the island, else it is
    the last one that pushed.
    """
    pushed: dict[int, float] = {}
    cause = NOBODY
    for event in events:
        if event["event"] == "push":
            cause = event["island"]
            if "waited" in event:
                yield event, cause, pushed
            else:
                pushed[cause] = event["time"]
        elif event["event"] == "update":
            yield event, event.get("cause", cause), pushed
            cause = NOBODY
        elif event["event"] == "leave":
            pushed.pop(event["island"], None)
            cause = NOBODY


def _add(found: dict[tuple[int, int], float], key: tuple[int, int], seconds: float) -> None:
    """Adds the time for which an island waited for another one."""
    if key[0] != key[1]:
        found[key] = found.get(key, 0.0) + seconds


def read_islands(directory: Path) -> IslandsHistory:
    """Reads the history of a run of islands. Raises UserError if the folder has none."""
    status = read_status(directory)
    events = [event for _, event in read_records(directory / SERVER / LOG) if event is not None and "event" in event]
    runs = {}
    for folder in directory.glob("island-*"):
        try:
            runs[int(folder.name.removeprefix("island-"))] = read_history(folder)
        except (UserError, ValueError):  # it has not begun, or is another folder
            continue
    return IslandsHistory(directory, status, events, dict(sorted(runs.items())))
