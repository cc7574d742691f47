"""Requests that any of several processes makes, and all carry out after the same step, a few seconds later."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import jax

from jaxtrain.distributed.agreed_step import AgreedStep
from jaxtrain.distributed.kv_store import KeyValueStore
from jaxtrain.distributed.multihost import broadcast
from jaxtrain.exit_codes import ERROR
from jaxtrain.trainer.requests import Request, Requests

PATIENCE = 5.0  # seconds in which the others must hear why a process ends
POLL = 0.05  # seconds between looks at their answers


class JointRequests(Requests):
    """Requests of a run of several processes. Each creates one together, and calls it once a second in a thread.

    The first of them to write into the key-value store is the next one for all. Once all know of it, process 0 chooses
    the step. A process that fails writes why, so that the others end, too, where no launcher ends them.
    """

    def __init__(self) -> None:
        super().__init__()
        number = broadcast(time.time_ns() % 2**31)  # tells it from those of other runs of these processes
        self._messages = KeyValueStore(f"jaxtrain/request/{number}")
        self._failures = KeyValueStore(f"jaxtrain/failure/{number}")
        self._index, self._others = jax.process_index(), range(1, jax.process_count())
        self._number = 0  # of the request, the same on every process
        self._agreed: tuple[Request, AgreedStep] | None = None
        self._is_failing = False

    def due(self, step: int) -> list[Request]:
        """Returns the request that all carry out after `step`, or nothing."""
        if self._agreed is None or not self._agreed[1].is_reached(step):
            return []
        request, _ = self._agreed
        self._pending = [other for other in self._pending if other != request]
        self._number += 1  # before the next line, which lets the thread look for the next request
        self._agreed = None
        return [request]

    def __call__(self) -> None:
        """Tells the other processes of a request or a failure, or learns of theirs."""
        self._look_for_failure()
        if self._agreed is not None:
            return
        messages = self._messages.child(self._number)
        text = messages.get("request")
        if text is None and self._pending:
            with suppress(jax.errors.JaxRuntimeError):  # another process was first
                messages.put("request", json.dumps(asdict(self._pending[0])))
            text = messages.get("request")
        if text is None:
            return
        request = Request(**json.loads(text))
        if self._index:
            self._agreed = request, AgreedStep(messages, is_first=False)
            messages.put(f"heard-{self._index}", overwrite=True)
        elif all(messages.get(f"heard-{index}") is not None for index in self._others):
            self._agreed = request, AgreedStep(messages, is_first=True)

    def report_failure(self, text: str) -> None:
        """Tells the other processes why this one ends, and waits until they know, for at most 5 s."""
        self._is_failing = True
        others = set(range(jax.process_count())) - {self._index}
        until = time.monotonic() + PATIENCE
        with suppress(jax.errors.JaxRuntimeError):
            self._failures.put(f"failed-{self._index}", text)
            while time.monotonic() < until:
                known = self._failures.entries()
                if all(f"heard-{index}" in known or f"failed-{index}" in known for index in others):
                    return
                time.sleep(POLL)

    def _look_for_failure(self) -> None:
        """Ends this process if another one has failed: it would wait for it in a collective."""
        try:
            found = self._failures.entries()
        except jax.errors.JaxRuntimeError:
            return
        failed = sorted(name for name in found if name.startswith("failed-"))
        if not failed or self._is_failing:
            return
        self._failures.put(f"heard-{self._index}", overwrite=True)
        where = failed[0].removeprefix("failed-")
        print(f"jaxtrain: process {where} ends, and this one with it: {found[failed[0]]}", file=sys.stderr, flush=True)
        os._exit(ERROR)
