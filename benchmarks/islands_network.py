"""Machines of benchmarks/islands.py: namespaces of this one with a Ray node each, and the links between them.

A machine has its own network, processes, /dev/shm and /tmp/ray, so that a Ray driver on it finds the Ray node of its
machine alone, and objects travel between nodes over TCP. The namespaces have no names and the bridge is in that of the
head, so that nothing is left when their first processes are gone, which the kernel kills with this one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEAD = "10.77.0.1"
PORT = 6379
STORE = {"head": 768 << 20, "island": 256 << 20}  # bytes of the stores of objects
WAIT = 120.0  # seconds for a Ray node
BURST, LATENCY = "256kb", "50ms"  # of the limit
# The first process of a machine: it has no children to wait for, so that the kernel removes those that end.
FIRST = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
MOUNTS = "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp/ray"
ACTORS = {"coordinator": "ray::Coordinator", "servers": "ray::ServerProcess"}


class Machine:
    """Namespaces with a first process.

    Args:
        address: of the machine in the network.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        Path("/tmp/ray").mkdir(exist_ok=True)  # the place of a mount that others do not see
        command = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "sh", "-c"]
        command.append(f'{MOUNTS} && exec "$0" -c "$1"')
        self._process = subprocess.Popen(
            [*command, sys.executable, FIRST], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("no namespaces: expected root, and a kernel that has them")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        self.first = int(children.split()[0])
        self._space = os.readlink(f"/proc/{self.first}/ns/pid")

    def inside(self, *command: str) -> list[str]:
        """Command line of a command on the machine."""
        return ["nsenter", f"--target={self.first}", "--net", "--pid", "--mount", "--", *command]

    def network(self, *command: str) -> str:
        """Runs a command in the network of the machine, else on this one; returns its output."""
        line = ["nsenter", f"--target={self.first}", "--net", "--", *command]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout

    def processes(self) -> list[int]:
        """Processes of the machine."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{name}/ns/pid") == self._space:
                    found.append(int(name))
        return found

    def close(self) -> None:
        """Ends all processes of the machine, with which its network goes."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.first, signal.SIGKILL)
        self._process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


class Network:
    """A head and islands at a bridge, each island by a link.

    Args:
        islands: their number.
        environment: of all processes of Ray and of the islands.
    """

    def __init__(self, islands: int, environment: dict[str, str]) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = os.environ | environment | token
        self.head = Machine(HEAD)
        self.islands: list[Machine] = []
        self.head.network("ip", "link", "set", "lo", "up")
        self.head.network("ip", "link", "add", "bridge", "type", "bridge")
        self.head.network("ip", "address", "add", f"{HEAD}/24", "dev", "bridge")
        self.head.network("ip", "link", "set", "bridge", "up")
        for index in range(islands):
            self.islands.append(self._joined(index))

    def _joined(self, index: int) -> Machine:
        machine = Machine(f"10.77.0.{10 + index}")
        ends = f"link{index} type veth peer name eth0 netns {machine.first}".split()
        self.head.network("ip", "link", "add", *ends)
        self.head.network("ip", "link", "set", f"link{index}", "master", "bridge", "up")
        machine.network("ip", "address", "add", f"{machine.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            machine.network("ip", "link", "set", device, "up")
        return machine

    def limit(self, mbit: float | None) -> None:
        """Limits each link to a speed, in both directions; None: no limit."""
        for index, island in enumerate(self.islands):
            for machine, device in ((self.head, f"link{index}"), (island, "eth0")):
                if mbit is not None:
                    rate = f"rate {mbit}mbit burst {BURST} latency {LATENCY}".split()
                    machine.network("tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)
                else:
                    with contextlib.suppress(subprocess.CalledProcessError):  # there was none
                        machine.network("tc", "qdisc", "delete", "dev", device, "root")

    def start_ray(self) -> float:
        """Starts a Ray node on each machine; returns the seconds of that."""
        begun = time.monotonic()
        common = ["--num-gpus=0", "--disable-usage-stats"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--object-store-memory={STORE['head']}"]
        self._ray(self.head, *head, "--num-cpus=4", *common)
        for island in self.islands:
            store = f"--object-store-memory={STORE['island']}"
            self._ray(island, f"--address={HEAD}:{PORT}", "--num-cpus=1", store, *common)
        return time.monotonic() - begun

    def _ray(self, machine: Machine, *options: str) -> None:
        line = machine.inside(str(Path(sys.executable).parent / "ray"), "start", f"--node-ip-address={machine.address}")
        done = subprocess.run(
            [*line, *options], env=self.env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT
        )
        if done.returncode:
            raise RuntimeError(f"ray start on {machine.address}: {(done.stderr or done.stdout)[-1500:]}")

    def start(self, index: int, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        """Starts a process on the machine of an island."""
        with output.open("wb") as file:
            line = self.islands[index].inside(*command)
            return subprocess.Popen(line, env=self.env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT)

    def sent(self) -> list[tuple[int, int]]:
        """Bytes that each island has sent over its link, and received."""
        links = {link["ifname"]: link["stats64"] for link in json.loads(self.head.network("ip", "-s", "-j", "link"))}
        ends = [links[f"link{index}"] for index in range(len(self.islands))]
        return [(end["rx"]["bytes"], end["tx"]["bytes"]) for end in ends]  # of the head's end

    def head_seconds(self) -> dict[str, float]:
        """Processor seconds of the processes of the head: coordinator, servers, and Ray."""
        seconds = dict.fromkeys((*ACTORS, "ray"), 0.0)
        for process in self.head.processes():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{process}/cmdline").read_text(errors="replace")
                part = next((part for part, name in ACTORS.items() if line.startswith(name)), "ray")
                seconds[part] += cpu_seconds(process)
        return seconds

    def close(self) -> None:
        """Ends everything."""
        for machine in (*self.islands, self.head):
            machine.close()


def cpu_seconds(process: int) -> float:
    """Processor seconds of a process; 0 if it is gone."""
    try:
        return time.clock_gettime((~process << 3) | 2)  # the clock that clock_getcpuclockid names
    except OSError:
        return 0.0


@contextlib.contextmanager
def network(islands: int, environment: dict[str, str]) -> Iterator[Any]:
    """Machines with Ray, which are gone afterwards."""
    made: Network | None = None
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        made = Network(islands, environment)
        print(f"Ray started on {islands + 1} machines in {made.start_ray():.1f} s", flush=True)
        yield made
    finally:
        if made is not None:
            made.close()
