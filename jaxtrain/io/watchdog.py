"""Ends a process that hangs, after it has written down where."""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.exit_codes import HUNG

# Seconds without a change of phase. Those of a step depend on what steps were measured to take, see `deadline`.
DEADLINES = {"init": 3600.0, "compile": 7200.0, "restore": 7200.0, "checkpoint": 3600.0, "eval": 7200.0, "data": 300.0}
UNKNOWN = 3600.0  # of a step, before any was measured
LEAST, TIMES = 120.0, 20.0  # of a step: at least so many seconds, and so many times the median step
PATIENCE = 20.0  # seconds that may be spent on each thing that is written at the end
DOING = {
    "init": "starting", "compile": "compiling or in the first step", "restore": "reading a checkpoint",
    "checkpoint": "waiting for a checkpoint", "eval": "in validation", "data": "waiting for data",
    "compute": "in a step", "replay": "in a step",
}  # fmt: skip
DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "ipdb")


class Watched(Protocol):
    """Interface of the watched ledger, see `jaxtrain.trackers.goodput.GoodputLedger`."""

    def snapshot(self) -> Any: ...

    def step_time(self) -> float | None: ...


class Watchdog:
    """Called every `period` seconds by a thread beside the one that is watched."""

    def __init__(
        self,
        ledger: Watched,
        folder: Path,
        tell: Callable[..., None],
        *,
        process: int = 0,
        processes: int = 1,
        limit: float | None = None,
        in_flight: Callable[[], list[str]] = list,
        period: float = 1.0,
        end: Callable[[int], Any] = os._exit,
    ):
        """
        Args:
            ledger: whose phases are watched.
            folder: of the run.
            tell: takes an event, `tell(kind, **fields)`, whatever state the main thread is in.
            process, processes: this one's number, and how many there are.
            limit: seconds that a step or its data may take; None: see `deadline`; 0: nothing is ever ended.
            in_flight: lines on the program that devices run, asked of when a step hangs.
            period: seconds between calls, at least.
            end: ends the process with this exit code.
        """
        self._ledger, self._folder, self._tell, self._in_flight = ledger, folder, tell, in_flight
        self._process, self._processes, self._limit, self._period, self._end = process, processes, limit, period, end
        self._seen, self._ticks = -1, 0

    def __call__(self) -> None:
        """One tick."""
        snapshot = self._ledger.snapshot()
        if snapshot.changes != self._seen:
            self._seen, self._ticks = snapshot.changes, 0
            return
        self._ticks += 1
        seconds, allowed = self._ticks * self._period, self.deadline(snapshot.bucket)
        if self._limit == 0 or seconds <= allowed:
            return
        if being_debugged():
            self._ticks = 0
            return
        self._hung(snapshot, seconds, allowed)

    def deadline(self, phase: str) -> float:
        """Seconds that a phase may take without a change.

        A step waits for the data of all processes: with several, its deadline is later by that of the data, so that
        the process whose data hangs is the one that ends, and says so.
        """
        if phase not in ("compute", "replay"):
            default = DEADLINES[phase]
            return default if self._limit is None else self._limit if phase == "data" else max(default, self._limit)
        took = self._ledger.step_time()
        known = UNKNOWN if took is None else max(LEAST, TIMES * took)
        return (known if self._limit is None else self._limit) + (self.deadline("data") if self._processes > 1 else 0.0)

    def _hung(self, snapshot: Any, seconds: float, allowed: float) -> None:
        host = socket.gethostname()
        said = (
            f"process {self._process} on {host} hangs {DOING[snapshot.bucket]}: nothing for {seconds:.0f} s "
            f"(deadline {allowed:.0f} s); last step begun: {snapshot.step}"
        )
        path = self._folder / f"hang-{self._process}.txt"
        now = datetime.now(UTC).isoformat(timespec="seconds")
        text = f"{now} {said}\n\n{_threads()}\n"
        runs_program = snapshot.bucket in ("compute", "replay", "compile")
        event = {"step": snapshot.step, "phase": snapshot.bucket, "seconds": seconds, "deadline": allowed}
        cursor = "\033[?25h" if os.isatty(2) else ""  # a progress bar has hidden it
        for act in (
            lambda: _dump(2, text),
            lambda: self._write(path, text, runs_program),
            lambda: self._tell("hang", **event, process=self._process, host=host, file=path.name),
            lambda: os.write(2, f"{cursor}\njaxtrain: {said}; stacks of all threads: {path}\n".encode()),
        ):
            _within(PATIENCE, act)
        self._end(HUNG)

    def _write(self, path: Path, text: str, runs_program: bool) -> None:
        """The stacks first: they need nothing that could hang too."""
        with path.open("ab", buffering=0) as file:
            _dump(file.fileno(), text)
            if runs_program:
                file.write("\n".join(["", *self._in_flight(), ""]).encode())


def being_debugged() -> bool:
    """Returns whether this process is traced, or a Python debugger is on the stack of its main thread."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    if any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in status.splitlines()):
        return True
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).split(".")[0].startswith(DEBUGGERS):
            return True
        frame = frame.f_back
    return False


def _dump(file: int, text: str) -> None:
    os.write(file, text.encode())
    faulthandler.dump_traceback(file, all_threads=True)


def _threads() -> str:
    """The names that belong to the numbers of the dump."""
    return "\n".join(f"Thread {thread.ident or 0:#018x} is {thread.name}" for thread in threading.enumerate())


def _within(seconds: float, act: Callable[[], Any]) -> None:
    """Does it in so much time or leaves it: what hung may hang here too, and the process ends whatever a disk says."""

    def quietly() -> None:
        try:
            act()
        except Exception as error:
            os.write(2, f"jaxtrain: {type(error).__name__}: {error}\n".encode())

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
