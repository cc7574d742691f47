"""Network of namespaces whose packets one process forwards, delays, loses and cuts on command. Linux, root.

Each namespace has a TUN device, so its packets arrive here whole, with their checksums, and there are no neighbours to
be found. `python packet_forwarder.py SEED NAMESPACE...` is the process: it reads commands as lines of JSON from stdin,
answers each one with a line, and ends with its stdin. `Network` starts it and gives the commands.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

DEVICE = "tun0"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MAX_PACKET = 1 << 16
BURST = 64  # packets that are read of one device before the others have their turn


@cache
def can_forward() -> bool:
    """Returns whether this process may make namespaces and TUN devices."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        return False
    name = f"jt{uuid.uuid4().hex[:8]}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "tuntap", "add", DEVICE, "mode", "tun")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return True


class Network:
    """Namespaces that reach each other through a forwarder, and only each other.

    Attributes:
        hosts: their IPv4 addresses.
        hosts6: their IPv6 addresses.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        name = uuid.uuid4().hex[:6]
        self.spaces = [f"jt{name}-{index}" for index in range(count)]
        self.hosts = [f"10.77.0.{index + 1}" for index in range(count)]
        self.hosts6 = [f"fd77::{index + 1}" for index in range(count)]
        for space in self.spaces:
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
        command = [sys.executable, __file__, str(seed), *self.spaces]
        self._forwarder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()
        for space, host, host6 in zip(self.spaces, self.hosts, self.hosts6):
            _ip("-n", space, "addr", "add", f"{host}/24", "dev", DEVICE)
            _ip("-n", space, "addr", "add", f"{host6}/64", "dev", DEVICE, "nodad")
            _ip("-n", space, "link", "set", DEVICE, "up")

    def inside(self, index: int) -> tuple[str, ...]:
        """Returns what begins the command line of a process inside of a namespace."""
        return ("ip", "netns", "exec", self.spaces[index])

    def delay(self, seconds: float) -> None:
        """Lets each packet arrive so much later."""
        self._command(delay=seconds)

    def lose(self, share: float) -> None:
        """Drops a share of the packets, chosen by the seed."""
        self._command(loss=share)

    def cut(self, index: int) -> None:
        """Drops all packets from and to a namespace, those on their way too."""
        self._command(cut=index)

    def mend(self, index: int) -> None:
        """Ends a cut."""
        self._command(mend=index)

    def counts(self) -> dict[str, int]:
        """Returns the numbers of packets that were forwarded and dropped."""
        return self._command()

    def close(self) -> None:
        """Ends the forwarder and deletes the namespaces. What runs in them must have ended."""
        self._forwarder.kill()
        self._forwarder.communicate()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True)

    def _command(self, **command: Any) -> dict[str, int]:
        assert self._forwarder.stdin is not None
        self._forwarder.stdin.write(json.dumps(command) + "\n")
        self._forwarder.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, int]:
        assert self._forwarder.stdout is not None
        return json.loads(self._forwarder.stdout.readline())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Forwarder:
    """State of the process.

    Args:
        devices: descriptors of the TUN devices, by index of the namespace.
        random: chooses the packets that are lost.
    """

    devices: Sequence[int]
    random: random.Random
    delay: float = 0.0
    loss: float = 0.0
    cuts: set[int] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: {"forwarded": 0, "dropped": 0})
    waiting: list[tuple[float, int, int, int, bytes]] = field(default_factory=list)  # due, number, from, to, packet

    def run(self) -> None:
        """Forwards until stdin ends."""
        poll, commands = select.poll(), b""
        for descriptor in (0, *self.devices):
            poll.register(descriptor, select.POLLIN)
        print(json.dumps(self.counts), flush=True)
        while True:
            wait = 1000.0 * (self.waiting[0][0] - time.monotonic()) if self.waiting else 1000.0
            for descriptor, _ in poll.poll(max(wait, 0.0)):
                if descriptor:
                    self._read(self.devices.index(descriptor))
                    continue
                read = os.read(0, MAX_PACKET)
                if not read:
                    return
                *lines, commands = (commands + read).split(b"\n")
                for line in lines:
                    self._obey(**json.loads(line))
                    print(json.dumps(self.counts), flush=True)
            self._write_due()

    def _obey(
        self, delay: float | None = None, loss: float | None = None, cut: int | None = None, mend: int | None = None
    ) -> None:
        self.delay = self.delay if delay is None else delay
        self.loss = self.loss if loss is None else loss
        self.cuts = (self.cuts | {cut}) - {mend, None}

    def _read(self, source: int) -> None:
        for _ in range(BURST):
            try:
                packet = os.read(self.devices[source], MAX_PACKET)
            except BlockingIOError:
                return
            target = _target(packet)
            if target is None or not 0 <= target < len(self.devices):
                continue  # multicast, such as a search for routers
            if self.random.random() < self.loss:
                self.counts["dropped"] += 1
                continue
            self.counts["forwarded"] += 1
            heapq.heappush(
                self.waiting, (time.monotonic() + self.delay, self.counts["forwarded"], source, target, packet)
            )

    def _write_due(self) -> None:
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, _, source, target, packet = heapq.heappop(self.waiting)
            if self.cuts & {source, target}:
                self.counts["dropped"] += 1
                continue
            try:
                os.write(self.devices[target], packet)
            except OSError:
                self.counts["dropped"] += 1  # the device is not up yet


def _target(packet: bytes) -> int | None:
    """Returns the index of the namespace to which a packet goes, by its address; None for a multicast."""
    version = packet[0] >> 4
    if version == 4:
        return packet[19] - 1 if packet[16:19] == bytes((10, 77, 0)) else None
    return packet[39] - 1 if packet[24:26] == bytes((0xFD, 0x77)) else None


def _open_device(space: str) -> int:
    """Makes the TUN device of a namespace, which lives as long as its descriptor."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{space}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


if __name__ == "__main__":
    Forwarder([_open_device(space) for space in sys.argv[2:]], random.Random(int(sys.argv[1]))).run()
