"""Right of one generation of a launched job to save, which a consensus store takes away when the next one begins."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from jaxtrain.distributed.etcd import open_etcd
from jaxtrain.distributed.job_store import JobStore
from jaxtrain.distributed.store_types import StoreError

STORE_TIMEOUT = 60.0  # seconds that a generation which begins waits for its store
VARIABLE = "JAXTRAIN_SAVE_FENCE"


@dataclass(frozen=True)
class SaveFence:
    """Right of one generation to save, as the launcher describes it to a worker.

    Args:
        store: URL of the consensus store.
        prefix: begins the names of the job's keys.
        generation: number of the generation.
        number: what the store compares with the newest generation's.
    """

    store: str
    prefix: str
    generation: int
    number: int

    def record(self, step: int, folder: str) -> None:
        """Makes a checkpoint count. Raises FencedError if a newer generation has started, or StoreError."""
        self._jobs().record_save(self.number, step, folder)

    def last_save(self) -> tuple[int, str] | None:
        """Returns step and folder of the newest save that was recorded; None for none.

        Raises:
            StoreError: the store does not answer within `STORE_TIMEOUT`.
        """
        until = time.monotonic() + STORE_TIMEOUT
        while True:
            try:
                return self._jobs().last_save()
            except StoreError:
                if time.monotonic() > until:
                    raise
                time.sleep(1.0)

    def _jobs(self) -> JobStore:
        return JobStore(open_etcd(self.store), self.prefix)

    def as_text(self) -> str:
        """Encodes the fence for the environment variable `VARIABLE` of a worker."""
        return json.dumps(asdict(self))


def save_fence(environ: Mapping[str, str] = os.environ) -> SaveFence | None:
    """Returns the fence in the environment; None for a job without a store."""
    text = environ.get(VARIABLE)
    return SaveFence(**json.loads(text)) if text else None
