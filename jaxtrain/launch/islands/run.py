"""Islands on this machine: a Ray cluster with the coordinator and its servers, and a process for each island.

An island that fails is started again and joins the others. Nothing outlives this process: the kernel kills the islands,
and Ray's processes end with the one that started them, its agents within a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

import xxhash

from jaxtrain.config import Config
from jaxtrain.config.run_dir import absolute, create_directory, free_directory, saved_config, write_config
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import UserError
from jaxtrain.exit_codes import OK, SAVED, USAGE
from jaxtrain.io.authenticated import new_secret
from jaxtrain.io.packages import import_optional
from jaxtrain.islands.environment import environment
from jaxtrain.islands.status import SERVER, read_status
from jaxtrain.launch.exit_reasons import describe_exit, is_clean_exit, shell_exit_code
from jaxtrain.launch.islands.options import IslandsOptions, resume_command
from jaxtrain.launch.worker_logs import Terminal
from jaxtrain.trainer.continuation import can_continue

ISLAND, OUTPUT = "island-{}", "output.log"
POLL = 0.2  # seconds between looks at the islands
SHOWN_EVERY = 10.0  # seconds between lines on their progress
STORE_BYTES = 2 << 30  # of Ray's store, at most; it holds a few copies of what the servers hold
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # the switch by which Ray listens on 127.0.0.1 alone
TOKEN_MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@dataclass
class IslandProcess:
    """Process of an island.

    Attributes:
        index: of the island.
        folder: of its run.
        env: what its environment has beside that of this process.
        command: of jaxtrain, before the folder.
        restarts: in a row.
        code: exit code of the last one; None: it runs.
    """

    index: int
    folder: Path
    env: Mapping[str, str]
    command: tuple[str, ...] = ("resume",)
    restarts: int = 0
    code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _output: IO[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Starts the process; all it prints goes to a file of its folder."""
        self._output = (self.folder / OUTPUT).open("ab")
        worker = [sys.executable, "-m", "jaxtrain.cli.worker", str(os.getpid())]
        self._process = subprocess.Popen(
            [*worker, *self.command, str(self.folder)], env={**os.environ, **self.env}, stdin=subprocess.DEVNULL,
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.code = None

    def poll(self) -> int | None:
        """Returns the exit code of a process that has ended since the last call; else None."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        assert self._output is not None
        self._output.close()
        self._process, self.code = None, code
        return code

    def signal(self, number: int) -> None:
        """Sends a signal, if the process runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    @property
    def is_running(self) -> bool:
        """True until `poll` has returned its exit code."""
        return self._process is not None

    def reason(self) -> str:
        """Returns the last line of its output that jaxtrain has printed as an error, or an empty text."""
        with (self.folder / OUTPUT).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - (1 << 16), 0))
            lines = file.read().decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("jaxtrain: ")), "")


def launch_islands(options: IslandsOptions, terminal: Terminal) -> int:
    """Trains until all islands have ended. Returns the exit code.

    Raises:
        UserError: bad input; nothing was started.
    """
    if options.address is None:  # the processes of this cluster, and no others, know the token
        os.environ |= LOOPBACK | {TOKEN_MODE: "token", TOKEN: os.environ.get(TOKEN) or new_secret()}
    import_optional("ray", "jaxtrain launch islands", "islands")  # which reads these when it is imported
    from jaxtrain.islands.ray_engine import LostServerError, cluster, finish, start_coordinator

    config, directory, here = open_run(options)
    run = f"{directory.name}-{xxhash.xxh32_hexdigest(str(directory).encode())}"
    terminal.show(f"launch  {directory}")
    launcher, command = new_secret(), island_command(options, config)
    with one_line_of(LostServerError), cluster(run, options.address, STORE_BYTES) as address:
        coordinator = start_coordinator(config, directory / SERVER, launcher)
        islands = [
            IslandProcess(index, directory / ISLAND.format(index), environment(index, address, run), command)
            for index in here
        ]
        with StopRequest() as signals:
            alive = partial(coordinator.enter.remote, launcher)
            code = _watch(islands, options, signals, alive, directory, terminal)
        finish(coordinator, launcher)
    if code == SAVED:
        terminal.show(f"next  {resume_command(options, directory)}")
    return code


def island_command(options: IslandsOptions, config: Config) -> tuple[str, ...]:
    """Returns the command of jaxtrain that an island is, to which the folder of its run is added."""
    if not options.launch:
        return ("resume",)
    where, *given = options.launch
    devices, rest = divmod(config.simulate or 0, options.processes)
    # Said, because the config of a run that went on with fewer processes has fewer devices.
    share = [f"--devices-per-process={devices}"] if devices and not rest else []
    limits = (f"--max-restarts={options.max_restarts}", f"--collective-timeout={options.collective_timeout}")
    return ("launch", where, *share, *given, *limits)


@contextlib.contextmanager
def one_line_of(kind: type[Exception]) -> Iterator[None]:
    """Makes a UserError of errors of a kind."""
    try:
        yield
    except kind as error:
        raise UserError(str(error)) from None


def open_run(options: IslandsOptions) -> tuple[Config, Path, tuple[int, ...]]:
    """Returns the config and the folder of a run, new or continued, with the configs of its islands here.

    Raises:
        UserError: bad input, or DIR/NAME holds the run of another config.
    """
    existing = Path(options.source) if Path(options.source).is_dir() else None
    overrides = (*options.overrides, *([f"islands.count={options.count}"] if options.count is not None else []))
    source = saved_config(existing) if existing else options.source
    config, _ = resolve(source, *overrides)
    if not config.islands.has_islands:
        raise UserError("launch: --islands: expected their number")
    if existing is not None:
        directory = existing
    elif options.continues:
        can_continue(config, config.run_dir)  # raises if it holds another run
        directory = config.run_dir  # others may make it at the same moment, with the same config
    else:
        directory = free_directory(config)
    directory = directory.absolute()
    here = tuple(range(config.islands.count)) if options.here is None else options.here
    if max(here) >= config.islands.count:
        raise UserError(f"launch: --here {max(here)}: expected an index below islands.count={config.islands.count}")
    create_directory(directory)
    write_config(directory, absolute(config))  # before all else, so that it is a run
    for index in here:
        folder = directory / ISLAND.format(index)
        create_directory(folder)
        write_config(folder, config.model_copy(update={"dir": str(directory), "name": folder.name}))
    return config, directory, here


def _watch(
    islands: Sequence[IslandProcess], options: IslandsOptions, signals: StopRequest, alive: Callable[[], Any],
    directory: Path, terminal: Terminal,
) -> int:  # fmt: skip
    """Starts the islands, and those that fail again, until all have ended."""
    for island in islands:
        island.start()
    shown, stop_at = time.monotonic(), None
    while any(island.is_running for island in islands):
        time.sleep(POLL)
        if signals.received and stop_at is None:
            stop_at = time.monotonic() + options.stop_timeout
            terminal.show(f"launch  {signals.received}: the islands save and stop")
            for island in islands:
                island.signal(signal.SIGTERM)
        elif stop_at is not None and time.monotonic() > stop_at:
            for island in islands:
                island.signal(signal.SIGKILL)
        for island in islands:
            if (code := island.poll()) is not None:
                _ended(island, code, options, stop_at is not None, terminal)
        if time.monotonic() - shown > SHOWN_EVERY:
            shown = time.monotonic()
            alive()
            with contextlib.suppress(UserError):  # it is not written yet
                terminal.show(summary(read_status(directory)))
    failed = [island.code for island in islands if island.code not in (OK, SAVED)]
    if failed:
        return shell_exit_code(failed[0] or 1)
    return SAVED if any(island.code == SAVED for island in islands) else OK


def _ended(island: IslandProcess, code: int, options: IslandsOptions, is_stopping: bool, terminal: Terminal) -> None:
    """Shows how an island has ended, and starts it again if it failed."""
    if not is_clean_exit(code):
        reason = island.reason()
        terminal.show(f"launch  island {island.index} {describe_exit(code)}" + (f": {reason}" if reason else ""))
        if code != USAGE and not is_stopping and island.restarts < options.max_restarts:
            island.restarts += 1
            terminal.show(f"launch  island {island.index} starts again ({island.restarts} of {options.max_restarts})")
            island.start()


def summary(status: Mapping[str, Any]) -> str:
    """Returns one line on all islands: their steps and losses."""
    parts = [
        f"{index}: step {island['clock']}"
        + (f" loss {island['loss']:.4f}" if "loss" in island else "")
        + ("" if island["is_there"] else " (gone)")
        for index, island in status["islands"].items()
    ]
    problem = f"  {status['problem']}" if status.get("problem") else ""
    return f"islands  {'  '.join(parts)}  updates {status['version']}{problem}"


class StopRequest:
    """SIGTERM, SIGINT and SIGHUP as a wish to stop. A second one ends the process."""

    def __init__(self) -> None:
        self.received = ""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number != signal.SIGHUP:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name
