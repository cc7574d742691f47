"""Host names of one process tree alone: its own /etc/hosts, which a test may change while it runs. Linux, root."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

MOUNT = 'mount --bind "$1" /etc/hosts && mount --bind "$2" /etc/nsswitch.conf && shift 2 && exec "$@"'
SWITCH = "hosts: files\n"


def _can_mount() -> bool:
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


NEEDS_MOUNTS = pytest.mark.skipif(not _can_mount(), reason="needs root and mount namespaces")


class Names:
    """Table of names, empty but for localhost and, if given, this machine's own name."""

    def __init__(self, folder: Path, own: str = "127.0.0.1") -> None:
        folder.mkdir(exist_ok=True)
        self._hosts, self._switch = folder / "hosts", folder / "nsswitch.conf"
        self._hosts.write_text(f"127.0.0.1 localhost\n{own} {socket.gethostname()}\n")
        self._switch.write_text(SWITCH)
        self.inside = ("unshare", "-m", "sh", "-c", MOUNT, "sh", str(self._hosts), str(self._switch))

    def add(self, name: str, address: str) -> None:
        """Lets a name resolve from now on."""
        with open(self._hosts, "a") as file:  # the file that is mounted, in place
            file.write(f"{address} {name}\n")
