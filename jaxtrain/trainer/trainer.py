"""A run: the program, its data, its checkpoints and whoever watches, put together before the first step."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxtrain.callbacks.fault_injection import Hooks, remaining
from jaxtrain.callbacks.goodput import Records
from jaxtrain.callbacks.guard import Guard
from jaxtrain.callbacks.silent_corruption import Check
from jaxtrain.callbacks.stragglers import Pace, pace
from jaxtrain.callbacks.watchdog import watchdog
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.durable import place_of
from jaxtrain.checkpoint.memory.checkpointer import Keeper
from jaxtrain.checkpoint.memory.client import nodes
from jaxtrain.config import Config, guards
from jaxtrain.config.run_dir import absolute, free_directory, write_config
from jaxtrain.config.show import as_dict
from jaxtrain.core.placement import Placer, placer
from jaxtrain.core.program import Program, State, build
from jaxtrain.core.stage_timing import stage_costs
from jaxtrain.data.dataset import TextDataset, open_datasets, open_sets
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import without_divergent_permutes
from jaxtrain.io.ticker import Ticker
from jaxtrain.kernels.cross_entropy import recomputes
from jaxtrain.models.decoder_params import vocabulary
from jaxtrain.models.flops import Flops, decoder_flops, user_flops
from jaxtrain.pipeline.schedules.cost import price, summary
from jaxtrain.planning.hardware.peak import Peak, device_peak
from jaxtrain.precision.policy import POLICIES
from jaxtrain.reports.layout_table import logical_names, mesh_line, parameter_table, tensors, whole_dims
from jaxtrain.sharding import layout as layouts
from jaxtrain.sharding.context_parallel import has_tokens
from jaxtrain.trackers.base import Observers
from jaxtrain.trackers.build import trackers
from jaxtrain.trackers.console import Screen
from jaxtrain.trackers.files import furthest
from jaxtrain.trackers.goodput import Ledger
from jaxtrain.trainer.compatibility import environment
from jaxtrain.trainer.input_pipeline import Feed
from jaxtrain.trainer.meter import Meter, device_memory
from jaxtrain.trainer.restore import initial, restore


@dataclass(eq=False)
class Run:
    """All that the loop works with. `manifest` goes into every checkpoint, `watch` calls what looks on every second.

    `sets`: prefix of the metrics, `eval/` or `eval/NAME/` -> what is validated on.
    """

    config: Config
    dir: Path
    program: Program
    data: Any
    sets: dict[str, Any]
    checkpoints: Checkpointer
    observers: Observers
    screen: Screen
    ledger: Ledger
    meter: Meter
    watch: Ticker
    manifest: dict[str, Any]
    guard: Guard
    check: Check | None
    faults: Hooks
    peers: Keeper | None = None
    pace: Pace | None = None
    latest: dict[str, float] = field(default_factory=dict)

    def place(self, split: Any) -> Placer:
        """Device batches of a split."""
        return placer(split, self.program)

    def log(self, step: int, values: dict[str, float], scores: dict[str, float]) -> None:
        """Hands on the record of a step, and what was found beside training."""
        self.latest |= values | scores
        self.observers.log(step, self.meter.record(step, values) | scores)
        for text in self.pace.poll() if self.pace else ():
            self.observers.event("warning", text=text)

    def feed(self) -> Feed:
        """Device batches of training, by step."""
        fetch = self.faults.fetch(self.place(self.data))
        return Feed(fetch, lambda: self.guard.skips, self.config.steps)

    def advance(self, state: State, batch: Any, done: int) -> tuple[State, dict[str, jax.Array]]:
        """The step after `done` steps: (state, metrics); checked for silent corruption where its turn is."""
        if self.check is not None and self.check.due(done):
            return self.check.step(self.program.step, state, batch, done)
        return self.program.step(state, batch)

    def admits(self, state: State, done: int, must: bool) -> bool:
        """Whether a state is good enough to be saved; `must`: it is the run's last."""
        self.faults.at("logged", done)
        is_good = self.guard.admits(must)
        if is_good and self.check is not None:
            self.check.replicas(state, done)
        return is_good

    def go_back(self, state: State, done: int) -> tuple[State, int]:
        """(state, steps done) from before a spike."""
        with self.ledger.phase("restore"):
            state, done = self.guard.go_back(state, done, self.program.state)
        self.meter.compiled(done)
        if self.peers is not None:
            self.peers.forget(done)
        return state, done

    def keep(self, step: int, state: State) -> None:
        """Takes a copy for the memory of the nodes, where its turn is; none of the last step, nor while steps go wrong.

        A run that went on from the last step would never save it.
        """
        if self.peers is None or step >= self.config.steps:
            return
        if step % self.peers.every == 0 and self.guard.admits(must=False):
            with self.ledger.phase("checkpoint"):
                self.peers.keep(step, state, self.manifest)

    def share(self) -> None:
        """Starts to send that copy, when its step is validated and logged and its save begun: all that is done once."""
        if self.peers is not None:
            self.peers.share()

    def save(self, step: int, state: State, scores: dict[str, float]) -> None:
        """Starts a checkpoint."""
        with self.ledger.phase("checkpoint"):
            self.checkpoints.save(step, state, manifest=self.manifest, metrics=scores)

    def finish(self) -> None:
        """Blocks until the last checkpoint is where it belongs, in both tiers."""
        with self.ledger.phase("checkpoint"):
            self.checkpoints.finish()

    def stop(self, step: int, reason: str) -> None:
        """Says that the run ends, and for the last time where its time went. Nothing looks on from here."""
        self.watch.close()
        Records(self.ledger, self.observers.record).write()
        self.observers.event("stop", step=step, reason=reason)

    def close(self) -> None:
        """Waits for what is still being written."""
        self.watch.close()
        self.observers.close()
        self.checkpoints.close()


def open_run(
    config: Config, directory: Path, *, screen: Screen, resume: bool, ledger: Ledger | None = None,
    deadline: float | None = None,
) -> tuple[Run, State, int]:  # fmt: skip
    """A run ready for its next step: (run, state, steps done).

    Args:
        ledger: of this process; default: it begins now.
        deadline: of a hang, see `loop.train`.

    Raises:
        UserError: bad input, a folder that holds another run, or a config that the checkpoint of a resumed run cannot
            go on with.
    """
    ledger = ledger or Ledger()
    devices = runtime.start(config)
    layouts.resolve(config, len(devices))  # before hours of tokenizing
    is_main = jax.process_index() == 0
    screen.console.quiet = not is_main
    data, sets = open_data(config, screen)
    left = config.model_copy(update={"faults": remaining(config, directory)})
    program = build(left, vocabulary(config, getattr(data, "vocab", None)), devices)
    if program.gradients.pipeline:
        program = replace(program, step=without_divergent_permutes(program.step))
    if is_main:
        directory.mkdir(parents=True, exist_ok=True)
    options = config.checkpoint
    kept = {"keep": options.keep, "keep_best": options.keep_best, "best": options.best}
    tier = {"durable": place_of(options.durable, directory), "durable_every": options.durable_every}
    checkpoints = Checkpointer(directory / "checkpoints", **kept, **tier)
    watch = Ticker(watchdog(program, directory, ledger, deadline))
    try:
        if not resume and not checkpoints.is_empty():
            where = directory if checkpoints.store.marked() else tier["durable"]
            raise UserError(f"{where} holds a run already; resume it, or give another name")
        run, info = _assemble(config, directory, program, data, sets, checkpoints, screen, ledger, watch)
        state, done = restore(run, info) if resume else (initial(program), 0)
        if done > config.steps:
            raise UserError(f"steps: {config.steps} is less than the {done} already done in {directory}")
        run.guard.start(config.steps - done)
        if is_main:
            write_config(run.dir, run.config)
            describe(run, info)
        _look_on(run, info | {"step": done})
    except BaseException:
        watch.close()
        checkpoints.close()
        raise
    return run, state, done


def _look_on(run: Run, info: dict[str, Any]) -> None:
    """Begins the first step: whoever watches is told, and what looks on every second is called from now on."""
    run.ledger.reached = max(furthest(run.dir), info["step"])
    run.ledger.at(info["step"])
    run.observers.start(info)
    run.watch.add(Records(run.ledger, run.observers.record))
    run.pace = pace(run.ledger)
    if run.pace is not None:
        run.watch.add(run.pace)
    run.ledger.begin("compile")


def open_data(config: Config, screen: Screen) -> tuple[Any, dict[str, Any]]:
    """The training data, and what is validated on by the prefix of its metrics; a missing token cache is built."""
    progress = _cache_progress(screen)
    data, held_out = open_datasets(config.data, config.seed, progress)
    sets = {"eval/": held_out} if held_out is not None else {}
    named = open_sets(config.data, config.eval.sets, config.seed, progress)
    return data, sets | {f"eval/{name}/": split for name, split in named.items()}


def _assemble(
    config: Config, directory: Path, program: Program, data: Any, sets: Any, checkpoints: Any, screen: Screen,
    ledger: Ledger, watch: Ticker,
) -> tuple[Run, dict[str, Any]]:  # fmt: skip
    """The run, and what its start event says."""
    is_main = jax.process_index() == 0
    saved = as_dict(absolute(config))
    manifest = environment(saved, program.sharder.mesh, data=getattr(data, "fingerprint", None))
    observers = Observers(trackers(config, directory, is_main) + ([screen] if is_main else []), screen.print)
    items = config.data.global_batch * (config.data.sequence if has_tokens(config) else 1)
    flops, peak = _flops(config, program, data, items), _peak(config)
    memory = device_memory(jax.local_devices())
    meter = Meter(ledger, items, len(jax.devices()), flops=flops, peak=peak, memory=memory)
    spec = guards.guard(config.guard)
    guard = Guard(spec, checkpoints, observers, manifest)
    check, mesh, peers = None, program.sharder.mesh, _keeper(observers)
    if spec.check is not None and mesh is not None:
        check = Check(spec.check, program.state, mesh, observers.event, lambda: _last_good(guard, peers))
    faults = Hooks(program.config.faults, directory)
    run = Run(
        config, directory, program, data, sets, checkpoints, observers, screen, ledger, meter, watch, manifest,
        guard, check, faults, peers,
    )  # fmt: skip
    return run, _info(run, flops, peak)


def _keeper(observers: Observers) -> Keeper | None:
    """Of the nodes' memory, where the launcher says that they give some."""
    where = nodes()
    return where and Keeper(where, lambda text: observers.event("warning", text=text))


def _last_good(guard: Guard, peers: Keeper | None) -> str:
    """What there is to go on from after silent corruption: copies in memory were not checked, and go."""
    if peers is not None:
        peers.forget(-1)
    return guard.last_good()


def fresh_directory(config: Config) -> Path:
    """DIR/NAME, or the first free DIR/NAME-2, -3, ...: a run is never written over another.

    With several processes it is DIR/NAME and must be new, which `open_run` checks: they could not agree on a number
    before they have met.
    """
    return config.run_dir if runtime.processes() > 1 else free_directory(config)


def describe(run: Run, info: dict[str, Any]) -> None:
    """Prints the run's folder, the mesh and the parameters by tensor."""
    program, screen = run.program, run.screen
    sizes, device = program.layout.sizes, jax.devices()[0]
    rows = tensors(program.definition.params, program.definition.names, program.sharder.stored, sizes)
    kind = device.device_kind if device.platform != "cpu" else "simulated cpu" if run.config.simulate else "cpu"
    screen.print(f"run   {run.dir}", mesh_line(program.layout.name, sizes, kind))
    if program.gradients.pipeline:
        screen.print(f"pipe  {summary(program.gradients.pipeline.table)}")
    width, rules = screen.console.width, program.sharder.rules or {}
    screen.print(parameter_table(rows, width), *logical_names(rows, width), *whole_dims(rows, rules, sizes))
    if isinstance(run.data, TextDataset):
        counts = f"{run.data.documents:,} documents, {run.data.tokens:,} tokens"
        screen.print(f"data  {counts}; unigram entropy {run.data.unigram_entropy:.4f} nats per token")
    if info.get("flops"):
        screen.print(f"flops {info['flops']}", f"peak  {info['peak']}")


def time_stages(run: Run, state: State, batch: Any) -> None:
    """Measures what a pipeline's stages do, and from it the bubble that every record has from now on."""
    if run.program.gradients.pipeline is None or not run.config.pipeline.timing:
        return
    try:
        with run.ledger.phase("compile"):
            costs = stage_costs(run.program, state["params"], batch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        run.observers.event("warning", text="pipeline: no memory left to time the stages; no bubble in the log")
        return
    if min(costs) <= 0:
        run.observers.event("warning", text="pipeline: its actions are too short to be timed; no bubble in the log")
        return
    pipeline = run.program.gradients.pipeline
    bubble = 1 - pipeline.stages.filled * (1 - price(pipeline.table, costs).lockstep_bubble)
    run.meter.constants["bubble"] = bubble
    milliseconds = {f"{name}_ms": round(1e3 * seconds, 3) for name, seconds in costs._asdict().items()}
    run.observers.event("pipeline", bubble=round(bubble, 4), **milliseconds)


def resume_command(run: Run, done: int) -> str:
    """The command that goes on with this run; a finished one needs more steps."""
    called = sys.argv[0]
    is_found = Path(called).name != "jaxtrain" or shutil.which("jaxtrain") == os.path.abspath(called)
    program = "jaxtrain" if is_found else min(os.path.relpath(called), os.path.abspath(called), key=len)
    more = f" steps={done + run.config.steps}" if done >= run.config.steps else ""
    return f"{shlex.quote(program)} resume {shlex.quote(str(run.dir))}{more}"


def _cache_progress(screen: Screen) -> Any:
    shown = {"tenth": -1}

    def progress(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != shown["tenth"]:
            shown["tenth"] = tenth
            screen.print(f"data  building the token cache: {10 * tenth}% of {total / 2**20:.1f} MiB")

    return progress


def _flops(config: Config, program: Program, data: Any, items: int) -> Flops | None:
    """FLOPs of each of the `items` of a global batch: tokens where it has such, else rows."""
    if config.model.type == "decoder":
        vocab = program.definition.params["embed"]["table"].shape[0]
        again = recomputes(vocab, config.loss.chunks, program.sharder)
        return decoder_flops(config.model, vocab, config.data.sequence, config.step.saves, again)
    host = data.batch(0, slice(0, 1))
    shapes = {name: (config.data.global_batch, *value.shape[1:]) for name, value in host.items()}
    return user_flops(program.definition.bind(program.definition.params), shapes, items)


def _peak(config: Config) -> Peak | None:
    compute = POLICIES[config.precision].compute
    return device_peak(jax.local_devices()[0], jax.local_device_count(), compute, config.log.peak_tflops)


def _info(run: Run, flops: Flops | None, peak: Peak | None) -> dict[str, Any]:
    """The start event."""
    info: dict[str, Any] = {"name": run.config.name, "steps": run.config.steps, "config": run.manifest["config"]}
    info["unigram_entropy"] = getattr(run.data, "unigram_entropy", None)
    if flops is not None and peak is not None:
        info |= {"flops": f"{flops.model:.4g} per token ({flops.convention})", "peak": str(peak)}
    return info | {key: run.manifest[key] for key in ("mesh", "versions", "processes")}
