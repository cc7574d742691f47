"""Agreement of a launched job's processes in a consensus store: who leads, which generation runs, what is saved.

PREFIX/leader        address of the leader, bound to its lease; created at the revision that numbers the leadership
PREFIX/state         what the leader saves for the next one
PREFIX/generation    number of the newest generation; its workers' saves are compared to the revision of its last write
PREFIX/saved         step and folder of the newest checkpoint that counts

Every write is one transaction that first compares a revision, so a leader or worker that was deposed, however late it
wakes, changes nothing: its revision is no longer the current one. No clock is compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.distributed.store_types import Compare, ConsensusStore, Put
from jaxtrain.errors import CheckpointError


def job_prefix(directory: Path) -> str:
    """Returns what the keys of a run directory's job begin with."""
    return f"/jaxtrain{directory.absolute()}"


class DeposedError(Exception):
    """Another leader has followed this one."""


class FencedError(CheckpointError):
    """A newer generation has started: saves of this one do not count."""


@dataclass(frozen=True)
class JobStore:
    """Keys of one job.

    Args:
        store: the consensus store.
        prefix: begins the names of the keys; one for each run directory.
    """

    store: ConsensusStore
    prefix: str

    def lead(self, host: str, port: int, lease: int) -> int | None:
        """Becomes the leader if nobody leads. Returns the revision of the leadership, or None."""
        key, value = f"{self.prefix}/leader", json.dumps([host, port])
        return self.store.transact([Compare(key, 0, is_created=True)], [Put(key, value, lease)])

    def leader(self) -> tuple[str, int] | None:
        """Returns host and port of the leader, or None if nobody leads."""
        found = self.store.get(f"{self.prefix}/leader")
        return None if found is None else tuple(json.loads(found.value))

    def load_state(self) -> tuple[str | None, int]:
        """Returns the state that the last leader saved, and the revision at which it did; (None, 0) for none."""
        found = self.store.get(f"{self.prefix}/state")
        return (None, 0) if found is None else (found.value, found.mod_revision)

    def save_state(self, revision: int, after: int, state: str) -> int:
        """Saves the state of the leader of this revision.

        Args:
            revision: number of the leadership.
            after: revision at which the last state was saved. A request that the leader sent again, because a member of
                the cluster did not answer, has no effect when that one wakes.
            state: differs from the last one.

        Returns:
            the revision at which it was saved.

        Raises:
            DeposedError: another leader has followed the one of this revision.
        """
        return self._put_as_leader(revision, after, Put(f"{self.prefix}/state", state))

    def begin_generation(self, revision: int, after: int, generation: int, state: str) -> int:
        """Saves the state as `save_state` does, and ends the right of earlier generations to save.

        Returns:
            the revision at which it did. With it saves of this generation are compared, see `record_save`.
        """
        puts = Put(f"{self.prefix}/state", state), Put(f"{self.prefix}/generation", str(generation))
        return self._put_as_leader(revision, after, *puts)

    def generation(self) -> tuple[int, int]:
        """Returns the number of the newest generation and that with which its saves are compared; zeros for none."""
        found = self.store.get(f"{self.prefix}/generation")
        return (0, 0) if found is None else (int(found.value), found.mod_revision)

    def record_save(self, fence: int, step: int, folder: str) -> None:
        """Makes a checkpoint count, if the generation that wrote it is still the newest one.

        Args:
            fence: number that `begin_generation` returned.
            step: step of the checkpoint.
            folder: name of its folder.

        Raises:
            FencedError: a newer generation has started.
            StoreError: the store does not answer; it may have taken effect, and may be tried again.
        """
        compare = [Compare(f"{self.prefix}/generation", fence)]
        if self.store.transact(compare, [Put(f"{self.prefix}/saved", json.dumps([step, folder]))]) is None:
            raise FencedError(f"checkpoint {step} does not count: a newer generation of this job has started")

    def last_save(self) -> tuple[int, str] | None:
        """Returns step and folder of the newest checkpoint that was recorded, or None."""
        found = self.store.get(f"{self.prefix}/saved")
        return None if found is None else tuple(json.loads(found.value))

    def _put_as_leader(self, revision: int, after: int, *puts: Put) -> int:
        """Writes keys, of which the first is the state, for the leader of this revision."""
        key = puts[0].key
        compare = [Compare(f"{self.prefix}/leader", revision, is_created=True), Compare(key, after)]
        written = self.store.transact(compare, puts)
        if written is None:
            found = self.store.get(key)
            if found is None or found.value != puts[0].value:
                raise DeposedError(f"leadership {revision} has ended")
            return found.mod_revision  # an earlier try took effect, but its answer was lost
        return written
