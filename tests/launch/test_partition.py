"""Three nodes in network namespaces, each with a member of etcd: one is cut off, and comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from pathlib import Path

import pytest
from etcd_member import NEEDS_ETCD, start_etcd
from scene import Scene, finished, until

NODES = 3


def has_namespaces() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"jaxtrain-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


pytestmark = [
    NEEDS_ETCD,
    pytest.mark.skipif(not has_namespaces(), reason="needs root and network namespaces"),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Namespaces on one bridge, which is in a namespace of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, uuid.uuid4().hex[:6]
        self.spaces = [f"jt{self.name}-{index}" for index in range(NODES)]
        self.hosts = [f"10.77.0.{index + 1}" for index in range(NODES)]
        self.processes: list[subprocess.Popen] = []
        self.bridge = f"jt{self.name}-br"
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge", "up")
        for index, space in enumerate(self.spaces):
            ip("netns", "add", space)
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", f"port{index}", "netns", self.bridge)
            ip("-n", self.bridge, "link", "set", f"port{index}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{self.hosts[index]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def inside(self, index: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.spaces[index])

    def cut(self, index: int) -> None:
        ip("-n", self.bridge, "link", "set", f"port{index}", "down")

    def mend(self, index: int) -> None:
        ip("-n", self.bridge, "link", "set", f"port{index}", "up")

    def start_etcd(self) -> None:
        cluster = ",".join(f"n{index}=http://{host}:2380" for index, host in enumerate(self.hosts))
        for index, host in enumerate(self.hosts):
            member = self.folder, f"n{index}", f"{host}:2379", f"{host}:2380", cluster, self.inside(index)
            self.processes.append(start_etcd(*member))

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10)
        for space in [*self.spaces, self.bridge]:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)


@pytest.fixture
def network(tmp_path: Path):
    network = Network(tmp_path)
    yield network
    network.close()


def saves(scene: Scene, generation: int) -> list[tuple[float, str]]:
    path = scene.folder / f"saves-{generation}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(line.split()[0]), line.split()[1]) for line in lines]


def test_the_node_that_leads_and_saves_is_cut_off_and_comes_back(scene: Scene, network: Network):
    scene.plan({"1": "save", "2": "save", "3": "save"})
    network.start_etcd()
    url = "etcd://" + ",".join(f"{host}:2379" for host in network.hosts)
    given = ("node", "x", f"--nodes={NODES}", f"--store={url}", "--processes=1", "--backoff=0.01", "--heartbeat=5")
    # Node 0 alone can lead and gets rank 0, because the others come later.
    started = [scene.start(*given, "--node=0", "--host", network.hosts[0], inside=network.inside(0))]
    until(lambda: "the leader is at" in scene.terminal(0), "nobody leads")
    started += [
        scene.start(*given, f"--node={index}", "--host", network.hosts[index], inside=network.inside(index))
        for index in range(1, NODES)
    ]
    until(lambda: sum(result == "counts" for _, result in saves(scene, 1)) > 3, "generation 1 saves nothing")
    network.cut(0)
    until(lambda: any(result == "counts" for _, result in saves(scene, 2)), "generation 2 saves nothing")
    assert scene.count(2) == 2
    begun = min(when for when, result in saves(scene, 2) if result == "counts")
    time.sleep(2)
    assert all(when < begun for when, result in saves(scene, 1) if result == "counts")
    network.mend(0)
    assert scene.count(3) == 3  # node 0 has ended its worker, and follows
    assert all(when < begun for when, result in saves(scene, 1) if result == "counts")
    until(lambda: any(result == "counts" for _, result in saves(scene, 3)), "generation 3 saves nothing")
    started[2].terminate()
    assert [finished(process) for process in started] == [75, 75, 75], scene.output()
