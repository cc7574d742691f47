"""Types of a consensus store: keys with revisions, leases, and transactions that compare before they write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class StoreError(OSError):
    """The store cannot be reached, or has no majority. Whether a request took effect is not known."""


class StoredValue(NamedTuple):
    """Value of a key, and the store's revisions at which the key was created and last written."""

    value: str
    create_revision: int
    mod_revision: int


class Compare(NamedTuple):
    """Condition of a transaction: the key was created, or last written, at this revision; 0: it does not exist."""

    key: str
    revision: int
    is_created: bool = False


class Put(NamedTuple):
    """Value that a transaction writes; the key is deleted when its lease ends. Lease 0: never."""

    key: str
    value: str
    lease: int = 0


class ConsensusStore(Protocol):
    """Store that several machines agree on, such as `EtcdStore`. All methods raise StoreError."""

    def get(self, key: str) -> StoredValue | None:
        """Returns the value of a key, or None."""
        ...

    def transact(self, compare: Sequence[Compare], put: Sequence[Put]) -> int | None:
        """Writes keys at once if all comparisons hold. Returns the store's revision after it, None if one does not."""
        ...

    def grant_lease(self, seconds: float) -> int:
        """Returns a new lease: keys that are put with it are deleted when it is not renewed for `seconds`."""
        ...

    def renew_lease(self, lease: int) -> bool:
        """Renews a lease. Returns False if it has expired."""
        ...

    def revoke_lease(self, lease: int) -> None:
        """Ends a lease, which deletes its keys."""
        ...
