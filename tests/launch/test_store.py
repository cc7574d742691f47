"""Jobs that any node may lead, with a real etcd: lost nodes, stopped leaders, a store that is gone for a while."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from etcd_member import NEEDS_ETCD, Etcd
from launched import losses, undisturbed
from scene import Scene, alive, finished, until

from jaxtrain.distributed.etcd import EtcdStore

pytestmark = NEEDS_ETCD


def start(scene: Scene, etcd: Etcd, count: int, *arguments: str) -> list[subprocess.Popen]:
    given = ("node", "x", f"--nodes={count}", f"--store=etcd://{etcd.address}", "--processes=1", "--backoff=0.01")
    return [scene.start(*given, f"--node={node}", "--heartbeat=6", *arguments) for node in range(count)]


def leading(scene: Scene, started: list[subprocess.Popen], etcd: Etcd) -> int:
    """Index of the node that leads, by the port of the leader in the store."""
    found: list[int] = []

    def is_found() -> bool:
        value = EtcdStore([etcd.address]).get(f"/jaxtrain{scene.folder}/leader")
        if value is None:
            return False
        port = json.loads(value.value)[1]
        for index, process in enumerate(started):
            if process.poll() is None and port in listening_ports(scene.leader(process)):
                found.append(index)
        return bool(found)

    until(is_found, "nobody leads")
    return found[-1]


def listening_ports(pid: int) -> set[int]:
    inodes = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if os.path.lexists(f)}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}


def test_a_lost_node_that_led_is_followed_by_another_one(scene: Scene, etcd: Etcd):
    started = start(scene, etcd, 3)
    workers = [scene.pid(1, rank) for rank in range(3)]
    first = leading(scene, started, etcd)
    started[first].kill()
    assert scene.count(2) == 2
    assert not any(map(alive, workers))
    second = leading(scene, started, etcd)
    assert second != first
    rest = [process for process in started if process is not started[first]]
    rest[0].terminate()
    assert [finished(process) for process in rest] == [75, 75], scene.terminal(second)
    cause, code = scene.ends()[0]
    assert (cause.split(":")[0].split(" (")[0].removesuffix(" is lost"), code) == (f"node {first}", 1)
    assert (scene.folder / "launch.secret").stat().st_mode & 0o777 == 0o600
    assert not list(scene.folder.glob("launch.secret.*"))


def test_workers_go_on_when_only_their_leader_is_lost(scene: Scene, etcd: Etcd):
    started = start(scene, etcd, 3)
    workers = [scene.pid(1, rank) for rank in range(3)]
    for count in range(1, 3):
        os.kill(scene.leader(started[leading(scene, started, etcd)]), signal.SIGKILL)
        until(lambda count=count: scene.output().count("goes on under a new leader") == count, "no adoption")
    assert all(map(alive, workers))
    started[0].terminate()
    assert [finished(process) for process in started] == [75, 75, 75], scene.output()


def test_a_node_that_led_and_was_stopped_wakes_as_a_follower(scene: Scene, etcd: Etcd):
    """Its leader, agent and worker are stopped: they are deposed, and nothing that they say then has an effect."""
    started = start(scene, etcd, 3)
    scene.pid(1, 2)
    first = leading(scene, started, etcd)
    stopped = [started[first].pid, scene.leader(started[first]), scene.pid(1, first)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    assert scene.count(2) == 2
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    assert scene.count(3) == 3  # its agent has joined the new leader
    assert not alive(stopped[2])
    assert "leads no more" in scene.terminal(first)
    started[first].terminate()
    assert [finished(process) for process in started] == [75, 75, 75], scene.output()


def test_workers_go_on_while_the_store_is_gone(scene: Scene, etcd: Etcd):
    started = start(scene, etcd, 2)
    workers = [scene.pid(1, rank) for rank in range(2)]
    etcd.process.send_signal(signal.SIGSTOP)
    until(lambda: "leads no more" in scene.output(), "a leader without its store leads on")
    time.sleep(3)
    assert all(map(alive, workers))
    etcd.process.send_signal(signal.SIGCONT)
    until(lambda: "goes on under a new leader" in scene.output(), "no adoption")
    assert all(map(alive, workers))
    scene.plan({"2": "exit 0"})
    os.kill(workers[0], signal.SIGKILL)
    assert [finished(process) for process in started] == [0, 0], scene.output()


def test_the_same_lines_again_begin_the_next_job(scene: Scene, etcd: Etcd):
    started = start(scene, etcd, 2)
    scene.pid(1, 1)
    started[1].terminate()
    assert [finished(process) for process in started] == [75, 75], scene.output()
    started = start(scene, etcd, 2)
    scene.pid(2, 1)
    for process in started:  # all of it is killed
        process.kill()
    started = start(scene, etcd, 2)
    found: list[int] = []

    def has_both() -> bool:  # on a busy machine the third one may begin with the node that is there first
        found.extend(int(path.name.split("-")[1]) for path in scene.folder.glob("pid-*-1"))
        return max(found) > 2

    until(has_both, "no generation of both nodes")
    scene.plan({str(max(found) + 1): "exit 0"})
    os.kill(scene.pid(max(found), 0), signal.SIGKILL)
    assert [finished(process) for process in started] == [0, 0], scene.output()


def test_a_run_outlives_the_node_that_led_and_saved(tmp_path: Path, etcd: Etcd, launched):
    """The second node goes on from the newest checkpoint that counts, with the losses of an undisturbed run."""
    steps = 14
    expected = undisturbed(tmp_path, steps)
    job = launched(steps, delay=0.1)
    common = ("node", "--nodes=2", f"--store=etcd://{etcd.address}", "--processes=1", "--devices-per-process=2")
    nodes = [job.start(*common, job.config, f"--node={index}", "--heartbeat=6") for index in range(2)]
    store, key = EtcdStore([etcd.address]), f"/jaxtrain{job.run}/saved"

    def saved() -> int:
        found = store.get(key)
        return json.loads(found.value)[0] if found else 0

    job.until(lambda: saved() >= 6, "no checkpoint of step 6 counts")
    job.watched = nodes[1]
    nodes[0].kill()
    assert nodes[1].wait(240) == 0, job.terminal()
    job.as_expected(expected)
    assert [start["mesh"] for start in job.events("start")] == ["fsdp 4", "fsdp 2"]
    assert job.events("end")[0]["step"] >= 6
    assert max(losses(job.run)) == steps
    found = store.get(key)
    assert found is not None
    assert json.loads(found.value) == [steps, f"{steps}.generation-2"]
