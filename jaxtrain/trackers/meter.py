"""Throughput, step time and utilization of logged steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.models.flops import Flops, utilization
from jaxtrain.planning.hardware.peak import Peak
from jaxtrain.trackers.goodput import STEPS, GoodputLedger


class Meter:
    """Computes step time, throughput, data wait, utilization and memory between two records from a ledger.

        meter = Meter(ledger, tokens=global_batch * sequence, devices=8, flops=flops, peak=peak)
        meter.end_compilation(1)
        record = meter.record(step, {"loss": 2.3, ...})

    Only step time counts: no validation, no save, no compiling. A record made before `end_compilation` has no rates.
    """

    def __init__(
        self,
        ledger: GoodputLedger,
        tokens: int,
        devices: int,
        *,
        flops: Flops | None = None,
        peak: Peak | None = None,
        memory: Callable[[], int | None] | None = None,
        unit: str = "tokens",
        trained: Callable[[int], float] = float,
    ):
        """Creates the meter.

        Args:
            ledger: time accounting of this process.
            tokens: positions of a global batch, padding included; or its samples.
            devices: number of devices of all processes.
            flops: for MFU and HFU; None leaves them out.
            peak: for MFU and HFU; None leaves them out.
            memory: returns bytes in use, see `device_memory`.
            unit: of `tokens`, `tokens` or `samples`, which names the throughput in records.
            trained: steps -> global batches that they train on.
        """
        self.unit = unit
        self.tokens, self.devices, self.flops, self.peak = tokens, devices, flops, peak
        self.constants: dict[str, float] = {}  # in every record
        self._trained = trained
        self._ledger, self._memory = ledger, memory or process_memory
        self._before: dict[str, float] | None = None  # the ledger's seconds at the last record
        self._step = 0

    def end_compilation(self, step: int) -> float:
        """Ends the compile phase after `step` finished steps; returns its seconds."""
        self._ledger.begin("compute")
        self._before, self._step = self._ledger.seconds(), step
        return self._before["compile"]

    def record(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Returns the record after `step` finished steps, over the steps since the last record.

        Adds to the metrics: `step`; `constants`; `tokens`, of all steps so far (positions, replacing a metric of that
        name); `step_time` and `data_wait`, seconds per step; `tokens_per_sec`, `tokens_per_sec_per_device`; `mfu`,
        `hfu`, 0 to 1; `memory`, bytes: the peak of the fullest local device, or of this process if devices do not
        report it. Of data that is no text, `samples` stand in place of `tokens`.
        """
        now, before, steps = self._ledger.seconds(), self._before, step - self._step
        record: dict[str, Any] = {"step": step, **metrics, **self.constants}
        record.pop("tokens", None)  # those of this step that have a target
        record[self.unit] = round(self._trained(step) * self.tokens)
        elapsed = 0.0 if before is None else sum(now[bucket] - before[bucket] for bucket in STEPS)
        if before is not None and steps > 0 and elapsed > 0:
            rate = (self._trained(step) - self._trained(self._step)) * self.tokens / elapsed
            record |= {f"{self.unit}_per_sec": rate, f"{self.unit}_per_sec_per_device": rate / self.devices}
            record |= {"step_time": elapsed / steps, "data_wait": (now["data"] - before["data"]) / steps}
            record |= self._utilization(steps * self.tokens / elapsed / self.devices)  # of all that is computed
        used = self._memory()
        self._before, self._step = now, step
        return record if used is None else record | {"memory": used}

    def _utilization(self, rate: float) -> dict[str, float]:
        if self.flops is None or self.peak is None:
            return {}
        shares = {
            "mfu": utilization(self.flops.model, rate, self.peak.flops),
            "hfu": utilization(self.flops.hardware, rate, self.peak.flops),
        }
        return {name: share for name, share in shares.items() if share is not None}


def device_memory(devices: Sequence[Any]) -> Callable[[], int | None]:
    """Returns a reader of the peak bytes in use on the fullest of these jax.Devices, else of `process_memory`."""

    def read() -> int | None:
        stats = [device.memory_stats() or {} for device in devices]
        peaks = [s.get("peak_bytes_in_use", s.get("bytes_in_use")) for s in stats]
        known = [p for p in peaks if p is not None]
        return max(known) if known else process_memory()

    return read


def process_memory() -> int | None:
    """Returns the resident bytes of this process, or None without /proc."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
