"""Times the loop and makes the record of a logged step. No JAX."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.observe.flops import Flops, utilisation
from jaxtrain.observe.peak import Peak


class Meter:
    """Step time, throughput, data wait, utilisation and memory between two records.

        meter = Meter(tokens=global_batch * sequence, devices=8, flops=flops, peak=peak)
        with meter.data(): batch = next(batches)
        record = meter.record(step, {"loss": 2.3, ...})
        with meter.pause(): evaluate()

    The first interval holds compilation: it ends with `compiled` once the first step is done, else with the first
    record, which then has no rates. Time inside `pause` (validation, a blocking save) counts for nothing.
    """

    def __init__(
        self,
        tokens: int,
        devices: int,
        *,
        step: int = 0,
        flops: Flops | None = None,
        peak: Peak | None = None,
        memory: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """
        Args:
            tokens: positions (items) of a global batch, padding included.
            devices: devices of all processes.
            step: steps finished before, on resume.
            flops, peak: for MFU and HFU, left out of the record without them.
            memory: bytes in use, see `device_memory`.
            clock: seconds.
        """
        self.tokens, self.devices, self.flops, self.peak = tokens, devices, flops, peak
        self.constants: dict[str, float] = {}  # in every record
        self._memory, self._clock = memory or process_memory, clock
        self._since, self._step, self._waited, self._first = clock(), step, 0.0, True

    @contextmanager
    def data(self) -> Iterator[None]:
        """Time in here is waiting for data."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited += self._clock() - began

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time in here is not training."""
        began = self._clock()
        try:
            yield
        finally:
            self._since += self._clock() - began

    def compiled(self, step: int) -> float:
        """Ends the interval that holds compilation, at `step` finished steps; returns its seconds."""
        now, since = self._clock(), self._since
        self._since, self._step, self._waited, self._first = now, step, 0.0, False
        return now - since

    def record(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The record of `step` (steps finished), over the steps since the last one.

        Adds to the metrics: `step`; `constants`; `tokens`, of all steps so far (positions, replacing a metric of that
        name); `step_time` and `data_wait`, seconds per step; `tokens_per_sec`, `tokens_per_sec_per_device`; `mfu`,
        `hfu`, 0 to 1; `memory`, bytes: the peak of the fullest local device, or this process's where devices do not
        tell.
        """
        now, steps = self._clock(), step - self._step
        elapsed, waited = now - self._since, self._waited
        record: dict[str, Any] = {"step": step, **metrics, **self.constants, "tokens": step * self.tokens}
        if not self._first and steps > 0 and elapsed > 0:
            rate = steps * self.tokens / elapsed
            record |= {"tokens_per_sec": rate, "tokens_per_sec_per_device": rate / self.devices}
            record |= {"step_time": elapsed / steps, "data_wait": waited / steps}
            record |= self._utilisation(rate / self.devices)
        used = self._memory()
        self._since, self._step, self._waited, self._first = now, step, 0.0, False
        return record if used is None else record | {"memory": used}

    def _utilisation(self, rate: float) -> dict[str, float]:
        if self.flops is None or self.peak is None:
            return {}
        shares = {
            "mfu": utilisation(self.flops.model, rate, self.peak.flops),
            "hfu": utilisation(self.flops.hardware, rate, self.peak.flops),
        }
        return {name: share for name, share in shares.items() if share is not None}


def device_memory(devices: Sequence[Any]) -> Callable[[], int | None]:
    """A reader of the peak bytes in use on the fullest of these jax.Devices, else of `process_memory`."""

    def read() -> int | None:
        stats = [device.memory_stats() or {} for device in devices]
        peaks = [s.get("peak_bytes_in_use", s.get("bytes_in_use")) for s in stats]
        known = [p for p in peaks if p is not None]
        return max(known) if known else process_memory()

    return read


def process_memory() -> int | None:
    """Resident bytes of this process, or None where /proc does not exist."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return None
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
