"""Words that the processes of a run leave one another, for any thread: no device and no collective is involved."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax


class Coordinator:
    """A board kept by the coordination service of jax.distributed: no device and no collective is involved."""

    PREFIX = "jaxtrain/pace/"

    def __init__(self) -> None:
        from jax._src import distributed  # no public way to its key-value store in jax 0.10

        self._client: Any = distributed.global_state.client

    def put(self, process: int, text: str) -> None:
        self._client.key_value_set(f"{self.PREFIX}{process}", text, allow_overwrite=True)

    def all(self) -> Mapping[int, str]:
        found = self._client.key_value_dir_get(self.PREFIX)
        return {int(key.rpartition("/")[2]): text for key, text in found}


class Notes:
    """A folder of the key-value store of jax.distributed, which process 0 keeps."""

    def __init__(self, folder: str, client: Any = None) -> None:
        """`client`: of the store; default: this process's."""
        if client is None:
            from jax._src import distributed  # no public way to its key-value store in jax 0.10

            client = distributed.global_state.client
        self._folder, self._client = folder, client

    def within(self, name: str | int) -> Notes:
        """A folder in this one."""
        return Notes(f"{self._folder}/{name}", self._client)

    def put(self, name: str, text: str = "") -> None:
        """Once for a name. Who looks after this returned finds it. Raises where the store is gone, and so the run."""
        self._client.key_value_set(f"{self._folder}/{name}", f"={text}")  # an empty value is not stored

    def look(self, name: str) -> str | None:
        """Returns the value, at once (0.2 ms on one machine); None also where the store does not answer."""
        try:
            return self._client.key_value_try_get(f"{self._folder}/{name}")[1:]
        except jax.errors.JaxRuntimeError:
            return None

    def wait(self, name: str, seconds: float) -> str | None:
        """Waits this many seconds for the value and returns it."""
        try:
            return self._client.blocking_key_value_get(f"{self._folder}/{name}", max(1, int(1000 * seconds)))[1:]
        except jax.errors.JaxRuntimeError:
            return None

    def clear(self) -> None:
        """Deletes all that is in this folder, if the store answers."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(f"{self._folder}/")
