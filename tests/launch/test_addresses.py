"""Names that resolve late, ports that two jobs want, and IPv6."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from etcd_member import NEEDS_ETCD, start_etcd
from launched import free_address
from names import NEEDS_MOUNTS, Names
from scene import Scene, alive, finished, led_here, opened, until

from jaxtrain.distributed.etcd import EtcdStore

NAME = "head.a-job"


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")


def start(scene: Scene, coordinator: str, *arguments: str, inside: tuple[str, ...] = ()) -> list[subprocess.Popen]:
    given = ("node", "x", "--nodes=2", f"--coordinator={coordinator}", "--processes=1", "--backoff=0.01", *arguments)
    return [scene.start(*given, f"--node={index}", inside=inside) for index in range(2)]


@pytest.fixture
def other(tmp_path: Path):
    yield from opened(tmp_path / "other")


@NEEDS_MOUNTS
def test_a_name_that_does_not_resolve_yet_is_waited_for(scene: Scene, tmp_path: Path):
    scene.plan({"1": "exit 0"})
    names, port = Names(tmp_path / "names"), free_address().rpartition(":")[2]
    started = start(scene, f"{NAME}:{port}", inside=names.inside)
    waits = f"launch  waiting for the leader at {NAME}:{port} ("
    until(lambda: scene.output().count(waits) == 2, "nobody says that it waits")
    time.sleep(3)
    names.add(NAME, "127.0.0.1")
    assert scene.count(1) == 2
    assert [finished(process) for process in started] == [0, 0], scene.output()
    for index in range(2):
        assert scene.terminal(index).count(waits) == 1
        assert scene.terminal(index).count("the leader") == 1


@NEEDS_MOUNTS
def test_a_name_that_never_resolves_ends_the_job_in_two_lines(scene: Scene, tmp_path: Path):
    started = start(scene, f"{NAME}:29400", "--join-timeout=8", inside=Names(tmp_path / "names").inside)
    assert [finished(process) for process in started] == [1, 1], scene.output()
    for index in range(2):
        first, last = scene.terminal(index).splitlines()
        assert first.startswith(f"launch  waiting for the leader at {NAME}:29400 (")
        assert last.startswith(f"jaxtrain: launch: cannot reach the leader at {NAME}:29400 within 8 s (")


def test_a_job_whose_coordinator_is_anothers_ends_and_disturbs_nobody(scene: Scene, other: Scene):
    address = free_address()
    started = start(scene, address)
    workers = [scene.pid(1, rank) for rank in range(2)]
    late = start(other, address, "--join-timeout=6")
    assert [finished(process) for process in late] == [2, 1], other.output()
    assert other.terminal(0).splitlines() == [
        f"jaxtrain: launch: the leader cannot listen on {address} (Address already in use); "
        "expected an address of this node and a free port"
    ]
    assert "does not know the secret of this job" in other.terminal(1) or "launch.secret" in other.terminal(1)
    assert len(other.terminal(1).splitlines()) == 2
    assert all(map(alive, workers))
    started[0].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.output()
    assert scene.ends() == [("node 0 received signal 15", 75)]


def test_the_port_of_the_next_coordinator_is_nobody_elses(scene: Scene):
    """However long the job waits for its other nodes; JAX's service would share it with that of another job."""
    with led_here(scene) as channel:
        messages = []
        while not messages:
            messages = channel.receive()
        port = messages[0]["port"]
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("", port))
        socket.create_server(("", port)).close()  # which sets SO_REUSEADDR, as gRPC does


@needs_ipv6
def test_a_job_over_ipv6(scene: Scene):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        address = f"[::1]:{free.getsockname()[1]}"
    started = start(scene, address)
    worker = scene.pid(1, 1)
    environ = Path(f"/proc/{worker}/environ").read_text().split("\0")
    assert next(text for text in environ if text.startswith("JAX_COORDINATOR_ADDRESS=")).startswith(
        "JAX_COORDINATOR_ADDRESS=[::1]:"
    )
    os.kill(scene.leader(started[0]), signal.SIGKILL)
    until(lambda: "goes on under a new leader" in scene.terminal(), scene.terminal())
    scene.plan({"2": "exit 0"})
    os.kill(worker, signal.SIGKILL)
    assert [finished(process) for process in started] == [0, 0], scene.output()


@needs_ipv6
@NEEDS_ETCD
def test_a_job_over_ipv6_with_a_store(scene: Scene, tmp_path: Path):
    scene.plan({"1": "exit 0"})
    ports = [free_address().rpartition(":")[2] for _ in range(2)]
    etcd = start_etcd(tmp_path, "etcd", f"[::1]:{ports[0]}", f"[::1]:{ports[1]}")
    try:
        given = ("node", "x", "--nodes=2", f"--store=etcd://[::1]:{ports[0]}", "--processes=1", "--backoff=0.01")
        started = [scene.start(*given, f"--node={index}") for index in range(2)]
        assert [finished(process) for process in started] == [0, 0], scene.output()
        assert "the leader is at [::1]:" in scene.output()
        assert EtcdStore([f"[::1]:{ports[0]}"]).get(f"/jaxtrain{scene.folder}/generation") is not None
    finally:
        etcd.kill()
        etcd.wait(10)
