"""Waiting for other islands has a bucket of its own in the time accounting, so that no watchdog takes it for a hang."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from local_islands import LocalServer
from test_coordinator import OneIsland, config

from jaxtrain.io.watchdog import Watchdog
from jaxtrain.trackers.goodput import GoodputLedger

ROUNDS: dict[str, Any] = {"strategy": "diloco", "every": 2}
STREAMING = {"strategy": "streaming_diloco", "every": 2, "streaming": {"fragments": 1, "tau": 1}}
GOSSIP = {"strategy": "gossip", "every": 2, "gossip": {"graph": "ring"}}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("sync", "servers"),
    [({"strategy": "bsp"}, 1), (ROUNDS, 1), (ROUNDS, 0), (STREAMING, 0), (GOSSIP, 0)],
    ids=["bsp", "diloco", "diloco without server", "streaming", "gossip"],
)
def test_waiting_for_others_is_no_part_of_a_step(tmp_path: Path, sync: dict[str, Any], servers: int) -> None:
    run = config(sync, 2, servers=servers)
    with LocalServer(run) as server, ThreadPoolExecutor(1) as pool:
        first, other = (OneIsland(server, run, index) for index in range(2))
        ledger = GoodputLedger()
        ledger.begin("compute")
        first.island.waiting = lambda: ledger.phase("exchange")
        steps = pool.submit(first.step, 2)
        while ledger.seconds()["exchange"] < 0.5:
            assert not steps.done()
            time.sleep(0.02)
        assert ledger.snapshot().bucket == "exchange"
        dog = Watchdog(ledger, tmp_path, lambda kind, **fields: None)
        assert dog.deadline(ledger.snapshot().bucket) >= 24 * 3600
        other.step(2)
        steps.result(60)
        assert ledger.snapshot().bucket == "compute"
