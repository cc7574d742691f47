"""Islands of several processes on a Ray cluster: the same as those of one, and one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched_islands import Launched, arguments_of, losses

from jaxtrain.islands.status import read_status

pytest.importorskip("ray", reason="islands on a cluster need Ray")
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]

STRATEGIES = {
    "server": ("sync.strategy=bsp", "sync.compress.gradients=int8", "islands.servers=2", "model.embed=64"),
    "streaming": (
        "sync.strategy=streaming_diloco", "sync.every=8", "sync.streaming.fragments=2", "sync.streaming.tau=2",
        "islands.servers=0", "sync.compress.deltas=int8", "model.embed=64",
    ),
    "gossip": ("sync.strategy=gossip", "sync.every=4", "sync.gossip.graph=ring", "islands.servers=0"),
}  # fmt: skip
TWO = ("--processes", "2")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_islands_of_two_processes_train_as_those_of_one(tmp_path: Path, strategy: str) -> None:
    found: list[Any] = []
    for options in ((), TWO):
        folder = tmp_path / f"{len(options)}"
        folder.mkdir()
        launched = Launched(folder, *STRATEGIES[strategy], options=options)
        code, output = launched.finish()
        assert code == 0, output
        assert launched.log()[-1]["event"] in ("save", "leave"), launched.log()[-1]
        found.append([losses(launched.run, island) for island in range(2)])
        totals = read_status(launched.run)["islands"]
        found[-1].append([totals[island]["sent_bytes"] for island in ("0", "1")])
    (*one, sent), (*two, as_sent) = found
    assert as_sent == sent
    for ours, theirs in zip(two, one):
        assert sorted(ours) == list(range(1, 25))
        np.testing.assert_allclose([ours[step] for step in ours], [theirs[step] for step in ours], rtol=2e-4)


def test_an_island_that_loses_a_process_joins_again(launch: Callable[..., Launched]) -> None:
    sync = ("sync.strategy=diloco", "sync.every=4", "islands.servers=0", "steps=600", "islands.heartbeat=1")
    launched = launch(*sync, options=TWO)
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 3)
    workers = [pid for pid in launched.children("cli.worker") if "resume" in arguments_of(pid)]
    assert len(workers) == 4
    os.kill(next(pid for pid in reversed(workers) if "island-1" in arguments_of(pid)), signal.SIGKILL)
    seen = len(launched.log())
    launched.wait_for(lambda log: [0] in [record.get("islands") for record in log[seen:]])
    alone = len(launched.log())
    launched.wait_for(lambda log: [0, 1] in [record.get("islands") for record in log[alone:]])
    launched.process.send_signal(signal.SIGINT)
    code, output = launched.finish()
    assert code == 75, output
    assert f"next  jaxtrain launch islands --processes=2 {launched.run}" in output
    before = launched.log()[-1]["version"]
    again = launch(*sync, options=TWO)
    again.wait_for(lambda log: log[-1].get("islands") == [0, 1] and log[-1]["version"] > before + 3)
    again.process.send_signal(signal.SIGTERM)
    assert again.finish()[0] == 75
    steps = sorted(losses(launched.run, 0))
    assert steps == list(range(1, steps[-1] + 1))
