"""Islands as threads of one process, with the coordinator in a thread of its own: all but Ray."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import tiny_net

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import island_config
from jaxtrain.core.placement import Placer
from jaxtrain.core.program import Program, build_program
from jaxtrain.islands.callback import open_island
from jaxtrain.islands.gossip.coordinator import GossipCoordinator
from jaxtrain.islands.messages import Hello
from jaxtrain.islands.partition import Parts, partition
from jaxtrain.islands.peers.coordinator import PeerCoordinator
from jaxtrain.islands.rows import IslandRows
from jaxtrain.islands.server.coordinator import Coordinator, Held
from jaxtrain.islands.server.policies import make_policy
from jaxtrain.islands.server.process import ServerProcess
from jaxtrain.islands.server.rules import Header


class LocalServers:
    """Servers in this process; a reference is the value."""

    def __init__(self, count: int) -> None:
        self.parts: list[Parts] = []
        self.given: list[Any] = []
        self.message: list[Any] = []
        self.nbytes = 0, 0
        self.count = count
        self.servers: list[ServerProcess] = []
        self.states: list[Any] = []
        self.saved: Mapping[str, Any] | None = None

    async def open(self, hello: Hello) -> None:
        self.parts = partition(hello.specs, self.count)
        for parts in self.parts:
            specs = {path: part.spec(hello.specs[path]) for path, part in parts.items()}
            self.servers.append(ServerProcess(hello.rule, specs, hello.bits))

    async def begin(self, refs: list[list[Any]]) -> None:
        held = await self.hold(refs)
        self._keep([server.begin(flat) for server, flat in zip(self.servers, held.refs)])

    async def hold(self, refs: list[list[Any]]) -> Held:
        found = [server.hold(*pieces) for server, pieces in zip(self.servers, refs)]
        return Held([flat for flat, _ in found], all(finite for _, finite in found))

    async def update(self, header: Header, pushes: list[Held]) -> None:
        of_server = list(zip(*(held.refs for held in pushes)))
        if len(self.servers) > 1:
            squares = [server.square(header, *flats) for server, flats in zip(self.servers, of_server)]
            header = header._replace(square=None if squares[0] is None else sum(squares))
        calls = zip(self.servers, self.states, of_server)
        self._keep([server.update(state, header, *flats) for server, state, flats in calls])

    def _keep(self, values: Sequence[Any]) -> None:
        self.states, self.given, self.message, sizes = map(list, zip(*values))
        self.nbytes = sum(given for given, _ in sizes), sum(message for _, message in sizes)

    async def save(self, record: Mapping[str, Any]) -> None:
        self.saved = record

    async def load(self) -> Mapping[str, Any] | None:
        return None


class LocalDoor:
    """Calls a coordinator in the thread of its event loop."""

    is_first = True

    def __init__(self, coordinator: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.coordinator, self._loop = coordinator, loop

    def call(self, method: str, *args: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self.coordinator, method)(*args), self._loop).result(120)

    def put(self, value: Any) -> list[Any]:
        return [jax.tree.map(lambda x: x.copy() if hasattr(x, "copy") else x, value)]  # as a store does

    def get(self, refs: list[Any], by_first: bool = False) -> list[Any]:
        return refs


class LocalServer:
    """A coordinator with its servers. Use as a context manager.

    Attributes:
        log: its records.
    """

    def __init__(
        self, config: Config, now: Callable[[], float] = time.monotonic, save_every: int | None = None
    ) -> None:
        islands, sync = config.islands, config.sync
        self.log: list[dict[str, Any]] = []
        self.servers = LocalServers(islands.servers)
        if sync.strategy == "gossip":
            self.coordinator: Any = GossipCoordinator(islands, sync, self.log.append, now)
        elif islands.servers:
            policy = make_policy(sync.strategy, sync.stale.bound, islands)
            self.coordinator = Coordinator(islands, policy, self.servers, save_every, self.log.append, now)
        else:
            self.coordinator = PeerCoordinator(islands, sync.interval, self.log.append, now)
        self._loop = asyncio.new_event_loop()
        self.door = LocalDoor(self.coordinator, self._loop)

    def __enter__(self) -> LocalServer:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def pushes(self) -> list[dict[str, Any]]:
        """The records of pushes."""
        return [record for record in self.log if record["event"] == "push"]


def island_program(config: Config, mesh: Mapping[str, int], first: int) -> Program:
    """The program of an island on as many devices as its mesh has places, from the first one on."""
    count = 1
    for size in mesh.values():
        count *= size
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(mesh))})
    return build_program(island_config(config), None, jax.devices()[first : first + count], tiny_net.rows(0))


def agreed(state: dict[str, Any]) -> Any:
    """What the islands agree on in the state of one, on the host."""
    sync = state.get("sync", {})
    found = sync["agreed"] if "agreed" in sync else sync["own"]["outer"] if "own" in sync else state["params"]
    return jax.device_get(found)


class Rows:
    """The rows of tiny_net as data."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def batch(self, step: int, rows: Any = None) -> dict[str, Any]:
        batch = tiny_net.rows(step, **self._options)
        return {name: value[slice(None) if rows is None else rows] for name, value in batch.items()}


def train_islands(
    config: Config, meshes: Sequence[Mapping[str, int]], server: LocalServer, data: Any = None,
    pauses: Callable[[int, int], float] | None = None,
) -> list[tuple[list[float], dict[str, Any]]]:  # fmt: skip
    """Trains all islands, each on its devices. Returns (losses, state) of each.

    Args:
        config: of the run.
        meshes: of each island.
        server: that they agree through.
        data: whose rows they share.
        pauses: (island, step) -> seconds that the island sleeps before the step.
    """
    data, firsts = data or Rows(), [0]
    for mesh in meshes:
        size = 1
        for value in mesh.values():
            size *= value
        firsts.append(firsts[-1] + size)
    programs = [island_program(config, mesh, first) for mesh, first in zip(meshes, firsts)]

    def train(index: int) -> tuple[list[float], dict[str, Any]]:
        program = programs[index]
        island = open_island(config, program, index, server.door)
        island.client.join()
        program = replace(program, synchronizer=island)
        rows = program.config.data.global_batch
        place = Placer(IslandRows(data, index, rows).batch, program.sharder, rows, False)
        state, losses = island.start(program.init()), []
        for step in range(config.steps):
            if pauses is not None:
                time.sleep(pauses(index, step))
            state, metrics = program.step_at(step)(state, place(step))
            losses.append(float(metrics["loss"]))
        island.client.leave()
        return losses, state

    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(train, range(len(meshes))))
