"""Two processes of torch that run a script of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_pair(name: str, folder: Path) -> None:
    """Runs a script with RANK FOLDER as rank 0 and as rank 1; both must end well."""
    script = Path(__file__).with_name(name)
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # also where no name is resolved
    commands = [[sys.executable, script, str(i), folder] for i in range(2)]
    processes = [subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=240)[1] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        for process in processes:
            process.kill()
