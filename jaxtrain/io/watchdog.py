"""Watchdog that ends a hanging process after it has written the stacks of all threads."""

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

# Seconds that a phase may take. The deadline of a step follows from measured step times, see `Watchdog.deadline`.
DEADLINES = {
    "init": 3600.0, "compile": 7200.0, "restore": 7200.0, "checkpoint": 3600.0, "eval": 7200.0, "data": 300.0,
    "exchange": 86400.0,  # a round may be as long as its slowest island takes; calls have limits of their own
}  # fmt: skip
FIRST_STEP_DEADLINE = 3600.0  # seconds, while no step has been measured
MIN_STEP_DEADLINE = 120.0  # seconds
STEP_TIME_FACTOR = 20.0  # deadline of a step in median step times
WRITE_TIMEOUT = 20.0  # seconds for each part of the hang report
STEP_PHASES = ("compute", "replay")
PHASE_DESCRIPTIONS = {
    "init": "starting", "compile": "compiling or in the first step", "restore": "reading a checkpoint",
    "checkpoint": "waiting for a checkpoint", "eval": "in validation", "data": "waiting for data",
    "exchange": "waiting for other islands", "compute": "in a step", "replay": "in a step",
}  # fmt: skip
DEBUGGERS = ("pdb", "bdb", "pydevd", "debugpy", "ipdb")


class PhaseLedger(Protocol):
    """Interface of the watched ledger, see `jaxtrain.trackers.goodput.GoodputLedger`."""

    def snapshot(self) -> Any: ...

    def step_time(self) -> float | None: ...


class Watchdog:
    """Ends the process when the phase of a ledger does not change before its deadline. A `Ticker` calls it."""

    def __init__(
        self,
        ledger: PhaseLedger,
        folder: Path,
        log_event: Callable[..., None],
        *,
        process: int = 0,
        processes: int = 1,
        limit: float | None = None,
        describe_program: Callable[[], list[str]] = list,
        period: float = 1.0,
        exit_process: Callable[[int], Any] = os._exit,
    ):
        """Creates the watchdog.

        Args:
            ledger: reports the current phase.
            folder: of the run; receives `hang-PROCESS.txt`.
            log_event: `log_event(kind, **fields)` records an event, whatever the main thread does.
            process: number of this process.
            processes: number of processes.
            limit: seconds that a step or its data may take; None: see `deadline`; 0: no deadlines.
            describe_program: lines about the program on the devices, for the report of a hanging step.
            period: seconds between calls.
            exit_process: called with the exit code.
        """
        self._ledger, self._folder, self._log_event, self._describe_program = (
            ledger,
            folder,
            log_event,
            describe_program,
        )
        self._process, self._processes, self._limit, self._period = process, processes, limit, period
        self._exit_process = exit_process
        self._changes, self._ticks = -1, 0  # phase changes at the last call; calls since the last change

    def __call__(self) -> None:
        """Counts one period, and ends the process if the deadline has passed."""
        snapshot = self._ledger.snapshot()
        if snapshot.changes != self._changes:
            self._changes, self._ticks = snapshot.changes, 0
            return
        self._ticks += 1
        seconds, deadline = self._ticks * self._period, self.deadline(snapshot.bucket)
        if self._limit == 0 or seconds <= deadline:
            return
        if is_debugged():
            self._ticks = 0
            return
        self._end_process(snapshot, seconds, deadline)

    def deadline(self, phase: str) -> float:
        """Returns the seconds that a phase may take.

        A step waits for the data of all processes. With several processes its deadline is later by that of the data,
        so that the process whose data hangs ends first and reports it.
        """
        if phase not in STEP_PHASES:
            default = DEADLINES[phase]
            return default if self._limit is None else self._limit if phase == "data" else max(default, self._limit)
        step_time = self._ledger.step_time()
        default = FIRST_STEP_DEADLINE if step_time is None else max(MIN_STEP_DEADLINE, STEP_TIME_FACTOR * step_time)
        data_deadline = self.deadline("data") if self._processes > 1 else 0.0
        return (default if self._limit is None else self._limit) + data_deadline

    def _end_process(self, snapshot: Any, seconds: float, deadline: float) -> None:
        """Reports the hang on stderr, in a file and as an event, each with a timeout; then exits."""
        host = socket.gethostname()
        message = (
            f"process {self._process} on {host} hangs {PHASE_DESCRIPTIONS[snapshot.bucket]}: no progress for "
            f"{seconds:.0f} s (deadline {deadline:.0f} s); last step begun: {snapshot.step}"
        )
        path = self._folder / f"hang-{self._process}.txt"
        threads = "\n".join(f"Thread {thread.ident or 0:#018x} is {thread.name}" for thread in threading.enumerate())
        text = f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n\n{threads}\n"
        runs_program = snapshot.bucket in (*STEP_PHASES, "compile")
        event = {"step": snapshot.step, "phase": snapshot.bucket, "seconds": seconds, "deadline": deadline}
        show_cursor = "\033[?25h" if os.isatty(2) else ""  # a progress bar has hidden it
        last_line = f"{show_cursor}\njaxtrain: {message}; stacks of all threads: {path}\n"
        for write in (
            lambda: _dump_stacks(2, text),
            lambda: self._write_report(path, text, runs_program),
            lambda: self._log_event("hang", **event, process=self._process, host=host, file=path.name),
            lambda: os.write(2, last_line.encode()),
        ):
            _run_with_timeout(write, WRITE_TIMEOUT)
        self._exit_process(HUNG)

    def _write_report(self, path: Path, text: str, runs_program: bool) -> None:
        """Writes the stacks first, because describing the program could hang too."""
        with path.open("ab", buffering=0) as file:
            _dump_stacks(file.fileno(), text)
            if runs_program:
                file.write("\n".join(["", *self._describe_program(), ""]).encode())


def is_debugged() -> bool:
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


def _dump_stacks(file: int, text: str) -> None:
    os.write(file, text.encode())
    faulthandler.dump_traceback(file, all_threads=True)


def _run_with_timeout(function: Callable[[], Any], seconds: float) -> None:
    """Runs a function in a thread and abandons it after a timeout; its errors go to stderr."""

    def run() -> None:
        try:
            function()
        except Exception as error:
            os.write(2, f"jaxtrain: {type(error).__name__}: {error}\n".encode())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
