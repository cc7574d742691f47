"""Leadership as a lease in a consensus store, for jobs that outlive the loss of the node that leads."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.distributed.etcd import SCHEME, open_etcd
from jaxtrain.distributed.job_store import JobStore, job_prefix
from jaxtrain.distributed.store_types import StoreError
from jaxtrain.io.system import boot_time
from jaxtrain.launch.leadership.link import Address
from jaxtrain.launch.leadership.state import LeaderState

RENEWALS = 4  # of a lease in its time to live
STEP_DOWN = 0.75  # share of that time without a renewal after which a leader stops to lead


def open_job_store(url: str, directory: Path) -> JobStore:
    """Opens the keys of a job. Raises UserError.

    Args:
        url: `etcd://HOST:PORT,HOST:PORT,...`.
        directory: RUN_DIR, the same on all nodes.
    """
    return JobStore(open_etcd(url), job_prefix(directory))


def newest_decision(jobs: JobStore) -> int:
    """Returns the store's revision of the last state that a leader saved; that of all future if it does not answer."""
    try:
        return jobs.load_state()[1]
    except StoreError:
        return sys.maxsize


def own_address(store_url: str) -> str:
    """Returns the address of this machine from which it reaches the store."""
    host, _, port = store_url.removeprefix(SCHEME).partition(",")[0].rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((host.strip("[]"), int(port)))
        return probe.getsockname()[0]


@dataclass(frozen=True)
class StoredLeader:
    """Finder of the leader that the store names, for an agent."""

    jobs: JobStore
    is_fenced = True

    def find(self) -> Address:
        """Returns the leader's address. Raises OSError if nobody leads or the store does not answer."""
        leader = self.jobs.leader()
        if leader is None:
            raise OSError(None, "nobody leads yet")
        return leader

    def newest_generation(self) -> int:
        """Returns the number of the newest generation; 0 if the store does not answer."""
        try:
            return self.jobs.generation()[0]
        except StoreError:
            return 0


class LeaderLease:
    """Lease of the leadership, renewed in a thread until `close`. Create it with `campaign`.

    Attributes:
        revision: number of the leadership.
        generation: number of the newest generation in the store.
        saved_at: the store's revision of the newest state.
    """

    def __init__(self, jobs: JobStore, revision: int, lease: int, seconds: float, granted: float) -> None:
        self.revision, self._jobs, self._lease, self._seconds = revision, jobs, lease, seconds
        self._renewed, self._is_lost = granted, threading.Event()
        self.generation, self._fence = jobs.generation()
        self._saved, self.saved_at = jobs.load_state()
        threading.Thread(target=self._renew, name="leader-lease", daemon=True).start()

    def load(self) -> LeaderState | None:
        """Returns the state that the last leader saved; None if there is none."""
        with contextlib.suppress(ValueError):  # of another version
            return None if self._saved is None else LeaderState.from_text(self._saved)

    def save(self, state: LeaderState) -> int:
        """Saves the state, see `Leadership`. A new generation ends the right of earlier ones to save."""
        if state.generation != self.generation:
            saved_at = self._jobs.begin_generation(self.revision, self.saved_at, state.generation, state.as_text())
            self.generation, self._fence = state.generation, saved_at
        else:
            saved_at = self._jobs.save_state(self.revision, self.saved_at, state.as_text())
        self.saved_at = saved_at
        return self._fence

    def is_valid(self) -> bool:
        """Returns whether the lease was renewed in time. A guess by this machine's clock; the store knows better."""
        return not self._is_lost.is_set() and boot_time() - self._renewed < STEP_DOWN * self._seconds

    def close(self) -> None:
        """Gives the leadership up, so that another one can follow at once."""
        self._is_lost.set()
        with contextlib.suppress(StoreError):
            self._jobs.store.revoke_lease(self._lease)

    def _renew(self) -> None:
        while not self._is_lost.wait(self._seconds / RENEWALS / 2):
            begun = boot_time()
            try:
                if not self._jobs.store.renew_lease(self._lease):
                    self._is_lost.set()
                self._renewed = begun
            except StoreError:
                continue  # `is_valid` limits how long


def campaign(
    jobs: JobStore, address: Address, seconds: float, ended: threading.Event, sign_of_life: Callable[[], None]
) -> LeaderLease | None:
    """Waits until nobody leads, and leads. Returns None when `ended` is set.

    Args:
        jobs: store of the job.
        address: where this leader will listen.
        seconds: time to live of the lease.
        ended: set when the job is over for this node.
        sign_of_life: called while waiting.
    """
    while not ended.wait(min(1.0, seconds / RENEWALS / 2)):
        sign_of_life()
        with contextlib.suppress(StoreError):
            if jobs.leader() is None:
                begun, lease = boot_time(), jobs.store.grant_lease(seconds)
                try:
                    revision = jobs.lead(*address, lease)
                except StoreError:  # it may have taken effect
                    revision = None
                if revision is not None:
                    with contextlib.suppress(StoreError):
                        return LeaderLease(jobs, revision, lease, seconds, begun)
                jobs.store.revoke_lease(lease)
    return None
