"""A real Slurm with two nodes on this machine: the first node is found, and a requeued job goes on where it was.

Needs root and the packages slurm-wlm and munge.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import free_address, losses, undisturbed, write

HERE = Path(__file__).parent
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
NODES = ("jt1", "jt2")
CONF = """
ClusterName=jaxtrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
KillWait=30
"""
JOB = """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 --requeue --open-mode=append -o {place}/out
srun {python} -m jaxtrain.cli.main launch node --processes=1 --devices-per-process=2 {config} checkpoint.every=null
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Starts Slurm with its own authentication. Yields the environment for its commands."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs root and {', '.join(PROGRAMS)}; missing: {', '.join(missing) or 'root'}")
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    for name in ("state", *NODES):
        (folder / name).mkdir(parents=True)
    port, *ports = (free_address().rpartition(":")[2] for _ in (None, *NODES))
    conf = [CONF.format(host=host, port=port, folder=folder)]
    conf += [f"NodeName={n} NodeHostname={host} NodeAddr=127.0.0.1 Port={p} CPUs=1" for n, p in zip(NODES, ports)]
    conf += [f"PartitionName=all Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP"]
    (folder / "slurm.conf").write_text("\n".join(conf))
    hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {name}\n" for name in NODES)
    (folder / "hosts").write_text(hosts)
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o400)
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    munge = [f"--{name}={folder}/{file}" for name, file in (
        ("socket", "munge.socket"), ("key-file", "key"), ("pid-file", "munge.pid"), ("seed-file", "seed"),
        ("log-file", "munge.log"),
    )]  # fmt: skip
    # Names of the nodes are known in these processes alone.
    named = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(folder / "hosts")]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        *([*named, "slurmd", "-D", "-N", name] for name in NODES),
    ]
    processes = []
    try:
        for command in commands:
            log = subprocess.DEVNULL
            processes.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            time.sleep(1)
        idle = ["sinfo", "-h", "-o", "%D", "-t", "idle"]
        until(lambda: said(idle, environ) == str(len(NODES)), lambda: said(["sinfo"], environ))
        yield environ
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(30)


def said(command: list[str], environ: dict[str, str]) -> str:
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60).stdout.strip()


def until(true: Callable[[], object], state: Callable[[], str]) -> None:
    deadline = time.monotonic() + 240
    while not true():
        assert time.monotonic() < deadline, state()
        time.sleep(0.1)


@pytest.mark.chaos
def test_a_requeued_job_goes_on(tmp_path: Path, slurm: dict[str, str]):
    steps = 200
    expected = undisturbed(tmp_path, steps)
    config, run, job = write(tmp_path, "parts", steps, 0.2), tmp_path / "runs/parts", tmp_path / "job.sh"
    job.write_text(JOB.format(place=tmp_path, python=sys.executable, config=config))
    environ = {**slurm, "PYTHONPATH": os.pathsep.join([str(HERE), os.getcwd()])}
    environ.pop("JAX_NUM_CPU_DEVICES", None)
    number = said(["sbatch", "--parsable", str(job)], environ)
    output = lambda: (tmp_path / "out").read_text() if (tmp_path / "out").exists() else "nothing"  # noqa: E731
    until(lambda: max(losses(run), default=0) >= 5, output)
    said(["scontrol", "requeue", number], environ)
    until(lambda: max(losses(run), default=0) >= steps, output)
    until(lambda: not said(["squeue", "-h"], environ), output)
    assert losses(run) == pytest.approx(expected, rel=1e-5)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    stopped = [event for event in events if event["kind"] == "stop"]
    assert [event["reason"] for event in stopped] == ["SIGTERM", "finished"]
    resumed = next(event for event in events if event["kind"] == "resume")
    assert resumed["step"] == stopped[0]["step"] >= 5
    assert [path.name for path in run.parent.iterdir()].count("parts-2") == 0
