"""`jaxtrain launch islands` on a Ray cluster: a whole run, killed processes, a stop and the same command again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched_islands import Launched, arguments_of, losses

from jaxtrain.islands.report.history import read_islands
from jaxtrain.islands.status import read_status, status_table

pytest.importorskip("ray", reason="islands on a cluster need Ray")
pytestmark = [pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]


def test_a_run_of_rounds_has_a_status_and_leaves_nothing_behind(launch: Callable[..., Launched]) -> None:
    launched = launch("sync.strategy=diloco", "sync.every=4", "islands.servers=2")
    launched.wait_for(lambda log: any(record["event"] == "update" for record in log))
    raylets, workers = launched.children("raylet/raylet"), launched.children("cli.worker")
    assert raylets
    assert len(workers) == 2
    below = [*raylets, *workers]
    code, output = launched.finish()
    assert code == 0, output
    updates = [record for record in launched.log() if record["event"] == "update"]
    assert [record["islands"] for record in updates] == [[0, 1]] * 6
    assert sorted(losses(launched.run, 0)) == list(range(1, 25))
    assert min(losses(launched.run, 1).values()) < 0.8 * losses(launched.run, 1)[1]
    table = status_table(read_status(launched.run))
    assert "updates 6, step 24" in table
    history = read_islands(launched.run)
    assert [len(run.series("consensus_distance")) for run in history.runs.values()] == [6, 6]
    assert history.waits().keys() & {(0, 1), (1, 0)}
    assert all(run.seconds["exchange"] > 0 for run in history.runs.values())
    assert [line.split()[:2] for line in table.splitlines()[2:]] == [["0", "24"], ["1", "24"]]
    # Ray kills a raylet that does not end in a second, and its agents notice within a minute.
    end = time.monotonic() + 120
    while left := [arguments_of(pid) for pid in below if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def test_a_killed_island_and_a_killed_server_lose_nothing(launch: Callable[..., Launched]) -> None:
    """The bound holds in all of it, and every push that was acknowledged is in an update."""
    launched = launch("sync.strategy=ssp", "sync.stale.bound=2", "steps=150", "islands.heartbeat=1")
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 20)
    os.kill(launched.children("ServerProcess")[0], signal.SIGKILL)
    seen = len(launched.log())
    launched.wait_for(lambda log: len(log) > seen + 20)
    island = next(pid for pid in launched.children("cli.worker") if "island-1" in arguments_of(pid))
    os.kill(island, signal.SIGKILL)
    code, output = launched.finish()
    assert code == 0, output
    assert "island 1 was killed by signal 9" in output
    log = launched.log()
    pushes = [record for record in log if record["event"] == "push"]
    merged = sum(len(record["islands"]) for record in log if record["event"] == "update")
    assert merged == len(pushes)
    assert max(record["ahead"] for record in pushes) <= 2
    versions = [record["version"] for record in log if record["event"] == "update"]
    assert versions == list(range(1, len(versions) + 1))  # no update was lost with the server
    assert [record["island"] for record in log if record["event"] == "join"] == [*range(2), 1] or (
        sorted(record["island"] for record in log if record["event"] == "join") == [0, 1, 1]
    )
    assert max(losses(launched.run, 1)) == 150


COORDINATORS = {
    "server": ("sync.strategy=diloco", "sync.every=4", "checkpoint.every=8"),
    "rounds": ("sync.strategy=diloco", "sync.every=4", "islands.servers=0"),
    "gossip": ("sync.strategy=gossip", "sync.every=4", "sync.gossip.graph=ring", "islands.servers=0"),
}


@pytest.mark.parametrize("kind", COORDINATORS)
def test_a_killed_coordinator_starts_again_and_the_islands_go_on(launch: Callable[..., Launched], kind: str) -> None:
    launched = launch(*COORDINATORS[kind], "steps=300", "islands.heartbeat=1")
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 6)
    (coordinator,) = launched.children("CoordinatorActor")
    os.kill(coordinator, signal.SIGKILL)
    killed = len(launched.log())
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log[killed:]) > 6)
    code, output = launched.finish()
    assert code == 0, output
    after = launched.log()[killed:]
    assert sorted(record["island"] for record in after if record["event"] == "join") == [0, 1]
    for island in range(2):
        assert max(losses(launched.run, island)) == 300
        assert losses(launched.run, island)[300] < 0.5 * losses(launched.run, island)[1]


def test_a_stopped_run_goes_on_by_the_same_command(launch: Callable[..., Launched]) -> None:
    launched = launch("sync.strategy=diloco", "sync.every=4", "steps=400")
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 3)
    launched.process.send_signal(signal.SIGINT)
    code, output = launched.finish()
    assert code == 75, output
    assert f"next  jaxtrain launch islands {launched.run}" in output
    before = launched.log()[-1]
    assert before["event"] == "save"
    again = launch("sync.strategy=diloco", "sync.every=4", "steps=400")
    again.wait_for(lambda log: sum(record["event"] == "update" for record in log) > before["version"] + 3)
    loads = [record for record in again.log() if record["event"] == "load"]
    assert [record["version"] for record in loads] == [before["version"]]
    again.process.send_signal(signal.SIGTERM)
    assert again.finish()[0] == 75
    steps = sorted(losses(launched.run, 0))
    assert steps == list(range(1, steps[-1] + 1))


STREAMING = ("sync.strategy=streaming_diloco", "sync.every=8", "sync.streaming.fragments=2", "sync.streaming.tau=2")


@pytest.mark.parametrize("strategy", [("sync.strategy=diloco", "sync.every=4"), STREAMING], ids=["rounds", "streaming"])
def test_islands_without_a_server_go_on_without_one_that_is_killed_and_take_it_in_again(
    launch: Callable[..., Launched], strategy: tuple[str, ...]
) -> None:
    sync = (*strategy, "islands.servers=0", "steps=800", "islands.heartbeat=1")
    launched = launch(*sync)
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 3)
    assert not launched.children("ServerProcess")
    island = next(pid for pid in launched.children("cli.worker") if "island-1" in arguments_of(pid))
    os.kill(island, signal.SIGKILL)
    seen = len(launched.log())
    launched.wait_for(lambda log: [0] in [record.get("islands") for record in log[seen:]])
    alone = len(launched.log())
    launched.wait_for(lambda log: [0, 1] in [record.get("islands") for record in log[alone:]])
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish()[0] == 75
    before = [record["version"] for record in launched.log() if record["event"] == "update"]
    assert before == list(range(1, len(before) + 1))  # no round is made twice, and none is left out
    again = launch(*sync)  # the islands' own checkpoints have all that there is
    again.wait_for(lambda log: log[-1].get("islands") == [0, 1] and log[-1]["version"] > before[-1] + 3)
    again.process.send_signal(signal.SIGTERM)
    assert again.finish()[0] == 75
    steps = sorted(losses(launched.run, 0))
    assert steps == list(range(1, steps[-1] + 1))
    for index in range(2):
        command = [sys.executable, "-m", "jaxtrain.cli.main", "export", str(launched.run / f"island-{index}")]
        done = subprocess.run([*command, "--to", str(launched.run / f"hf-{index}")], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_islands_gossip_without_one_that_is_killed_and_take_it_in_again(launch: Callable[..., Launched]) -> None:
    sync = ("sync.strategy=gossip", "sync.every=4", "sync.gossip.graph=ring", "islands.servers=0")
    launched = launch(*sync, "steps=600", "data.global_batch=12", "islands.heartbeat=1", islands=3)
    launched.wait_for(lambda log: sum(record["event"] == "update" for record in log) > 9)
    assert not launched.children("ServerProcess")
    island = next(pid for pid in launched.children("cli.worker") if "island-1" in arguments_of(pid))
    os.kill(island, signal.SIGKILL)
    seen = len(launched.log())
    launched.wait_for(lambda log: [0, 2] in [record.get("islands") for record in log[seen:]])
    without = len(launched.log())
    launched.wait_for(lambda log: [0, 1, 2] in [record.get("islands") for record in log[without:]])
    code, output = launched.finish()
    assert code == 0, output
    assert "island 1 was killed by signal 9" in output
    table = status_table(read_status(launched.run))
    assert "updates 150, step 600" in table
    assert [line.split()[:3] for line in table.splitlines()[2:]] == [[str(i), "600", "0"] for i in range(3)]
    last = [record for record in launched.log() if record["event"] == "update" and record["version"] == 150]
    assert [record["islands"] for record in last] == [[0, 1, 2]] * 3  # those that end wait until all have read
    history = read_islands(launched.run)
    assert max(moved for _, moved in history.runs[0].series("mixing_distance")) > 0
    assert len(history.waits()) >= 2
    for index in range(3):
        assert max(losses(launched.run, index)) == 600
        assert losses(launched.run, index)[600] < 0.5 * losses(launched.run, 0)[1]
    command = [sys.executable, "-m", "jaxtrain.cli.main"]
    for more in (["export", str(launched.run / "island-1"), "--to", str(launched.run / "hf")],
                 ["islands", "report", str(launched.run)]):  # fmt: skip
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_an_address_that_is_no_cluster_is_one_line() -> None:
    """A port that nobody listens on, and one whose owner never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port in (1, silent.getsockname()[1]):
            code = f"from jaxtrain.islands.ray_engine import RayDoor; RayDoor('127.0.0.1:{port}', 'run', timeout=5)"
            begin = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
            )
            assert time.monotonic() - begin < 60
            last = [line for line in done.stderr.splitlines() if "LostServerError" in line][-1]
            assert f"islands: no server of this run at 127.0.0.1:{port} (" in last
            assert last.endswith("); expected `jaxtrain launch islands` there")


def test_servers_on_a_cluster_that_stays_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """The coordinator gives up its place after a while, and a new launcher gets a new one."""
    script = Path(__file__).parents[1] / "support/abandoned_coordinator.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended, and started anew"
