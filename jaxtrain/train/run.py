"""A run: the program, its data, its checkpoints and whoever watches, put together before the first step."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpointer, compare_configs, environment, promise, read_manifest
from jaxtrain.config import Config, ConfigError, dump_yaml
from jaxtrain.config.errors import Problem
from jaxtrain.config.output import as_dict
from jaxtrain.data.dataset import TextDataset, open_dataset
from jaxtrain.observe.flops import Flops, decoder_flops, user_flops
from jaxtrain.observe.meter import Meter, device_memory
from jaxtrain.observe.peak import Peak, device_peak
from jaxtrain.observe.progress import Screen
from jaxtrain.observe.summary import mesh_line, parameter_table, tensors
from jaxtrain.observe.tracker import Observers, trackers
from jaxtrain.precision.policy import POLICIES
from jaxtrain.train import platform
from jaxtrain.train.batches import Placer
from jaxtrain.train.program import Program, State, build

VOCAB_MULTIPLE = 128  # a decoder's vocabulary is rounded up to it, so that it divides over devices and fills tiles


@dataclass(eq=False)
class Run:
    """All that the loop works with. `manifest` goes into every checkpoint."""

    config: Config
    dir: Path
    program: Program
    data: Any
    validation: Any
    checkpoints: Checkpointer
    observers: Observers
    screen: Screen
    meter: Meter
    manifest: dict[str, Any]
    latest: dict[str, float] = field(default_factory=dict)

    def place(self, split: Any) -> Placer:
        """Device batches of a split."""
        is_text = isinstance(split, TextDataset)
        return Placer(split.batch, self.program.sharder, self.config.data.global_batch, is_text)


def prepare(config: Config, screen: Screen) -> tuple[Program, Any, Any]:
    """Starts JAX and opens the data: the program and the two splits.

    Raises:
        ValueError: bad data, or a layout that does not fit devices or model.
    """
    data = open_dataset(config.data, config.seed, "train", _cache_progress(screen))
    validation = open_dataset(config.data, config.seed, "validation") if _has_validation(config) else None
    devices = platform.start(config)
    return build(config, vocabulary(config, data), devices), data, validation


def open_run(config: Config, directory: Path, *, screen: Screen, resume: bool) -> tuple[Run, State, int]:
    """A run ready for its next step: (run, state, steps done).

    Raises:
        ValueError: bad input, or a config that the checkpoint of a resumed run cannot go on with.
    """
    program, data, validation = prepare(config, screen)
    is_main = jax.process_index() == 0
    screen.console.quiet = not is_main
    if is_main:
        directory.mkdir(parents=True, exist_ok=True)
    options = config.checkpoint
    checkpoints = Checkpointer(
        directory / "checkpoints", keep=options.keep, keep_best=options.keep_best, best=options.best
    )
    manifest = environment(as_dict(config), program.sharder.mesh, data=getattr(data, "fingerprint", None))
    observers = Observers(trackers(config, directory, is_main) + ([screen] if is_main else []), screen.print)
    flops, peak = _flops(config, program, data), _peak(config, program)
    items = config.data.global_batch * (config.data.sequence if isinstance(data, TextDataset) else 1)
    memory = device_memory(jax.local_devices())
    meter = Meter(items, len(jax.devices()), flops=flops, peak=peak, memory=memory)
    run = Run(config, directory, program, data, validation, checkpoints, observers, screen, meter, manifest)
    info = _info(run, flops, peak)
    state, done = _restore(run, info) if resume else (program.init(), 0)
    meter.compiled(done)
    if is_main:
        (directory / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
        describe(run, info)
    observers.start(info | {"step": done})
    return run, state, done


def vocabulary(config: Config, data: Any) -> int | None:
    """Vocabulary size of the decoder: the config's, else the tokenizer's rounded up.

    Raises:
        ConfigError: the config's is smaller than the tokenizer's.
    """
    known, given = getattr(data, "vocab", None), config.model.vocab
    if given is None:
        return None if known is None else -(-known // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if known is not None and given < known:
        message = f"{given} is less than the {known} of the tokenizer; leave it out, or give at least {known}"
        raise ConfigError([Problem("", "model.vocab", message)])
    return given


def fresh_directory(config: Config) -> Path:
    """DIR/NAME, or the first free DIR/NAME-2, -3, ...: a run is never written over another.

    With several processes it is DIR/NAME, which must be new: they could not agree on a number before they have met.
    """
    directory = config.run_dir
    if platform.processes() > 1:
        return directory
    number = 2
    while directory.exists() and any(directory.iterdir()):
        directory = config.run_dir.with_name(f"{config.name}-{number}")
        number += 1
    return directory


def describe(run: Run, info: dict[str, Any]) -> None:
    """Prints the run's folder, the mesh and the parameters by tensor."""
    program, screen = run.program, run.screen
    sizes, device = program.layout.sizes, jax.devices()[0]
    axes = lambda names: tuple(program.sharder.spec(names))  # noqa: E731
    rows = tensors(program.definition.params, program.definition.names, axes, sizes)
    kind = device.device_kind if device.platform != "cpu" else "simulated cpu" if run.config.simulate else "cpu"
    screen.print(f"run   {run.dir}", mesh_line(program.layout.name, sizes, kind))
    screen.print(parameter_table(rows, screen.console.width))
    if isinstance(run.data, TextDataset):
        counts = f"{run.data.documents:,} documents, {run.data.tokens:,} tokens"
        screen.print(f"data  {counts}; unigram entropy {run.data.unigram_entropy:.4f} nats per token")
    if info.get("flops"):
        screen.print(f"flops {info['flops']}", f"peak  {info['peak']}")


def resume_command(run: Run, done: int) -> str:
    """The command that goes on with this run; a finished one needs more steps."""
    called = sys.argv[0]
    is_found = Path(called).name != "jaxtrain" or shutil.which("jaxtrain") == os.path.abspath(called)
    program = "jaxtrain" if is_found else min(os.path.relpath(called), os.path.abspath(called), key=len)
    more = f" steps={2 * run.config.steps}" if done >= run.config.steps else ""
    return f"{program} resume {run.dir}{more}"


def _restore(run: Run, info: dict[str, Any]) -> tuple[State, int]:
    """The newest good state, and what the resumed run may promise; afresh where nothing was saved yet."""
    checkpoints = run.checkpoints
    if not checkpoints.store.marked():
        run.screen.print(f"no checkpoint in {checkpoints.directory} yet: starting from step 0")
        return run.program.init(), 0
    # Compared before the state is read: a changed model is better told by its key than by its tensors.
    _refuse(run, *read_manifest(checkpoints.directory))
    state, saved = checkpoints.restore(None, run.program.state)
    for event in checkpoints.poll():
        run.screen.print(f"warning  {event}")
    done = int(jax.device_get(state["step"]))
    for line in _refuse(run, done, saved):
        run.screen.print(f"changed  {line}")
    level, reasons = promise(saved, run.manifest)
    info |= {"promise": level, "reasons": reasons}
    text = "bitwise those of an uninterrupted run" if level == "bitwise" else "equal to float32 rounding"
    run.screen.print(f"promise  losses {text}" + (f" ({'; '.join(reasons)})" if reasons else ""))
    return state, done


def _refuse(run: Run, step: int, saved: dict[str, Any]) -> list[str]:
    """What the config changed since a checkpoint. Raises ConfigError where the run cannot go on with it."""
    changes, refused = compare_configs(saved["config"], run.manifest["config"], step)
    if saved.get("data") != run.manifest.get("data") and not refused:
        refused = ["data: the documents or the tokenizer are not those the run began with; give them back"]
    if refused:
        raise ConfigError([Problem(str(run.dir), "", f"{line}; or train under a new name") for line in refused])
    return changes


def saved_config(directory: Path) -> Path:
    """config.yaml of a run's folder. Raises ValueError where it is not one."""
    path = directory / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{directory}: not a run (no config.yaml); expected the folder that `jaxtrain train` printed")
    return path


def _has_validation(config: Config) -> bool:
    return config.data.type != "text" or config.data.validation > 0


def _cache_progress(screen: Screen) -> Any:
    shown = {"tenth": -1}

    def progress(done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if tenth != shown["tenth"]:
            shown["tenth"] = tenth
            screen.print(f"data  building the token cache: {10 * tenth}% of {total / 2**20:.1f} MiB")

    return progress


def _flops(config: Config, program: Program, data: Any) -> Flops | None:
    if config.model.type == "decoder":
        vocab = program.definition.params["embed"]["table"].shape[0]
        return decoder_flops(config.model, vocab, config.data.sequence, config.step.remat)
    host = data.batch(0, slice(0, 1))
    shapes = {name: (config.data.global_batch, *value.shape[1:]) for name, value in host.items()}
    return user_flops(program.definition.bind(program.definition.params), shapes, config.data.global_batch)


def _peak(config: Config, program: Program) -> Peak | None:
    compute = POLICIES[config.precision].compute
    return device_peak(jax.local_devices()[0], jax.local_device_count(), compute, config.log.peak_tflops)


def _info(run: Run, flops: Flops | None, peak: Peak | None) -> dict[str, Any]:
    """The start event."""
    info: dict[str, Any] = {"name": run.config.name, "steps": run.config.steps, "config": run.manifest["config"]}
    info["unigram_entropy"] = getattr(run.data, "unigram_entropy", None)
    if flops is not None and peak is not None:
        info |= {"flops": f"{flops.model:.4g} per token ({flops.convention})", "peak": str(peak)}
    return info | {key: run.manifest[key] for key in ("mesh", "versions", "processes")}
