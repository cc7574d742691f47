"""Ray under the islands: a cluster on this machine, the coordinator as an actor, and the door of an island to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.islands import WITHOUT_MEAN, IslandsConfig
from jaxtrain.errors import TrainingError
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.jsonl import AppendedFile, PostponedError, encode_record
from jaxtrain.io.packages import import_optional
from jaxtrain.io.system import kept_handler
from jaxtrain.islands.gossip.coordinator import GossipCoordinator
from jaxtrain.islands.messages import LostValueError
from jaxtrain.islands.peers.coordinator import PeerCoordinator
from jaxtrain.islands.server.coordinator import Coordinator
from jaxtrain.islands.server.policies import make_policy
from jaxtrain.islands.server.ray_servers import ENVIRONMENT, ON_HEAD, RayServers
from jaxtrain.islands.status import LOG, STATUS

ray = import_optional("ray", "an island", "islands")
exceptions = ray.exceptions
NAME = "coordinator"
CALL_TIMEOUT = 300.0  # seconds of a call that waits for nobody: it copies or updates all parameters at most
VALUE_TIMEOUT = 3600.0  # seconds of values on a slow link; Ray itself notices that their owner has ended
LAUNCHER_SILENCE = 60.0  # seconds without islands and without a sign of a launcher
CONNECT_TIMEOUT = 60.0  # seconds to connect to a cluster
RESTART_WAIT = 60.0  # seconds that islands wait for a coordinator that Ray starts again
TOKEN = "RAY_AUTH_TOKEN"


class LostServerError(TrainingError):
    """The server is gone. One line."""


class BaseActor:
    """A coordinator as an actor: its log, its status, and its end.

    Args:
        make: returns the coordinator, for a function that takes records.
        islands: section `islands`.
        folder: of its files in the folder of the run.
        silence: seconds without islands and without a sign of a launcher after which it ends.
    """

    def __init__(
        self, make: Callable[[Callable[[dict[str, Any]], None]], Any], islands: IslandsConfig, folder: str,
        silence: float,
    ) -> None:  # fmt: skip
        self._folder, self._silence = Path(folder), silence
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = AppendedFile(self._folder / LOG)
        self._coordinator = make(self._log)
        self._period = min(islands.heartbeat / 2, 1.0)
        self._watch: Any = None
        self._launchers: set[str] = set()
        self._last_sign = 0.0  # time of the last message of a launcher

    def _log(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(PostponedError):
            self._file.append(encode_record({"time": time.time(), **record}))

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of the coordinator for an island."""
        return await getattr(self._coordinator, method)(*args)

    async def enter(self, launcher: str) -> None:
        """Takes a sign of life of a launcher that has islands of the run."""
        self._launchers.add(launcher)
        self._last_sign = time.monotonic()
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._watch_over())

    async def finish(self, launcher: str) -> bool:
        """Saves the last state. Returns True if nobody else has islands of the run."""
        await self._coordinator.finish()
        self._write_status()
        self._launchers.discard(launcher)
        return not self._launchers and not self._coordinator.members

    async def pid(self) -> int:
        """Returns the number of the process."""
        return os.getpid()

    def _write_status(self) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the coordinator
            write_atomic(self._folder / STATUS, json.dumps({"time": time.time(), **self._coordinator.status()}))

    async def _watch_over(self) -> None:
        while True:
            begin = time.monotonic()
            await asyncio.sleep(self._period)
            await self._coordinator.check_silence(time.monotonic() - begin - self._period)
            self._write_status()
            if not self._coordinator.members and time.monotonic() - self._last_sign > self._silence:
                await self._coordinator.finish()  # all launchers were killed, on a cluster that stays
                ray.kill(ray.get_runtime_context().current_actor)


class CoordinatorActor(BaseActor):
    """The coordinator of servers.

    Args:
        config: of the run.
        folder: see `BaseActor`.
        silence: see `BaseActor`.
    """

    def __init__(self, config: Config, folder: str, silence: float) -> None:
        islands = config.islands
        policy = make_policy(config.sync.strategy, config.sync.stale.bound, islands)
        servers, every = RayServers(islands.servers, Path(folder)), config.checkpoint.every
        super().__init__(lambda log: Coordinator(islands, policy, servers, every, log), islands, folder, silence)


class PeerCoordinatorActor(BaseActor):
    """The coordinator of islands without servers; arguments as those of `CoordinatorActor`."""

    def __init__(self, config: Config, folder: str, silence: float) -> None:
        islands, every = config.islands, config.sync.interval
        super().__init__(lambda log: PeerCoordinator(islands, every, log), islands, folder, silence)


class GossipCoordinatorActor(BaseActor):
    """The coordinator of islands that gossip; arguments as those of `CoordinatorActor`."""

    def __init__(self, config: Config, folder: str, silence: float) -> None:
        islands, sync = config.islands, config.sync
        super().__init__(lambda log: GossipCoordinator(islands, sync, log), islands, folder, silence)


def connect(address: str, namespace: str, timeout: float, find: Callable[[], Any] = lambda: None) -> Any:
    """Connects this process to a Ray cluster, and returns what is found there.

    Args:
        address: HOST:PORT.
        namespace: of the run.
        timeout: seconds to connect.
        find: looks for something in the cluster; raises ValueError without it.

    Raises:
        LostServerError: no cluster there, or nothing is found.
    """
    found: list[Any] = []

    def attempt() -> None:
        try:
            if not ray.is_initialized():
                # Ray's own handler ends the process 3 s after the signal, in the middle of a save.
                with kept_handler(signal.SIGTERM):
                    ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            found.append(find())
        except Exception as error:
            found.append(error)

    try:
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), timeout).close()  # Ray itself tries for minutes
        # A thread that still waits does not keep the process, which ends with the error.
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(timeout)
        if not found:
            raise TimeoutError(f"no answer in {timeout:g} s, maybe because no Ray node of this machine runs")
        if isinstance(found[0], Exception):
            raise found[0]
    except (OSError, ValueError, exceptions.RayError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        message = f"islands: no server of this run at {address} ({line})"
        raise LostServerError(f"{message}; expected `jaxtrain launch islands` there") from None
    return found[0]


@contextlib.contextmanager
def cluster(namespace: str, address: str | None, memory: int) -> Iterator[str]:
    """Yields the address of a Ray cluster: an existing one, or one on this machine that ends with the block.

    Args:
        namespace: of the run.
        address: of an existing cluster.
        memory: bytes of the store of a cluster that is started.

    Raises:
        LostServerError: no cluster at the address.
    """
    if address is None:
        # Ray's warnings stay: of a store that is too small, or not in memory.
        ray.init(
            "local",  # else Ray joins a cluster that happens to be on this machine
            namespace=namespace, include_dashboard=False, num_cpus=4, num_gpus=0, object_store_memory=memory,
            _node_ip_address="127.0.0.1", log_to_driver=False, configure_logging=False,
        )  # fmt: skip
    else:
        connect(address, namespace, CONNECT_TIMEOUT)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def start_coordinator(config: Config, folder: Path, launcher: str, silence: float = LAUNCHER_SILENCE) -> Any:
    """Starts the coordinator of a run, or finds it. Returns its handle.

    It outlives the launcher that has started it, because others may have islands too: the last one ends it.

    Args:
        config: of the run.
        folder: of the server.
        launcher: name of the process that asks.
        silence: see `CoordinatorActor`.
    """
    actor: Any = CoordinatorActor if config.islands.servers else PeerCoordinatorActor
    if config.sync.strategy in WITHOUT_MEAN:
        actor = GossipCoordinatorActor
    options = ray.remote(actor).options(
        name=NAME, get_if_exists=True, lifetime="detached", num_cpus=0, resources=ON_HEAD, max_restarts=-1,
        max_concurrency=1000, runtime_env=ENVIRONMENT,
    )  # fmt: skip
    actor = options.remote(config, str(folder), silence)
    ray.get(actor.enter.remote(launcher), timeout=CALL_TIMEOUT)
    return actor


class RayDoor:
    """Door of an island's process.

    Args:
        address: of the Ray cluster.
        namespace: of the run.
        timeout: seconds to connect.

    Raises:
        LostServerError: no cluster, or no coordinator of the run there.
    """

    is_first = True

    def __init__(self, address: str, namespace: str, timeout: float = CONNECT_TIMEOUT) -> None:
        self._actor = connect(address, namespace, timeout, lambda: ray.get_actor(NAME, namespace))

    def call(self, method: str, *args: Any) -> Any:
        """Returns what a method of the coordinator returns. Waits for one that is started again."""
        deadline = time.monotonic() + RESTART_WAIT
        while True:
            try:
                return ray.get(self._actor.call.remote(method, *args), timeout=CALL_TIMEOUT)
            except exceptions.RayTaskError as error:
                raise error.cause from None
            except (exceptions.RayActorError, exceptions.GetTimeoutError) as error:
                if time.monotonic() > deadline:
                    name = type(error).__name__
                    raise LostServerError(f"islands: the server does not answer ({name})") from None
                time.sleep(0.2)

    def put(self, value: Any) -> list[Any]:
        """Puts a value into Ray's store."""
        return [ray.put(value)]

    def get(self, refs: list[Any], by_first: bool = False) -> list[Any]:
        """Reads values from Ray's store, without copying those that are on this machine."""
        try:
            return ray.get(refs, timeout=VALUE_TIMEOUT)
        except (exceptions.ObjectLostError, exceptions.GetTimeoutError) as error:
            raise LostValueError(f"islands: a value is lost ({type(error).__name__})") from None


def finish(coordinator: Any, launcher: str) -> None:
    """Saves what the servers hold, when the islands of a launcher have ended; the last one ends the servers."""
    with contextlib.suppress(exceptions.RayError):  # one that is gone has saved before
        if ray.get(coordinator.finish.remote(launcher), timeout=CALL_TIMEOUT):
            ray.kill(coordinator)
