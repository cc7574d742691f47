"""The report of a run of islands, from a folder as the coordinator and two islands leave it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import jaxtrain
from jaxtrain.cli.main import main
from jaxtrain.islands.report.history import NOBODY, IslandsHistory
from jaxtrain.islands.report.page import islands_page, wait_rows


def push(time: float, island: int, staleness: int = 0) -> dict[str, Any]:
    return {"time": time, "event": "push", "island": island, "staleness": staleness}


def update(time: float, islands: list[int], readers: list[int] | None = None) -> dict[str, Any]:
    return {"time": time, "event": "update", "islands": islands, "readers": islands if readers is None else readers}


# A round that island 1 is late for; one in which it leaves; stale updates after which only one may read.
EVENTS = [
    {"time": 0.0, "event": "join", "island": 0}, push(10.0, 0), push(17.0, 1), update(17.5, [0, 1]),
    push(20.0, 0), {"time": 24.0, "event": "leave", "island": 1}, update(24.5, [0]),
    push(30.0, 0, 2), push(31.0, 1, 2), update(31.5, [0, 1], [1]), push(33.0, 1, 3), update(33.5, [1], [0, 1]),
]  # fmt: skip


def write(folder: Path) -> Path:
    (folder / "server").mkdir(parents=True)
    lines = "".join(json.dumps(event) + "\n" for event in EVENTS)
    (folder / "server/pushes.jsonl").write_text(lines + '{"time": 40.0, "ev')  # the server was killed here
    totals = {"clock": 3, "staleness": 0, "is_there": False, "waits": False, "seen": 1.0, "waited": 4.2, "loss": 2.5}
    status = {"time": 41.0, "version": 4, "clock": 3, "problem": "", "islands": {"0": totals, "1": totals}}
    (folder / "server/status.json").write_text(json.dumps(status))
    for island in range(2):
        own = folder / f"island-{island}"
        own.mkdir()
        start = {"time": "2026-01-01T00:00:00+00:00", "kind": "start", "name": own.name, "step": 0, "steps": 3}
        (own / "events.jsonl").write_text(json.dumps(start) + "\n")
        records = [{"step": step, "loss": 5.0 / step, "tokens": step} for step in range(1, 4)]
        (own / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "island-x").mkdir()
    return folder


@pytest.fixture
def history(tmp_path: Path) -> IslandsHistory:
    return jaxtrain.islands_report(write(tmp_path / "run"))


def test_an_island_waits_for_the_one_whose_push_made_the_update_due(history: IslandsHistory) -> None:
    assert history.waits() == pytest.approx({(0, 1): 7.5 + 3.5, (0, NOBODY): 4.5})
    assert wait_rows(history) == [("0", "1", "11 s"), ("0", "nobody: one left, or the grace was over", "4.5 s")]


def test_one_that_trains_on_during_an_exchange_says_how_long_it_waited() -> None:
    """With its next push; the time from a push to the update is none in which it waits."""

    def event(time: float, island: int, waited: float) -> dict[str, Any]:
        return push(time, island) | {"waited": waited}

    events = [event(1.0, 0, 0.0), event(9.0, 1, 0.0), update(9.5, [0, 1]), event(20.0, 0, 2.5), event(21.0, 1, 0.25)]
    history = IslandsHistory(Path("run"), {}, events, {})
    assert history.waits() == {(0, 1): 2.5}


def test_staleness_is_counted_by_island(history: IslandsHistory) -> None:
    assert history.staleness() == {0: {0: 2, 2: 1}, 1: {0: 1, 2: 1, 3: 1}}


def test_the_page_is_whole_and_shows_all(history: IslandsHistory) -> None:
    page = islands_page(history)
    root = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    text = " ".join(root.itertext())
    for shown in ("run: islands", "island 1, last 1.6667", "Who waited for whom", "island 1: 1 pushes of staleness 3"):
        assert shown in text
    assert "Distance from" not in text  # no exchange of parameters
    bars = [each for each in root.iter() if each.tag.endswith("rect") and list(each)]
    assert len(bars) == 5


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path / "run")
    assert main(["islands", "report", str(run)]) == 0
    assert (run / "islands.html").read_text().startswith("<!DOCTYPE html>")
    assert "updates 4, step 3" in capsys.readouterr().out
    for arguments, message in (
        (["status", str(run), "--html", "x"], "--html is for `jaxtrain islands report`"),
        (["report", str(run), "--html", str(tmp_path / "no/x.html")], "no folder"),
        (["report", str(tmp_path)], "no run of islands"),
    ):
        assert main(["islands", *arguments]) == 2
        assert message in capsys.readouterr().err
