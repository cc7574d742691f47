"""Supervisors and agents as real processes, with fake workers that crash, hang and are killed on request."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_supervisor import FakeJob

from jaxtrain.io.authenticated import Session
from jaxtrain.launch import server
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.protocol import Channel
from jaxtrain.launch.server import LeaderServer
from jaxtrain.launch.types import RestartPolicy

FAKE = Path(__file__).with_name("fake_supervisor.py")
PATIENCE = 60.0


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Scene:
    """A folder in the place of RUN_DIR, and the supervisors started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen] = []
        self.plan({})

    def plan(self, actions: dict[str, str]) -> None:
        (self.folder / "plan.json").write_text(json.dumps(actions))

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen:
        command = [sys.executable, str(FAKE), str(self.folder), *arguments]
        out = open(self.folder / f"terminal-{len(self.started)}", "wb")  # noqa: SIM115
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ | environ)
        out.close()
        self.started.append(process)
        return process

    def local(self, *arguments: str) -> subprocess.Popen:
        return self.start("local", "x", "--backoff=0.01", *arguments)

    def nodes(self, count: int) -> Callable[..., subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        given = ("node", "x", f"--nodes={count}", f"--coordinator={address}", "--processes=1", "--backoff=0.01")
        return lambda node, *more, **environ: self.start(*given, f"--node={node}", *more, **environ)

    def pids(self) -> list[int]:
        return [int(path.read_text().split()[0]) for path in self.folder.glob("pid-*")]

    def pid(self, generation: int, rank: int) -> int:
        path = self.folder / f"pid-{generation}-{rank}"
        until(lambda: path.exists() and path.read_text() != "", f"no worker {rank} in generation {generation}")
        return int(path.read_text().split()[0])

    def count(self, generation: int) -> int:
        """Processes of a generation, as its first worker was told."""
        self.pid(generation, 0)
        return int((self.folder / f"pid-{generation}-0").read_text().split()[1])

    def terminal(self, index: int = 0) -> str:
        return (self.folder / f"terminal-{index}").read_text()

    def ends(self) -> list[tuple[str, int]]:
        lines = (self.folder / "launch.jsonl").read_text().splitlines()
        return [(r["cause"], r["code"]) for r in map(json.loads, lines) if r["kind"] == "end"]

    def gone(self) -> bool:
        return not any(map(alive, self.pids()))


@pytest.fixture
def scene(tmp_path: Path):
    scene = Scene(tmp_path)
    yield scene
    for process in scene.started:
        process.kill()
        process.wait(10)
    until(scene.gone, "workers outlive their supervisor")


def finished(process: subprocess.Popen) -> int:
    return process.wait(PATIENCE)


def test_what_ends_a_worker_ends_the_generation_and_the_last_code_is_passed_on(scene: Scene):
    scene.plan({"1.1": "kill", "2.0": "exit 70", "3.1": "raise", "4": "exit 0"})
    assert finished(scene.local("--processes=2")) == 0, scene.terminal()
    killed = scene.pid(1, 1)
    assert scene.ends() == [
        (f"process 1 (pid {killed}) was killed by signal 9", 137),
        (f"process 0 (pid {scene.pid(2, 0)}) was hung (exit code 70)", 70),
        (f"process 1 (pid {scene.pid(3, 1)}) failed with exit code 1", 1),
        ("finished", 0),
    ]
    assert scene.gone()
    assert (scene.folder / "logs" / "2-1.log").read_text() == "worker 1 of generation 2\n"
    said = scene.terminal().splitlines()
    assert "worker 0 of generation 4" in said
    assert "[1] KeyError: 'of a worker'" in said
    assert not any("worker 1" in line for line in said)
    assert f"process 1 (pid {killed}) was killed by signal 9" in scene.terminal()


def test_bad_input_is_passed_on_at_once(scene: Scene):
    scene.plan({"1.1": "exit 2"})
    assert finished(scene.local("--processes=2")) == 2
    assert len(scene.ends()) == 1


def test_it_gives_up_with_the_workers_code(scene: Scene):
    scene.plan(dict.fromkeys("123", "exit 7"))
    assert finished(scene.local("--processes=1", "--max-restarts=2")) == 7
    assert len(scene.ends()) == 3


def test_workers_die_with_their_supervisor(scene: Scene):
    process = scene.local("--processes=2")
    pids = [scene.pid(1, 0), scene.pid(1, 1)]
    process.kill()
    process.wait(10)
    until(lambda: not any(map(alive, pids)), "orphans")


def test_a_signal_saves_and_a_second_one_does_not_wait(scene: Scene):
    process = scene.local("--processes=2")
    scene.pid(1, 1), scene.pid(1, 0)
    process.send_signal(signal.SIGTERM)
    assert finished(process) == 75
    assert scene.ends() == [("signal 15", 75)]
    scene.plan({"2": "stubborn"})  # generations go on counting
    process = scene.local("--processes=2")
    scene.pid(2, 1), scene.pid(2, 0)
    process.send_signal(signal.SIGINT)
    until(lambda: "saving" in scene.terminal(1), "the signal was not passed on")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert finished(process) == 130
    assert time.monotonic() - begun < 5
    assert scene.gone()


def test_a_signal_to_one_worker_ends_the_job(scene: Scene):
    process = scene.local("--processes=1")
    os.kill(scene.pid(1, 0), signal.SIGTERM)
    assert finished(process) == 75


def test_a_lost_node_shrinks_the_job_and_one_that_joins_makes_it_larger(scene: Scene):
    scene.plan({"4": "exit 0"})
    node = scene.nodes(2)
    first, second = node(0), node(1)
    assert scene.count(1) == 2
    worker = scene.pid(1, 1)
    second.kill()
    assert scene.count(2) == 1
    until(lambda: not alive(worker), "the worker of a killed agent lives on")
    third = node(1)
    assert scene.count(3) == 2
    os.kill(scene.pid(3, 1), signal.SIGKILL)
    assert (finished(first), finished(third)) == (0, 0), scene.terminal()
    causes = [cause for cause, _ in scene.ends()]
    assert causes[0] == "node 1 (127.0.0.1) is lost: it closed its connection"
    assert causes[1] == "node 1 (127.0.0.1) joined: continuing with 2 processes"


def test_a_node_that_is_not_heard_of_is_done_without_and_comes_back(scene: Scene):
    scene.plan({"3": "exit 0"})
    node = scene.nodes(2)
    first, second = node(0, "--heartbeat=1.5"), node(1, "--heartbeat=1.5")
    worker = scene.pid(1, 1)
    assert scene.count(1) == 2
    second.send_signal(signal.SIGSTOP)
    assert scene.count(2) == 1
    second.send_signal(signal.SIGCONT)
    until(lambda: not alive(worker), "the worker of a node that was given up lives on")
    assert scene.count(3) == 2
    assert (finished(first), finished(second)) == (0, 0), scene.terminal()
    assert scene.ends()[0][0] == "node 1 (127.0.0.1) is lost: it gave no sign of life for 1.5 s"


def test_a_node_that_hears_nothing_ends_its_workers_before_the_leader_goes_on(scene: Scene):
    """The network is gone and no connection is closed: here is a leader that says nothing after its first word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        scene.start("node", "x", "--nodes=2", "--node=1", f"--coordinator={address}", "--processes=1", "--heartbeat=4")
        connection, _ = silent.accept()
        secret = "a secret that is known here"
        (scene.folder / "launch.secret").write_text(secret)
        with connection:
            channel = Channel(connection, secret, is_server=True)
            while not channel.is_authenticated:
                channel.receive()
            start = {"generation": 1, "run": str(scene.folder), "address": "127.0.0.1:1", "processes": 1}
            start |= {"devices_per_process": 1, "is_simulated": True, "slots": [0], "ranks": [0], "memory_every": 0}
            channel.send("start", **start, memory_addresses=[])
            begun = time.monotonic()
            worker = scene.pid(1, 0)
            until(lambda: not alive(worker), "its workers live on")
            assert time.monotonic() - begun < 4


def test_without_its_leader_a_node_ends_its_workers_and_then_itself(scene: Scene):
    node = scene.nodes(2)
    first, second = node(0), node(1, "--join-timeout=1")
    workers = [scene.pid(1, 0), scene.pid(1, 1)]
    first.kill()
    until(lambda: not any(map(alive, workers)), "workers outlive the leader")
    assert finished(second) == 1
    assert "the leader at 127.0.0.1:" in scene.terminal(1)


def test_a_stranger_is_no_agent(scene: Scene):
    scene.plan({"1": "exit 0"})
    node = scene.nodes(2)
    first = node(0)
    until(lambda: (scene.folder / "launch.jsonl").exists(), "no leader")
    port = int(first.args[first.args.index("x") + 2].rpartition(":")[2])
    until(lambda: (scene.folder / "launch.secret").exists(), "no secret")
    assert (scene.folder / "launch.secret").stat().st_mode & 0o777 == 0o600
    silent = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
    hello = Session("a secret of another job", "launch", is_server=False).outgoing()
    for data in (b"GET / HTTP/1.1\r\n" * 3, b'{"kind":"heartbeat"}\n' * 3, b"x" * (1 << 17), hello + bytes(32)):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            try:
                stranger.sendall(data)
                while stranger.recv(100):
                    pass
            except ConnectionError:
                pass
    second = node(1)
    assert (finished(first), finished(second)) == (0, 0), scene.terminal()
    assert scene.terminal().count("a connection from 127.0.0.1 is refused") == 1
    assert not (scene.folder / "launch.secret").exists()
    for stranger in silent:
        stranger.close()


def test_a_stranger_that_gives_way_in_the_round_in_which_it_speaks_ends_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(server, "MAX_PENDING", 1)
    shown: list[str] = []
    leader = Leader(FakeJob(tmp_path), RestartPolicy(), clock=time.monotonic)
    leader_server = LeaderServer(leader, "127.0.0.1", 0, "a secret", shown.append)
    address = ("127.0.0.1", leader_server.port)
    with socket.create_connection(address) as first, socket.create_connection(address):
        leader_server._accept()
        (channel,) = leader_server._pending
        first.sendall(b"x" * 100)
        leader_server._accept()  # the other takes its place
        leader_server._receive(channel)  # of which the selector has told in the same round
        assert channel not in leader_server._pending
        assert len(leader_server._pending) == 1
    assert len(shown) == 1


def test_an_agent_with_another_secret_does_not_join_and_says_so(scene: Scene):
    node = scene.nodes(2)
    first = node(0, "--join-timeout=2")
    other = node(1, "--join-timeout=1", JAXTRAIN_SECRET="a secret of another job")
    assert finished(other) == 1
    assert "the other side does not know the secret of this job" in scene.terminal(1)
    assert scene.count(1) == 1  # it begins without the other
    assert scene.terminal().count("is refused (") == 1
    first.terminate()
    assert finished(first) == 75


def test_the_secret_of_the_environment_is_in_no_file(scene: Scene):
    scene.plan({"1": "exit 0"})
    node = scene.nodes(2)
    secret = "a secret from outside"
    started = [node(index, JAXTRAIN_SECRET=secret) for index in range(2)]
    assert [finished(process) for process in started] == [0, 0], scene.terminal()
    assert not (scene.folder / "launch.secret").exists()
    assert not [path for path in scene.folder.rglob("*") if path.is_file() and secret in path.read_text()]
    assert finished(node(0, JAXTRAIN_SECRET="short")) != 0
    assert "JAXTRAIN_SECRET: 5 characters; expected at least 16" in scene.terminal(2)
