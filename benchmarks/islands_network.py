"""Machines of benchmarks/islands.py: namespaces of this one with a Ray node each, and the links between them.

A machine has its own network, processes, /dev/shm and /tmp/ray, so that a Ray driver on it finds the Ray node of its
machine alone, and objects travel between nodes over TCP. The namespaces have no names and the bridge is in one of its
own, so that nothing is left when their first processes are gone, which the kernel kills with this one.
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
SEGMENTS = 65535  # packets that a link may carry as one
RANDOM = (1 << 32) - 4096 + 56  # where a filter reads a random number of 32 bits
# Ray ends a node that does not reach the head for a minute; with these for ten minutes.
LONG_CUTS = {
    "RAY_health_check_failure_threshold": "200", "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_gcs_server_request_timeout_seconds": "600",
}  # fmt: skip
# The first process of a machine: it has no children to wait for, so that the kernel removes those that end.
FIRST = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
MOUNTS = "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /tmp/ray"
ACTORS = {
    "coordinator": ("ray::Coordinator", "ray::PeerCoordinator", "ray::GossipCoordinator"),
    "servers": ("ray::ServerProcess",),
}


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
    """A head and islands at a bridge, each by a link.

    Args:
        islands: their number.
        environment: of all processes of Ray and of the islands.
    """

    def __init__(self, islands: int, environment: dict[str, str]) -> None:
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.env = os.environ | environment | LONG_CUTS | token
        self._hub = Machine("")
        self._hub.network("ip", "link", "add", "bridge", "type", "bridge")
        self._hub.network("ip", "link", "set", "bridge", "up")
        self.head = self._joined(HEAD, "head")
        self.islands = [self._joined(f"10.77.0.{10 + index}", f"link{index}") for index in range(islands)]

    def _joined(self, address: str, link: str) -> Machine:
        machine = Machine(address)
        self._hub.network("ip", "link", "add", *f"{link} type veth peer name eth0 netns {machine.first}".split())
        self._hub.network("ip", "link", "set", link, "master", "bridge", "up")
        machine.network("ip", "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            machine.network("ip", "link", "set", device, "up")
        return machine

    def _ends(self, index: int) -> tuple[tuple[Machine, str], tuple[Machine, str]]:
        """Returns the ends of the link of an island."""
        return (self._hub, f"link{index}"), (self.islands[index], "eth0")

    def limit(self, mbit: float | None, head_mbit: float | None = None) -> None:
        """Limits each link to a speed, in both directions; None: no limit.

        Args:
            mbit: of each island.
            head_mbit: of the head.
        """
        for end in ((self._hub, "head"), (self.head, "eth0")):
            _limit(end, head_mbit)
        for index in range(len(self.islands)):
            for end in self._ends(index):
                _limit(end, mbit)

    def lose(self, share: float, island: int | None = None) -> None:
        """Drops a share of the packets of the links of islands, in each direction, at random; 1: a cut.

        Args:
            share: of the packets.
            island: whose link it is; None: of all.
        """
        for index in range(len(self.islands)) if island is None else [island]:
            for end in self._ends(index):
                _drop(end, share)

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
        links = {link["ifname"]: link["stats64"] for link in json.loads(self._hub.network("ip", "-s", "-j", "link"))}
        ends = [links[f"link{index}"] for index in range(len(self.islands))]
        return [(end["rx"]["bytes"], end["tx"]["bytes"]) for end in ends]  # of the bridge's end

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
        for machine in (*self.islands, self.head, self._hub):
            machine.close()


def _limit(end: tuple[Machine, str], mbit: float | None) -> None:
    """Limits what goes out at an end of a link."""
    machine, device = end
    if mbit is not None:
        rate = f"rate {mbit}mbit burst {BURST} latency {LATENCY}".split()
        machine.network("tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)
    else:
        with contextlib.suppress(subprocess.CalledProcessError):  # there was none
            machine.network("tc", "qdisc", "delete", "dev", device, "root")


def _drop(end: tuple[Machine, str], share: float) -> None:
    """Drops a share of the packets that come in at an end of a link."""
    machine, device = end
    segments = 1 if 0 < share < 1 else SEGMENTS  # else what is dropped would be up to 64 KB
    machine.network("ip", "link", "set", device, "gso_max_segs", str(segments))
    with contextlib.suppress(subprocess.CalledProcessError):  # there was none
        machine.network("tc", "qdisc", "delete", "dev", device, "clsact")
    if share:
        machine.network("tc", "qdisc", "add", "dev", device, "clsact")
        program = drop_program(share)
        machine.network("tc", *f"filter add dev {device} ingress bpf da bytecode".split(), program)


def drop_program(share: float) -> str:
    """Returns the filter, in the assembly of tc: it drops a packet if a random number is below a share of 2**32."""
    drop, accept = "6 0 0 2", f"6 0 0 {(1 << 32) - 1}"
    if share >= 1:
        return f"1,{drop}"
    return f"4,32 0 0 {RANDOM},53 1 0 {round(share * 2**32)},{drop},{accept}"


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
