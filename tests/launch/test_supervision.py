"""Launched jobs of fake workers: what ends a worker, a node, a leader or a connection, and who may connect."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

from fake_supervisor import FakeJob
from scene import Scene, alive, finished, led_here, until

from jaxtrain.io.authenticated import Session
from jaxtrain.launch import server
from jaxtrain.launch.leader import Leader
from jaxtrain.launch.leadership.state import StateFile
from jaxtrain.launch.server import LeaderServer, listen
from jaxtrain.launch.types import RestartPolicy


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
    with led_here(scene, "--heartbeat=4") as channel:
        while not channel.is_authenticated:
            channel.receive()
        start = {"generation": 1, "run": str(scene.folder), "address": "127.0.0.1:1", "processes": 1}
        start |= {"devices_per_process": 1, "is_simulated": True, "slots": [0], "ranks": [0], "memory_every": 0}
        channel.send("start", **start, memory_addresses=[], fence=0, revision=1)
        begun = time.monotonic()
        worker = scene.pid(1, 0)
        until(lambda: not alive(worker), "its workers live on")
        assert time.monotonic() - begun < 4


def test_without_its_leader_a_node_ends_its_workers_and_then_itself(scene: Scene):
    node = scene.nodes(2)
    first, second = node(0), node(1, "--join-timeout=10")
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
    monkeypatch.setattr(server, "MIN_PENDING", 1)
    shown: list[str] = []
    leader = Leader(FakeJob(tmp_path), RestartPolicy(nodes=0), clock=time.monotonic)
    listener = listen("127.0.0.1", 0)
    leader_server = LeaderServer(leader, listener, "a secret", StateFile(tmp_path, "job"), shown.append)
    address = listener.getsockname()
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
    first = node(0, "--join-timeout=8")
    other = node(1, "--join-timeout=6", JAXTRAIN_SECRET="a secret of another job")
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


def test_a_leader_that_is_killed_is_started_again_and_the_workers_go_on(scene: Scene):
    node = scene.nodes(3)
    started = [node(0), node(1), node(2)]
    workers = [scene.pid(1, rank) for rank in range(3)]
    for count in range(1, 4):
        os.kill(scene.leader(started[0]), signal.SIGKILL)
        until(lambda count=count: scene.terminal().count("goes on under a new leader") == count, scene.terminal())
        until(lambda count=count: scene.output().count("the leader is there again") == 3 * count, scene.output())
    assert all(map(alive, workers))
    assert not (scene.folder / "pid-2-0").exists()
    for index in range(3):
        assert scene.terminal(index).count("the workers of this node go on without it") == 3
    os.kill(workers[2], signal.SIGKILL)  # the adopted generation ends as any other
    assert scene.count(2) == 3
    scene.pid(2, 1), scene.pid(2, 2)
    started[1].terminate()
    assert [finished(process) for process in started] == [75, 75, 75], scene.terminal()
    assert scene.ends() == [
        (f"process 2 (pid {workers[2]}) was killed by signal 9", 137),
        ("node 1 received signal 15", 75),
    ]
    assert not (scene.folder / "leader.json").exists()


def test_what_happens_while_nobody_leads_is_told_to_the_next_leader(scene: Scene):
    node = scene.nodes(2)
    started = [node(0), node(1)]
    workers = [scene.pid(1, 0), scene.pid(1, 1)]
    os.kill(scene.leader(started[0]), signal.SIGKILL)
    os.kill(workers[1], signal.SIGKILL)
    assert scene.count(2) == 2
    assert scene.ends() == [(f"process 1 (pid {workers[1]}) was killed by signal 9", 137)]
    scene.pid(2, 1)
    os.kill(scene.leader(started[0]), signal.SIGKILL)
    started[1].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.terminal()


def test_a_leader_that_is_stopped_is_replaced(scene: Scene):
    node = scene.nodes(2)
    started = [node(0, "--heartbeat=6"), node(1, "--heartbeat=6")]
    workers = [scene.pid(1, 0), scene.pid(1, 1)]
    os.kill(scene.leader(started[0]), signal.SIGSTOP)
    until(lambda: "goes on under a new leader" in scene.terminal(), scene.terminal())
    assert "the leader gives no sign of life: starting it again" in scene.terminal()
    assert all(map(alive, workers))
    started[0].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.terminal()


def test_a_node_that_died_with_the_leader_is_found_missing(scene: Scene):
    """The generation ends, although the new leader has never heard of the lost node."""
    node = scene.nodes(3)
    started = [node(index, "--heartbeat=5") for index in range(3)]
    scene.pid(1, 2)
    os.kill(scene.leader(started[0]), signal.SIGKILL)
    started[2].kill()
    assert scene.count(2) == 2
    assert scene.ends() == [("node 2 is lost: it did not join the new leader within 5 s", 1)]
    started[0].terminate()
    assert [finished(process) for process in started[:2]] == [75, 75], scene.terminal()


def test_a_leader_that_never_works_ends_the_job(scene: Scene):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        process = scene.start("node", "x", "--nodes=1", "--node=0", f"--coordinator={address}", "--processes=1")
        assert finished(process) == 2
    assert f"the leader cannot listen on {address} (Address already in use)" in scene.terminal()


def test_an_agent_whose_place_is_taken_tries_now_and_then_and_ends(scene: Scene):
    node = scene.nodes(2)
    started = [node(0), node(1)]
    scene.pid(1, 0), scene.pid(1, 1)
    other = node(1, "--join-timeout=4")
    begun = time.process_time() + os.times().children_user
    assert finished(other) == 1
    assert os.times().children_user - begun < 3.0  # of its processor time: it does not spin
    assert "gone" not in scene.terminal(2)
    started[0].terminate()
    assert [finished(process) for process in started] == [75, 75]


def test_a_node_that_outlives_a_job_joins_the_next_one(scene: Scene):
    """Node 0 is lost when its leader had been started again; its command line is run again."""
    node = scene.nodes(2)
    first, second = node(0), node(1)
    scene.pid(1, 0), scene.pid(1, 1)
    os.kill(scene.leader(first), signal.SIGKILL)
    until(lambda: "goes on under a new leader" in scene.terminal(), scene.terminal())
    first.kill()
    first.wait(10)
    again = node(0)
    assert scene.count(2) == 2
    scene.pid(2, 1)
    second.terminate()
    assert [finished(process) for process in (again, second)] == [75, 75], scene.output()
