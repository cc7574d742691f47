"""Supervisors and agents as real processes, with fake workers that crash, hang and are killed on request."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.launch.protocol import Channel

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

    def start(self, *arguments: str, inside: Sequence[str] = (), **environ: str) -> subprocess.Popen:
        """Starts a supervisor; `inside` begins its command line."""
        command = [*inside, sys.executable, str(FAKE), str(self.folder), *arguments]
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
        until(path.exists, f"no worker {rank} in generation {generation}")
        return int(path.read_text().split()[0])

    def count(self, generation: int) -> int:
        """Processes of a generation, as its first worker was told."""
        self.pid(generation, 0)
        return int((self.folder / f"pid-{generation}-0").read_text().split()[1])

    def leader(self, process: subprocess.Popen) -> int:
        """Process of the leader beside an agent."""
        found: list[int] = []

        def is_found() -> bool:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            found.extend(int(child) for child in children if "\0lead\0" in Path(f"/proc/{child}/cmdline").read_text())
            return bool(found)

        until(is_found, "no leader")
        return found[-1]

    def terminal(self, index: int = 0) -> str:
        return (self.folder / f"terminal-{index}").read_text()

    def ends(self) -> list[tuple[str, int]]:
        lines = (self.folder / "launch.jsonl").read_text().splitlines()
        return [(r["cause"], r["code"]) for r in map(json.loads, lines) if r["kind"] == "end"]

    def gone(self) -> bool:
        return not any(map(alive, self.pids()))

    def output(self) -> str:
        return "".join(self.terminal(index) for index in range(len(self.started)))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait(10)
        until(self.gone, "workers outlive their supervisor")


def opened(folder: Path) -> Iterator[Scene]:
    """Yields a scene in a new folder and closes it, for fixtures."""
    folder.mkdir()
    scene = Scene(folder)
    yield scene
    scene.close()


@contextmanager
def led_here(scene: Scene, *arguments: str) -> Iterator[Channel]:
    """Starts node 1 of two, whose leader is the caller. Yields the leader's end of the connection."""
    secret = "a secret that is known here"
    (scene.folder / "launch.secret").write_text(secret)
    with socket.create_server(("127.0.0.1", 0)) as leader:
        leader.settimeout(30)
        address = f"127.0.0.1:{leader.getsockname()[1]}"
        scene.start("node", "x", "--nodes=2", "--node=1", f"--coordinator={address}", "--processes=1", *arguments)
        connection, _ = leader.accept()
        with connection:
            yield Channel(connection, secret, is_server=True)


def finished(process: subprocess.Popen) -> int:
    return process.wait(PATIENCE)
