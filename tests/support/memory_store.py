"""Consensus store in memory, with the revisions and leases of etcd: one process, one order of all requests."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtrain.distributed.store_types import Compare, Put, StoredValue, StoreError


class MemoryStore:
    """Store whose leases end when a test says so; `is_reachable` False makes every request fail."""

    def __init__(self) -> None:
        self.values: dict[str, tuple[StoredValue, int]] = {}  # key -> value, lease
        self.revision, self.leases, self._next_lease = 1, set[int](), 1
        self.is_reachable = True

    def snapshot(self) -> tuple:
        """Returns the content, hashable; `restored` makes a store of it."""
        return tuple(sorted(self.values.items())), self.revision, frozenset(self.leases), self._next_lease

    @classmethod
    def restored(cls, snapshot: tuple) -> MemoryStore:
        store = cls()
        values, store.revision, leases, store._next_lease = snapshot
        store.values, store.leases = dict(values), set(leases)
        return store

    def get(self, key: str) -> StoredValue | None:
        self._check()
        return self.values[key][0] if key in self.values else None

    def transact(self, compare: Sequence[Compare], put: Sequence[Put]) -> int | None:
        self._check()
        for item in compare:
            value = self.values.get(item.key)
            found = 0 if value is None else value[0].create_revision if item.is_created else value[0].mod_revision
            if found != item.revision:
                return None
        self.revision += 1
        for item in put:
            created = self.values[item.key][0].create_revision if item.key in self.values else self.revision
            self.values[item.key] = StoredValue(item.value, created, self.revision), item.lease
        return self.revision

    def grant_lease(self, seconds: float) -> int:
        del seconds
        self._check()
        self._next_lease += 1
        self.leases.add(self._next_lease - 1)
        return self._next_lease - 1

    def renew_lease(self, lease: int) -> bool:
        self._check()
        return lease in self.leases

    def revoke_lease(self, lease: int) -> None:
        self._check()
        self.leases.discard(lease)
        self.values = {key: (value, of) for key, (value, of) in self.values.items() if of != lease}

    def _check(self) -> None:
        if not self.is_reachable:
            raise StoreError("not reachable")
