"""Three nodes in network namespaces, each with a member of etcd: one is cut off, and comes back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_member import NEEDS_ETCD, start_etcd
from packet_forwarder import Network, can_forward
from scene import Scene, finished, until

NODES = 3

pytestmark = [
    NEEDS_ETCD,
    pytest.mark.skipif(not can_forward(), reason="needs root, network namespaces and TUN devices"),
]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """Network with a member of etcd at each host."""
    network, members = Network(NODES), list[subprocess.Popen]()
    cluster = ",".join(f"n{index}=http://{host}:2380" for index, host in enumerate(network.hosts))
    for index, host in enumerate(network.hosts):
        addresses = f"{host}:2379", f"{host}:2380"
        members.append(start_etcd(tmp_path, f"n{index}", *addresses, cluster, network.inside(index)))
    yield network
    for member in members:
        member.kill()
        member.wait(10)
    network.close()


def saves(scene: Scene, generation: int) -> list[tuple[float, str]]:
    path = scene.folder / f"saves-{generation}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(float(line.split()[0]), line.split()[1]) for line in lines]


def test_the_node_that_leads_and_saves_is_cut_off_and_comes_back(network: Network, scene: Scene):
    scene.plan({"1": "save", "2": "save", "3": "save"})
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
