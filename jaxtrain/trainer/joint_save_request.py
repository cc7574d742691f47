"""Request to save a checkpoint that one of several processes receives and all meet at the same step."""

from __future__ import annotations

import time

import jax

from jaxtrain.distributed.agreed_step import AgreedStep
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.distributed.multihost import broadcast


class JointSaveRequest:
    """Request of a checkpoint by SIGUSR1. Every process creates one together, and calls it once a second in a thread.

    The process that receives the signal writes an entry into the key-value store, where the thread of every process
    finds it. Once all know of it, process 0 chooses the step.
    """

    def __init__(self) -> None:
        number = broadcast(time.time_ns() % 2**31)  # tells it from those of other runs of these processes
        self._messages = KeyValueStore(f"jaxtrain/save-request/{number}")
        self._index, self._others = jax.process_index(), range(1, jax.process_count())
        self._is_received = False
        self._number = 0  # of the request, the same on every process
        self._agreement: AgreedStep | None = None

    def receive(self) -> None:
        """Records the signal."""
        self._is_received = True

    def is_due(self, step: int) -> bool:
        """Returns whether all processes save after `step`. All call it after the same steps, in ascending order."""
        if self._agreement is None or not self._agreement.is_reached(step):
            return False
        self._is_received = False
        self._number += 1  # before the next line, which lets the thread look for the next request
        self._agreement = None
        return True

    def __call__(self) -> None:
        """Tells the other processes of a request, or learns of theirs."""
        if self._agreement is not None:
            return
        messages = self._messages.child(self._number)
        if self._is_received:
            messages.put("request", overwrite=True)
        if messages.get("request") is None:
            return
        if self._index:
            self._agreement = AgreedStep(messages, is_first=False)
            messages.put(f"heard-{self._index}", overwrite=True)
        elif all(messages.get(f"heard-{index}") is not None for index in self._others):
            self._agreement = AgreedStep(messages, is_first=True)
