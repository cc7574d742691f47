"""Two processes of torch that run a script of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run_pair(name: str, folder: Path) -> None:
    """Runs a script with RANK FOLDER as rank 0 and as rank 1; both must end well."""
    script = Path(__file__).with_name(name)
    processes = [subprocess.Popen([sys.executable, script, str(i), folder]) for i in range(2)]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
