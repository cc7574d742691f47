"""Owner of the parts of a training run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxtrain.callbacks.base import Callback, CallbackList
from jaxtrain.checkpoint import Checkpointer, Committed
from jaxtrain.config import Config
from jaxtrain.core.evaluation import validate
from jaxtrain.core.placement import Placer, placer
from jaxtrain.core.program import Program, State
from jaxtrain.core.stage_timing import stage_costs
from jaxtrain.core.state import evaluated_parameters, non_trainable
from jaxtrain.data.replica_rows import ReplicaRows
from jaxtrain.data.skipped_batches import BatchRanges, batch_index, merge_ranges
from jaxtrain.distributed.multihost import broadcast
from jaxtrain.io.ticker import Ticker
from jaxtrain.models.model_def import leaks_in_one_line
from jaxtrain.pipeline.schedules.cost import schedule_cost
from jaxtrain.trackers.base import TrackerList
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trackers.goodput import GoodputLedger
from jaxtrain.trackers.meter import Meter
from jaxtrain.trainer.data.batch_reader import make_reader
from jaxtrain.trainer.data.place import check_can_go_back, data_files, restore_data
from jaxtrain.trainer.input_pipeline import BatchFeed
from jaxtrain.trainer.metric_values import numbers
from jaxtrain.trainer.requests import Request, Requests


@dataclass(eq=False)
class TrainingRun:
    """Parts of a training run; `jaxtrain.trainer.loop.fit` moves it forward.

    Attributes:
        config: config of the run.
        dir: run directory.
        program: compiled step, evaluation and initialisation.
        data: training data.
        eval_sets: prefix of the metrics, `eval/` or `eval/NAME/` -> validation data.
        checkpointer: writes and restores checkpoints.
        trackers: receive metrics and events.
        console: prints progress.
        ledger: time accounting of this process.
        meter: computes the record of a logged step.
        ticker: calls functions every second in threads beside the training thread.
        manifest: written into every checkpoint.
        callbacks: called between steps.
        latest_metrics: metrics of the last logged step and the last validation.
        requests: of callbacks and signals, carried out between steps.
        on_device: metrics of the step that was dispatched last.
        state: train state after the last step, which the next one donates.
        added_metrics: of callbacks, for the next logged record.
    """

    config: Config
    dir: Path
    program: Program
    data: Any
    eval_sets: dict[str, Any]
    checkpointer: Checkpointer
    trackers: TrackerList
    console: ConsoleTracker
    ledger: GoodputLedger
    meter: Meter
    ticker: Ticker
    manifest: dict[str, Any]
    callbacks: CallbackList
    latest_metrics: dict[str, float] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)
    on_device: dict[str, jax.Array] = field(default_factory=dict)
    state: State = field(default_factory=dict)
    added_metrics: dict[str, float | jax.Array] = field(default_factory=dict)

    def placer(self, split: Any) -> Placer:
        """Returns the function that makes device batches of a data set."""
        return placer(split, self.program)

    def batches(self) -> BatchFeed:
        """Returns the prefetched device batches of training."""
        data, skips = self.data, self._skips
        if self.program.synchronizer.strategy.mixes_batches:
            data, skips = self.mixed_batches(data), tuple  # the mixture skips batches itself
        reader = make_reader(data, self.config.data.is_text)
        place = self.placer(reader)
        reader.rows = place.host_rows
        return BatchFeed(self.callbacks.wrap_fetch(place), skips, self.config.steps, reader)

    def mixed_batches(self, data: Any) -> ReplicaRows:
        """Returns data whose batches are those of the steps of a run: each has the rows that its replicas train on."""
        return ReplicaRows(data, self._batches_of, self.config.data.global_batch)

    def _batches_of(self, step: int) -> list[int]:
        """Returns the indices of the batches that the replicas train on in a step, from 0: one for all, or for each."""
        data_steps, skips = self.program.synchronizer.strategy.data_steps(step), self._skips()
        return [batch_index(number, skips) for number in data_steps]

    def batch_of(self, step: int) -> int:
        """Returns the index of the batch that is trained on in a step, from 0; the first one if there are several."""
        return min(self._batches_of(step))

    def _skips(self) -> BatchRanges:
        return merge_ranges(self.manifest.get("skips", ()))

    def step(self, state: State, batch: Any, step: int) -> tuple[State, dict[str, jax.Array]]:
        """Dispatches the step after `step`. Returns (state, metrics on the device)."""
        with leaks_in_one_line(self.config.model):
            run = self.program.step_at(step)
            result = self.callbacks.first(Callback.run_step, self, run, state, batch, step)
            return run(state, batch) if result is None else result

    def log(self, step: int, values: dict[str, float], scores: dict[str, float]) -> None:
        """Sends the record of a step to the trackers, with the scores of its validation."""
        added, self.added_metrics = self.added_metrics, {}
        if added:
            values = values | {name: float(value) for name, value in jax.device_get(added).items()}
        self.latest_metrics |= values | scores
        self.trackers.log(step, self.meter.record(step, values) | scores)
        self.callbacks.each(Callback.on_log, self, step)

    def evaluate(self, state: State, step: int) -> dict[str, float]:
        """Validates on all sets what the replicas agree on, with the EMA weights if the run has them."""
        self.callbacks.each(Callback.on_evaluate_begin, self, step)
        with self.ledger.phase("eval"):
            agreed, count = self.program.agreed(state), self.config.eval.batches
            params = evaluated_parameters(agreed)
            scores = validate(self.program, self.eval_sets, params, count, non_trainable(agreed))
        self.trackers.event("eval", step=step, **scores)
        self.callbacks.each(Callback.on_evaluate, self, step, scores)
        return scores

    def save(self, state: State, step: int, scores: dict[str, float], is_last: bool) -> None:
        """Starts a checkpoint, unless a callback objects. The newest validation ranks it if this step has none."""
        if self.callbacks.allows_save(self, state, step, is_last):
            scores = scores or {name: value for name, value in self.latest_metrics.items() if name.startswith("eval/")}
            files = data_files(self.data, step, self._skips(), self.trackers)
            metrics = {name: value for name, value in self.latest_metrics.items() if math.isfinite(value)}
            manifest = self.manifest | {"callbacks": self.callbacks.state_dict(), "latest_metrics": metrics}
            with self.ledger.phase("checkpoint"):
                self.checkpointer.save(step, state, manifest=manifest, metrics=scores, files=files)

    def rewind(self, state: State, step: int) -> tuple[State, int] | None:
        """Returns (state, step) of an earlier step if a callback wants to continue from there."""
        rewound = self.callbacks.first(Callback.rewind, self, state, step)
        return None if rewound is None else self._rewound(*rewound)

    def go_back(self, state: State, step: int, request: Request) -> tuple[State, int]:
        """Carries out a request to go back. Without an earlier checkpoint training continues, with a warning."""
        with self.ledger.phase("restore"):
            target = self.checkpoint_before(step, request.steps)
        if target is None:
            self.trackers.event("warning", text=f"no checkpoint before step {step} to go back to: training continues")
            return state, step
        first = self.batch_of(target)
        skipped = (first, first + request.skip_batches) if request.skip_batches else None
        state, back = self.return_to(state, target, skipped)
        self.trackers.event("rollback", step=back, reason=request.reason, batches=f"{request.skip_batches} skipped")
        return self._rewound(state, back)

    def checkpoint_before(self, step: int, steps: int) -> int | None:
        """Returns the newest checkpoint at least `steps` before a step, else the oldest one before it; None without.

        The same on every process.
        """
        self.checkpointer.wait()
        earlier = [info.step for info in self.checkpointer.steps() if info.step < step]
        early = [number for number in earlier if number <= step - steps]
        chosen = broadcast(early[-1] if early else earlier[0] if earlier else -1)
        return None if chosen < 0 else chosen

    def return_to(self, state: State, target: int, skipped: tuple[int, int] | None) -> tuple[State, int]:
        """Restores a checkpoint in place of the state, and skips a range of batches from now on.

        Callbacks get their states of that checkpoint.

        Returns:
            (state, finished steps).
        """
        check_can_go_back(self.data)
        for leaf in jax.tree.leaves(state):
            leaf.delete()  # frees its memory for the restored state
        with self.ledger.phase("restore"):
            self.checkpointer.rewind(target)
            state, saved = self.checkpointer.restore(None, self.program.state)
        skips = merge_ranges(self.manifest.get("skips", ()), *([skipped] if skipped else []))
        self.manifest["skips"] = [list(part) for part in skips]
        self.load_callbacks(saved)
        step = int(jax.device_get(state["step"]))
        if text := restore_data(self.data, self.checkpointer, step, saved, self._skips()):
            self.trackers.event("data", step=step, text=text)
        self.trackers.rewind(step)
        return state, step

    def _rewound(self, state: State, step: int) -> tuple[State, int]:
        self.meter.end_compilation(step)
        self.callbacks.each(Callback.on_rewind, self, step)
        return state, step

    def load_callbacks(self, saved: Mapping[str, Any]) -> None:
        """Gives callbacks their states of a checkpoint, and the metrics that they had seen, from its manifest."""
        self.latest_metrics = dict(saved.get("latest_metrics", {}))
        self.callbacks.load_state_dict(saved.get("callbacks", {}))

    def add_metrics(self, values: Mapping[str, float | jax.Array]) -> None:
        """Adds numbers, or scalars on the device, to the next record that is logged: in `on_step_end` to the step's."""
        self.added_metrics |= values

    def current_metrics(self) -> dict[str, float]:
        """Returns the metrics of the step that was dispatched last. Waits for it, so the devices idle meanwhile."""
        return numbers(self.on_device)

    def request_save(self, reason: str = "") -> None:
        """Asks for a checkpoint after this step."""
        self.requests.ask(Request("save", reason))

    def request_evaluate(self, reason: str = "") -> None:
        """Asks for a validation after this step."""
        self.requests.ask(Request("evaluate", reason))

    def request_stop(self, reason: str) -> None:
        """Asks to save and end the run after this step."""
        self.requests.ask(Request("stop", reason))

    def request_rewind(self, steps: int, skip_batches: int = 0, reason: str = "") -> None:
        """Asks to go back to the newest checkpoint at least `steps` steps before, and to skip the batches after it."""
        check_can_go_back(self.data)
        self.requests.ask(Request("rewind", reason, steps, skip_batches))

    def request_call(self, name: str) -> None:
        """Asks for `Callback.on_call` with this name on all processes after this step."""
        self.requests.ask(Request("call", name))

    def report_checkpoints(self) -> None:
        """Logs the events of checkpoints since the last call."""
        for event in self.checkpointer.poll():
            self.trackers.event(event.kind, **event.fields())
            if isinstance(event, Committed):
                self.callbacks.each(Callback.on_save, self, event.step)
            if isinstance(event, Committed) and self.config.log.upload_checkpoints:
                self.trackers.artifact(self.checkpointer.store.path(event.step))

    def last_good_checkpoint(self) -> str:
        """Describes the newest checkpoint, for an error message."""
        self.checkpointer.wait()
        step = self.checkpointer.latest()
        return "no checkpoint was written" if step is None else f"checkpoint {step} is the last good one"

    def time_stages(self, state: State, batch: Any) -> None:
        """Measures the actions of pipeline stages, and adds the bubble computed from them to later records."""
        pipeline = self.program.gradients.pipeline
        if pipeline is None:
            return
        try:
            with self.ledger.phase("compile"):
                costs = stage_costs(self.program, self.program.agreed(state)["params"], batch)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            text = "pipeline: no memory left to time the stages; no bubble in the log"
            self.trackers.event("warning", text=text)
            return
        if min(costs) <= 0:
            text = "pipeline: its actions are too short to be timed; no bubble in the log"
            self.trackers.event("warning", text=text)
            return
        bubble = 1 - pipeline.partition.occupancy * (1 - schedule_cost(pipeline.table, costs).lockstep_bubble)
        self.meter.constants["bubble"] = bubble
        milliseconds = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in costs._asdict().items()}
        self.trackers.event("pipeline", bubble=round(bubble, 4), **milliseconds)

    def wait_for_checkpoints(self) -> None:
        """Blocks until the last checkpoint is written, in both tiers."""
        with self.ledger.phase("checkpoint"):
            self.checkpointer.finish()

    def stop(self, step: int, reason: str) -> None:
        """Ends the background monitors and the callbacks, and logs why the run ends."""
        self.ticker.close()
        self.callbacks.each(Callback.close, self)
        self.trackers.event("stop", step=step, reason=reason)

    def close(self) -> None:
        """Closes trackers and checkpoints after pending writes."""
        self.ticker.close()
        self.trackers.close()
        self.checkpointer.close()
