"""Key-value store of jax.distributed, which process 0 serves. Thread-safe; uses no device and no collective."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import jax


class KeyValueStore:
    """Entries under a prefix of the coordination service's key-value store.

    Args:
        prefix: path of the entries, such as `jaxtrain/save`.
        client: connection to the service; default: that of this process.
    """

    def __init__(self, prefix: str, client: Any = None) -> None:
        if client is None:
            from jax._src import distributed  # jax 0.10 has no public access to its key-value store

            client = distributed.global_state.client
        self._prefix, self._client = prefix, client

    def child(self, name: str | int) -> KeyValueStore:
        """Returns the store of the entries under `name`."""
        return KeyValueStore(f"{self._prefix}/{name}", self._client)

    def put(self, name: str, text: str = "", overwrite: bool = False) -> None:
        """Stores a value. Raises JaxRuntimeError if the name is taken (without `overwrite`) or the service is gone."""
        value = f"={text}"  # the service does not store empty values
        self._client.key_value_set(f"{self._prefix}/{name}", value, allow_overwrite=overwrite)

    def get(self, name: str) -> str | None:
        """Returns a value without waiting (0.2 ms on one machine); None if it is absent or the service is gone."""
        try:
            return self._client.key_value_try_get(f"{self._prefix}/{name}")[1:]
        except jax.errors.JaxRuntimeError:
            return None

    def wait(self, name: str, seconds: float) -> str | None:
        """Returns a value after waiting for it for at most `seconds`; None if it did not appear."""
        try:
            return self._client.blocking_key_value_get(f"{self._prefix}/{name}", max(1, int(1000 * seconds)))[1:]
        except jax.errors.JaxRuntimeError:
            return None

    def entries(self) -> dict[str, str]:
        """Returns all entries. Raises JaxRuntimeError if the service is gone."""
        entries = self._client.key_value_dir_get(f"{self._prefix}/")
        return {key.rpartition("/")[2]: value[1:] for key, value in entries}

    def clear(self) -> None:
        """Deletes all entries, if the service answers."""
        with suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_delete(f"{self._prefix}/")
