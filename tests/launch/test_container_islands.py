"""Islands in containers, each with a network and files of its own, by the commands of docs/islands.md.

Podman runs them. In place of an image they see this machine's Python, which they cannot change; entry point and folder
are those of the Dockerfile. Needs root, Ray, and the packages podman, runc, netavark and iptables.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launched_islands import clocks
from small_islands import CONFIG
from test_slurm import until

pytest.importorskip("ray", reason="islands on a cluster need Ray")
REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/islands.md").read_text()
ONE, HEAD, MACHINE = re.findall(r"```bash\n(?:docker build [^\n]*\n)?docker run (.*?)\n```", PAGE, re.DOTALL)
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
WORK = re.findall(r"^WORKDIR (.*)", DOCKERFILE, re.MULTILINE)[-1]
ENTRYPOINT = re.findall(r'^ENTRYPOINT \["(.*)"\]', DOCKERFILE, re.MULTILINE)[-1]
PROGRAMS = ("podman", "runc", "netavark", "iptables")
SUBNET = "10.213.77"
# Podman asks for more files and processes than root without CAP_SYS_RESOURCE may have.
PODMAN = '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]\n[engine]\nruntime = "runc"\n'


class Machines:
    """Containers, each with a folder of its own, in which it works."""

    def __init__(self, place: Path) -> None:
        self.place, self.network, self.running = place, f"islands-{os.getpid()}", {}
        self.environ = os.environ | {"CONTAINERS_CONF": str(place / "podman.conf"), "RAY_AUTH_TOKEN": "a1" * 16}
        (place / "podman.conf").write_text(PODMAN)
        self.podman("network", "create", "--subnet", f"{SUBNET}.0/24", self.network)
        self.image = place / "image"
        for folder in (WORK[1:], "etc", "proc", "sys", "dev", "tmp", "root"):
            (self.image / folder).mkdir(parents=True)
        for link in ("bin", "lib", "lib64", "sbin"):
            (self.image / link).symlink_to(f"usr/{link}")
        for file in ("passwd", "group", "ld.so.cache"):
            shutil.copy(f"/etc/{file}", self.image / "etc")

    def podman(self, *arguments: str) -> str:
        done = subprocess.run(["podman", *arguments], env=self.environ, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, name: str, address: int, command: str, config: str, **variables: str) -> Path:
        """Starts a container by what follows `docker run` on the page. Returns its folder."""
        folder = self.place / name
        folder.mkdir(exist_ok=True)
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
        (folder / "my.yaml").write_text(config)
        software = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix, str(REPOSITORY)])
        own = ["--rm", "--name", self.name(name), "--ip", f"{SUBNET}.{address}", "-e", "JAX_PLATFORMS=cpu"]
        own += ["-e", f"PATH={sys.prefix}/bin:/usr/bin:/usr/sbin", "-e", f"PYTHONPATH={REPOSITORY}"]
        own += [word for path in software for word in ("-v", f"{path}:{path}:ro")]
        own += ["--network", self.network, "--workdir", WORK]
        options, _, arguments = command.replace("--network host", "").partition(" jaxtrain ")
        if "--entrypoint" not in options:
            own += ["--entrypoint", ENTRYPOINT]
        options = options.replace("--shm-size 8g", "--shm-size 2g")
        arguments = arguments.replace("--islands 4", "--islands 2")
        line = f"exec podman run {shlex.join(own)} {options} --rootfs {self.image}:O {arguments}"
        with open(self.place / f"{name}.out", "a") as out:
            process = subprocess.Popen(
                ["sh", "-c", line], cwd=folder, env=self.environ | variables, stdout=out, stderr=out
            )
        self.running[name] = process
        return folder

    def name(self, name: str) -> str:
        return f"{self.network}-{name}"

    def stop(self, name: str) -> str:
        """Stops a container as `docker stop` does. Returns what it has printed."""
        self.podman("stop", self.name(name))
        self.running.pop(name).wait(60)
        return self.output(name)

    def output(self, name: str) -> str:
        return (self.place / f"{name}.out").read_text()

    def close(self) -> None:
        for name, process in self.running.items():
            if process.poll() is None:
                subprocess.run(["podman", "kill", self.name(name)], env=self.environ, capture_output=True, timeout=60)
            process.wait(60)
        self.podman("network", "rm", "-f", self.network)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    folders = f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman"
    missing = [name for name in PROGRAMS if shutil.which(name, path=folders) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}; missing: {', '.join(missing) or 'root'}")
    machines = Machines(tmp_path)
    yield machines
    machines.close()


def config(steps: int) -> str:
    text = CONFIG.format(dir="runs", text="text.txt") + "islands: {heartbeat: 1}\n"
    return text.replace("steps: 24", f"steps: {steps}")


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_islands_in_one_container_stop_and_go_on(machines: Machines) -> None:
    command = f"{ONE} sync.every=4"
    run = machines.start("one", 10, command, config(2000)) / "runs" / "run"
    until(lambda: min(clocks(run)) >= 8, lambda: machines.output("one"))
    assert "the islands save and stop" in machines.stop("one")
    stopped = min(clocks(run))
    assert 8 <= stopped < 2000
    machines.start("one", 10, command, config(2000))
    until(lambda: min(clocks(run)) >= 2000, lambda: machines.output("one"))
    assert machines.running["one"].wait(120) == 0
    assert not run.with_name("run-2").exists()


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_container_of_several_stops_and_joins_again(machines: Machines) -> None:
    head = machines.start("head", 10, HEAD, "")

    def start(here: int) -> None:
        command = MACHINE.replace("diloco", "diloco sync.every=4")
        where = {"HEAD": f"{SUBNET}.10", "HERE": str(here)}
        machines.start(f"machine-{here}", 20 + here, command, config(100_000), **where)

    said = lambda: "\n".join(machines.output(name) for name in machines.running)  # noqa: E731
    until(lambda: "This command will now block" in machines.output("head"), said)
    start(0)
    start(1)
    run = head / "runs" / "run"
    until(lambda: min(clocks(run)) >= 8, said)
    assert "the islands save and stop" in machines.stop("machine-1")
    alone = clocks(run)[1]
    until(lambda: clocks(run)[0] > alone + 8, said)
    start(1)
    until(lambda: clocks(run)[1] > alone + 8, said)
    for here in (0, 1):
        assert "the islands save and stop" in machines.stop(f"machine-{here}")
        saved = machines.place / f"machine-{here}" / "runs" / "run" / f"island-{here}" / "checkpoints"
        assert list(saved.iterdir()), "each machine has the checkpoints of its island"
