"""The servers as Ray actors: values are objects in Ray's store, and an actor that fails is started again by Ray.

What a server holds is what its last call returned, which the coordinator owns. So nothing is lost with the process of a
server: Ray starts it again and repeats the call.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.packages import import_optional
from jaxtrain.islands.messages import Hello, RefusedError
from jaxtrain.islands.partition import Parts, partition
from jaxtrain.islands.server.coordinator import Held
from jaxtrain.islands.server.process import ServerProcess
from jaxtrain.islands.server.rules import Header

ray = import_optional("ray", "a server of islands", "islands")
RECORD = "newest.json"
ENVIRONMENT = {"env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}}
# On the head node, so that a node of an island that fails takes nothing of the others with it.
ON_HEAD = {"node:__internal_head__": 0.001}


class RayServers:
    """Servers as actors.

    Args:
        count: their number.
        folder: where they save.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.parts: list[Parts] = []
        self.given: list[Any] = []
        self.message: list[Any] = []
        self.nbytes = 0, 0
        self._count, self._folder = count, folder
        self._actors: list[Any] = []
        self._states: list[Any] = []

    async def open(self, hello: Hello) -> None:
        """Starts the actors."""
        self.parts, self._actors = partition(hello.specs, self._count), []
        # A repeated call gives the same values, because they are functions of what they are given.
        make: Any = ray.remote(ServerProcess)
        options = make.options(
            num_cpus=0, resources=ON_HEAD, max_restarts=-1, max_task_retries=-1, runtime_env=ENVIRONMENT
        )
        for parts in self.parts:
            specs = {path: part.spec(hello.specs[path]) for path, part in parts.items()}
            self._actors.append(options.remote(hello.rule, specs, hello.bits))
        await asyncio.gather(*(actor.pid.remote() for actor in self._actors))

    async def begin(self, refs: list[list[Any]]) -> None:
        """Takes the initial values."""
        held = await self.hold(refs)
        calls = [actor.begin.options(num_returns=4) for actor in self._actors]
        await self._keep([call.remote(ref) for call, ref in zip(calls, held.refs)])

    async def hold(self, refs: list[list[Any]]) -> Held:
        """Copies a push: what an island has put is lost with it."""
        calls = [actor.hold.options(num_returns=2).remote(*each) for actor, each in zip(self._actors, refs)]
        finite = await asyncio.gather(*(is_finite for _, is_finite in calls))
        return Held([flat for flat, _ in calls], all(finite))

    async def update(self, header: Header, pushes: list[Held]) -> None:
        """Makes an update."""
        of_server = list(zip(*(held.refs for held in pushes)))
        if len(self._actors) > 1:
            calls = (actor.square.remote(header, *refs) for actor, refs in zip(self._actors, of_server))
            squares = await asyncio.gather(*calls)
            header = header._replace(square=None if squares[0] is None else sum(squares))
        calls = [actor.update.options(num_returns=4) for actor in self._actors]
        await self._keep([
            call.remote(state, header, *refs) for call, state, refs in zip(calls, self._states, of_server)
        ])  # fmt: skip

    async def _keep(self, calls: list[Any]) -> None:
        """Waits for new states, and takes them together."""
        sizes = await asyncio.gather(*(nbytes for *_, nbytes in calls))
        self._states, self.given, self.message, _ = map(list, zip(*calls))
        self.nbytes = sum(given for given, _ in sizes), sum(message for _, message in sizes)

    async def save(self, record: Mapping[str, Any]) -> None:
        """Saves all states, and then which ones are the newest."""
        version = record["version"]
        self._folder.mkdir(parents=True, exist_ok=True)
        files = [f"{version}-{index}.npz" for index in range(len(self._actors))]
        calls = zip(self._actors, self._states, files)
        try:
            await asyncio.gather(*(actor.save.remote(state, str(self._folder / file)) for actor, state, file in calls))
        except OSError as error:  # Ray's own, whose text is the traceback of the actor
            raise getattr(error, "cause", error) from None
        write_atomic(self._folder / RECORD, json.dumps({**record, "files": files}))
        for old in set(self._folder.glob("*.npz")) - {self._folder / file for file in files}:
            old.unlink(missing_ok=True)

    async def load(self) -> Mapping[str, Any] | None:
        """Reads the newest save."""
        try:
            record = json.loads((self._folder / RECORD).read_text())
        except FileNotFoundError:
            return None
        if len(record["files"]) != len(self._actors):
            message = f"islands.servers: {len(self._actors)}; expected {len(record['files'])}, as when {self._folder}"
            raise RefusedError(f"{message} was written")
        calls = [actor.load.options(num_returns=4) for actor in self._actors]
        await self._keep([call.remote(str(self._folder / file)) for call, file in zip(calls, record["files"])])
        return record
