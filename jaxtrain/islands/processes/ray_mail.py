"""Messages between the processes of an island, in an actor that ends with the first of them."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import jax

from jaxtrain.distributed.multihost import broadcast
from jaxtrain.io.packages import import_optional
from jaxtrain.islands.client import Door
from jaxtrain.islands.processes.process_door import ProcessDoor
from jaxtrain.islands.ray_engine import LostServerError
from jaxtrain.islands.server.ray_servers import ENVIRONMENT

ray = import_optional("ray", "an island", "islands")


class MailActor:
    """Keeps messages until they are taken."""

    def __init__(self) -> None:
        self._messages: dict[Any, asyncio.Future[Any]] = {}
        self._readers: dict[Any, int] = {}

    async def post(self, name: Any, value: Any, readers: int) -> None:
        """Takes a message that so many read."""
        self._readers[name] = readers
        self._message(name).set_result(value)

    async def take(self, name: Any) -> Any:
        """Returns a message. Waits for it."""
        value = await self._message(name)
        self._readers[name] -= 1
        if not self._readers[name]:
            del self._readers[name], self._messages[name]
        return value

    def _message(self, name: Any) -> asyncio.Future[Any]:
        return self._messages.setdefault(name, asyncio.get_running_loop().create_future())


class RayMail:
    """Messages between the processes of an island, which all make one at the same time.

    Args:
        island: index of the island.
        namespace: of the run.
    """

    def __init__(self, island: int, namespace: str) -> None:
        token, self._island = secrets.randbelow(2**31), island
        if jax.process_index() == 0:
            node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=True
            )
            options = ray.remote(MailActor).options(
                name=f"island-{island}-{token}", num_cpus=0, max_concurrency=1000, scheduling_strategy=node,
                runtime_env=ENVIRONMENT,
            )  # fmt: skip
            self._actor = options.remote()
            broadcast(token)
        else:
            self._actor = ray.get_actor(f"island-{island}-{broadcast(token)}", namespace)

    def post(self, name: Any, value: Any, readers: int) -> None:
        """Leaves a message that so many processes take."""
        self._actor.post.remote(name, value, readers)

    def take(self, name: Any) -> Any:
        """Returns a message. Raises LostServerError if the first process has ended."""
        try:
            return ray.get(self._actor.take.remote(name))
        except ray.exceptions.RayActorError:
            raise LostServerError(f"islands: the first process of island {self._island} has ended") from None


def process_door(door: Door, island: int, namespace: str) -> Door:
    """Returns the door of a process of an island, from one of its own.

    Args:
        door: of the process.
        island: index of the island.
        namespace: of the run.
    """
    if jax.process_count() == 1:
        return door
    return ProcessDoor(door, RayMail(island, namespace), jax.process_index(), jax.process_count())
