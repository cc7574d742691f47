"""Jobs on a network that loses, delays and cuts: what is short ends nothing, what is long ends in time."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from launched import Launched, losses, undisturbed
from names import NEEDS_MOUNTS, Names
from packet_forwarder import Network, can_forward
from scene import Scene, alive, finished

pytestmark = pytest.mark.skipif(not can_forward(), reason="needs root, network namespaces and TUN devices")

PORT = 29400  # in the namespaces, which nobody else is in


@pytest.fixture
def network():
    network = Network(2)
    yield network
    network.close()


def start(network: Network, scene: Scene, *arguments: str) -> list[subprocess.Popen]:
    given = ("node", "x", "--nodes=2", f"--coordinator={network.hosts[0]}:{PORT}", "--processes=1", "--backoff=0.01")
    return [scene.start(*given, f"--node={i}", *arguments, inside=network.inside(i)) for i in range(2)]


@pytest.mark.parametrize(("loss", "delay"), [(0.3, 0.0), (0.0, 0.2)], ids=["lost", "late"])
def test_a_job_forms_and_ends_while_packets_are_lost_or_late(network: Network, scene: Scene, loss: float, delay: float):
    network.lose(loss)
    network.delay(delay)
    started = start(network, scene)
    workers = [scene.pid(1, rank) for rank in range(2)]
    time.sleep(6)  # more than a heartbeat
    assert all(map(alive, workers)), scene.output()
    started[1].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.output()
    assert scene.ends() == [("node 1 received signal 15", 75)]
    assert (network.counts()["dropped"] > 0) == (loss > 0)


def test_a_short_cut_ends_nothing_and_a_long_one_a_generation_in_time(network: Network, scene: Scene):
    heartbeat = 8
    scene.plan({"3": "exit 0"})
    started = start(network, scene, f"--heartbeat={heartbeat}")
    workers = [scene.pid(1, rank) for rank in range(2)]
    network.cut(1)
    time.sleep(heartbeat / 4)
    network.mend(1)
    time.sleep(heartbeat / 2)
    assert all(map(alive, workers)), scene.output()
    assert "is lost" not in scene.output()
    network.cut(1)
    begun = time.monotonic()
    assert scene.count(2) == 1
    assert heartbeat / 2 < time.monotonic() - begun < 2.5 * heartbeat
    assert not any(map(alive, workers)), "the lost node's worker runs beside the next generation"
    network.mend(1)
    assert scene.count(3) == 2
    assert [finished(process) for process in started] == [0, 0], scene.output()
    assert [cause for cause, _ in scene.ends()] == [
        f"node 1 (10.77.0.2) is lost: it gave no sign of life for {heartbeat} s",
        "node 1 (10.77.0.2) joined: continuing with 2 processes",
        "finished",
    ]
    assert [scene.terminal(1).count(text) for text in ("the leader is gone", "no leader")] == [1, 1]


@NEEDS_MOUNTS
@pytest.mark.matrix
@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_a_run_is_the_undisturbed_one_on_a_bad_network(network: Network, tmp_path: Path, launched, family: str):
    """Collectives, states in memory and JAX's own service cross the link as well."""
    steps = 40
    expected = undisturbed(tmp_path, steps)
    job: Launched = launched(steps, delay=0.2)
    hosts = network.hosts if family == "IPv4" else network.hosts6
    head = f"{hosts[0]}:{PORT}" if family == "IPv4" else f"[{hosts[0]}]:{PORT}"
    common = ("node", "--nodes=2", "--processes=1", "--devices-per-process=1", "--memory=1", f"--coordinator={head}")
    nodes = []
    for index, host in enumerate(hosts):
        inside = (*network.inside(index), *Names(tmp_path / f"names-{index}", host).inside)  # gloo asks for its name
        nodes.append(job.start(*common, f"--node={index}", job.config, inside=inside))
    job.reaches(2)
    network.delay(0.2)
    job.reaches(max(losses(job.run)) + 1)
    network.delay(0.0)
    network.lose(0.3)
    time.sleep(5)
    network.lose(0.0)
    network.cut(1)
    time.sleep(3)
    network.mend(1)
    assert max(losses(job.run)) < steps, "it ended before its network was bad"
    assert [node.wait(240) for node in nodes] == [0, 0], job.terminal()
    job.as_expected(expected)
    assert [end["cause"] for end in job.events("end")] == ["finished"]
    counts = network.counts()
    assert counts["forwarded"] > 1000
    assert counts["dropped"] > 0
    assert "keeps no in-memory" not in job.terminal()
