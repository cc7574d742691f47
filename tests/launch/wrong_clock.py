"""Clock of one process tree alone, which a test sets while it runs: libfaketime. The machine's clock stays as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# That of threads, which does not lock in a signal handler.
LIBRARY = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)
NEEDS_FAKETIME = pytest.mark.skipif(LIBRARY is None, reason="there is no libfaketime here (Debian: libfaketime)")

# libfaketime 0.9.10 breaks `clock_nanosleep` if it leaves the monotonic clock alone.
SITE = """
import select, time
time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""


class WrongClock:
    """Clock that is some seconds ahead of the machine's. A clock that is set leaves the monotonic one alone.

    Attributes:
        environ: environment of processes that have this clock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._file = folder / "clock"
        self.set(0)
        (folder / "sitecustomize.py").write_text(SITE)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        self.environ = {
            "LD_PRELOAD": str(LIBRARY), "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1", "PYTHONPATH": path,
        }  # fmt: skip

    def set(self, seconds: int) -> None:
        """Sets the clock ahead of the machine's, or back."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+d}s\n")
        new.rename(self._file)

    def close(self) -> None:
        """Deletes what libfaketime leaves of killed processes, which would stop later ones of the same number."""
        for path in Path("/dev/shm").glob("*faketime_s*_*"):
            if not Path(f"/proc/{path.name.rpartition('_')[2]}").exists():
                path.unlink(missing_ok=True)
