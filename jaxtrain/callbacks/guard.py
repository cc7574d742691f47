"""What the loop does about steps that went wrong: goes on, goes back, or ends the run.

Everything follows from the metrics of a step, which are of the whole batch: all processes decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import guards
from jaxtrain.data.skipped_batches import Skips, batch_of, merged
from jaxtrain.distributed.agreement import agreed
from jaxtrain.errors import DivergedError
from jaxtrain.precision.loss_scaling import SMALLEST
from jaxtrain.trackers.base import Observers

PATIENCE = 20  # steps in a row without an update that end a run
RETURNS = 3  # to one and the same checkpoint
READ = ("loss", "grad_norm", "skipped", "spike", "loss_scale")

State = dict[str, Any]


class Guard:
    """Counts skipped steps, and goes back before a spike.

    Attributes:
      skips: ranges of batches that are passed over; in the manifest of every checkpoint, so that a resumed run passes
        over the same.
      skipped: steps without an update since the start.
      spike: step of a spike that training has to go back for, or None.
    """

    def __init__(
        self, spec: guards.Guard, checkpoints: Checkpointer, observers: Observers, manifest: dict[str, Any]
    ) -> None:
        self._spikes, self._checkpoints, self._observers = spec.spikes, checkpoints, observers
        self._manifest, self._patience = manifest, PATIENCE
        self._in_row, self._returns = 0, dict[int, int]()
        self.skipped, self.spike = 0, None

    @property
    def skips(self) -> Skips:
        return merged(self._manifest.get("skips", ()))

    def start(self, left: int) -> None:
        """`left`: steps to come. Where they are few, fewer bad ones in a row end the run."""
        self._patience = max(1, min(PATIENCE, left))

    def read(self, metrics: Mapping[str, jax.Array]) -> dict[str, float]:
        """The few numbers of a finished step that it decides by; waits for that step."""
        found = jax.device_get({name: metrics[name] for name in READ if name in metrics})
        return {name: float(value) for name, value in found.items()}

    def see(self, done: int, values: Mapping[str, float]) -> None:
        """Takes note of a finished step.

        Raises:
            DivergedError: too many in a row made no update.
        """
        if self._spikes and not self._spikes.skips and values["spike"] > self._spikes.threshold and not self.spike:
            self.spike = done
            self._say("spike", done, values)
        if not values["skipped"]:
            self._in_row = 0
            return
        self.skipped += 1
        if values.get("loss_scale", 0.0) > SMALLEST and math.isfinite(values["loss"]):
            return  # float16: overflown, and the scale is lowered
        self._in_row += 1
        self._say("skipped", done, values)
        if self._in_row >= self._patience:
            said = f"{self._in_row} steps in a row made no update; {_said(values)} at step {done}"
            raise DivergedError(f"{said}; {self.last_good()}")

    def admits(self, must: bool) -> bool:
        """Whether the state is to be saved: not while training has to go back, nor, unless it must, while steps are
        being skipped, which may be the end. A state itself is always that of the last good update."""
        return self.spike is None and (must or not self._in_row)

    def last_good(self) -> str:
        """What there is to go on from, in words."""
        self._checkpoints.wait()
        kept = self._checkpoints.latest()
        return "no checkpoint was written" if kept is None else f"checkpoint {kept} is the last good one"

    def go_back(self, state: State, done: int, abstract: State) -> tuple[State, int]:
        """The state of a checkpoint before the spike, and its step; the batches around the spike are passed over now.

        It is the newest one so many steps before, else the oldest; without any training goes on as it is.

        Raises:
            DivergedError: it was that checkpoint too often.
        """
        spike, self.spike = self.spike, None
        if spike is None or self._spikes is None:
            return state, done
        chosen = self._before(spike)
        if chosen is None:
            self._observers.event("warning", text=f"no checkpoint before the spike at step {spike}: training goes on")
            return state, done
        self._returns[chosen] = self._returns.get(chosen, 0) + 1
        if self._returns[chosen] > RETURNS:
            text = f"spikes again at step {spike}, after {RETURNS} returns to checkpoint {chosen}"
            raise DivergedError(f"{text}; that is the last good one")
        middle, over = batch_of(spike - 1, self.skips), self._spikes.over
        first = max(middle - over // 2, batch_of(chosen, self.skips))
        passed = (first, middle + over - over // 2)
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # room for what takes its place
        self._checkpoints.rewind(chosen)
        state, _ = self._checkpoints.restore(None, abstract)
        self._manifest["skips"] = [list(part) for part in merged(self.skips, passed)]
        done = int(jax.device_get(state["step"]))
        self._observers.rewind(done)
        self._observers.event("rollback", step=done, spike=spike, batches=f"{passed[0]} to {passed[1] - 1} passed over")
        return state, done

    def _before(self, spike: int) -> int | None:
        """The checkpoint to go back to; the same on every process."""
        self._checkpoints.wait()
        steps = [info.step for info in self._checkpoints.steps() if info.step < spike]
        early = [step for step in steps if self._spikes and step <= spike - self._spikes.back]
        chosen = agreed(early[-1] if early else steps[0] if steps else -1)
        return None if chosen < 0 else chosen

    def _say(self, kind: str, done: int, values: Mapping[str, float]) -> None:
        self._observers.event(
            kind, step=done, **{name: values[name] for name in READ[:2] + READ[3:4] if name in values}
        )


def _said(values: Mapping[str, float]) -> str:
    z = f", z-score {values['spike']:.3g}" if math.isfinite(values.get("spike", math.nan)) else ""
    return f"loss {values['loss']}, gradient norm {values['grad_norm']}{z}"
