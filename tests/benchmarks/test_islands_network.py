"""Links of benchmarks/islands_network.py that lose packets, and that are cut."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from benchmark_modules import load_benchmark

PACKETS = 2000
# A filter that lets all pass, in a network of its own: whether the kernel has them, not whether ours are right.
FILTER = "tc qdisc add dev lo clsact && tc filter add dev lo ingress bpf da bytecode '1,6 0 0 4294967295'"
TRY_FILTER = ("sh", "-c", FILTER)
RECEIVE = """
import socket
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 24)  # SO_RCVBUFFORCE: a slow receiver drops nothing
receiver.bind(("0.0.0.0", 5000))
print("ready", flush=True)
count = 0
while receiver.recv(100) != b"end":
    count += 1
print(count)
"""
SEND = """
import socket, sys, time
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for index in range(int(sys.argv[2])):
    sender.sendto(b"x", (sys.argv[1], 5000))
    if index % 50 == 49:
        time.sleep(0.002)
"""


@pytest.fixture
def module() -> ModuleType:
    return load_benchmark("islands_network")


@pytest.fixture
def net(module: ModuleType) -> Iterator[Any]:
    """A head and two islands, without Ray."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter", "unshare"))):
        pytest.skip("needs root and iproute2")
    if subprocess.run(["unshare", "--net", "--pid", "--mount", "--fork", *TRY_FILTER], capture_output=True).returncode:
        pytest.skip("needs namespaces, and a kernel whose tc has filters")
    made = module.Network(2, {})
    try:
        know_each_other([made.head, *made.islands])
        yield made
    finally:
        made.close()


def know_each_other(machines: list[Any]) -> None:
    """Tells each the hardware addresses of the others, so that no search for them is lost, for which packets wait."""
    for machine in machines:
        (link,) = json.loads(machine.network("ip", "-j", "link", "show", "eth0"))
        for other in machines:
            if other is not machine:
                known = f"{machine.address} lladdr {link['address']} dev eth0 nud permanent"
                other.network("ip", "neighbour", "replace", *known.split())


def arrived(sender: Any, receiver: Any) -> int:
    """How many packets arrive; the last word is said on the receiver's own machine."""
    line = receiver.inside(sys.executable, "-c", RECEIVE)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    subprocess.run(sender.inside(sys.executable, "-c", SEND, receiver.address, str(PACKETS)), check=True)
    last = "import socket; socket.socket(2, 2).sendto(b'end', ('127.0.0.1', 5000))"
    subprocess.run(receiver.inside(sys.executable, "-c", last), check=True)
    return int(process.communicate(timeout=60)[0])


@pytest.mark.measures
def test_links_lose_a_share_of_the_packets_and_are_cut(net: Any) -> None:
    first, second = net.islands
    assert arrived(first, net.head) == PACKETS
    net.lose(0.2)
    assert arrived(first, net.head) == pytest.approx(0.8 * PACKETS, rel=0.1)  # 6 standard deviations are 7%
    assert arrived(first, second) == pytest.approx(0.64 * PACKETS, rel=0.12)  # of both links
    net.lose(1.0, 1)
    assert arrived(first, second) == arrived(second, net.head) == 0
    net.lose(0.0)
    assert arrived(second, net.head) == PACKETS


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_filter_drops_when_a_random_number_is_below_the_share(module: ModuleType, share: float) -> None:
    """Instructions are (code, to jump if true, if false, operand): load, jump if not below, drop, pass."""
    count, *lines = module.drop_program(share).split(",")
    code = [tuple(map(int, line.split())) for line in lines]
    assert len(code) == int(count) == 4
    assert code[1] == (0x35, 1, 0, round(share * 2**32))
    assert [line[3] for line in code[2:]] == [2, 2**32 - 1]  # TC_ACT_SHOT, TC_ACT_UNSPEC
    assert module.drop_program(1.0) == "1,6 0 0 2"
