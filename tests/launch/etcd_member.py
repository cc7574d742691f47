"""Members of an etcd cluster, started here."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from launched import free_address
from scene import until

from jaxtrain.distributed.etcd import EtcdStore

NEEDS_ETCD = pytest.mark.skipif(shutil.which("etcd") is None, reason="there is no etcd here (Debian: etcd-server)")


def start_etcd(
    folder: Path, name: str, client: str, peer: str, cluster: str = "", inside: Sequence[str] = ()
) -> subprocess.Popen:
    """Starts a member.

    Args:
        folder: has its data and its log.
        name: its name in the cluster.
        client: HOST:PORT for clients.
        peer: HOST:PORT for the other members.
        cluster: NAME=URL of all members; default: this one alone.
        inside: begins the command line.
    """
    urls = {"client": f"http://{client}", "peer": f"http://{peer}"}
    command = [
        *inside, "etcd", "--name", name, "--data-dir", str(folder / name),
        "--listen-client-urls", urls["client"], "--advertise-client-urls", urls["client"],
        "--listen-peer-urls", urls["peer"], "--initial-advertise-peer-urls", urls["peer"],
        "--initial-cluster", cluster or f"{name}={urls['peer']}",
    ]  # fmt: skip
    with open(folder / f"{name}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


class Etcd:
    """One member of etcd, alone."""

    def __init__(self, folder: Path) -> None:
        self.address = free_address()
        self.process = start_etcd(folder, "etcd", self.address, free_address())
        until(self.answers, "etcd does not answer")

    def answers(self) -> bool:
        try:
            EtcdStore([self.address]).get("x")
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
