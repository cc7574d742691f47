"""Launched run: its config, its directory, its newest checkpoint, and the mesh for a number of processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.api.launched_script import DESCRIBE
from jaxtrain.checkpoint import CheckpointStore
from jaxtrain.config import Config, ConfigError, load
from jaxtrain.config import run_dir as run_dirs
from jaxtrain.config.run_dir import absolute, free_directory, saved_config
from jaxtrain.config.schema import LAYOUT_KEYS
from jaxtrain.config.show import as_dict
from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.launch.types import Placement
from jaxtrain.models.spec import is_decoder, vocabulary_size
from jaxtrain.sharding import layout
from jaxtrain.sharding.axes import shape_text
from jaxtrain.trainer.continuation import can_continue

LINES = 8  # of a failed script's output that are shown


class ElasticJob:
    """Run whose mesh follows the number of processes. One leader owns it and writes config.yaml between generations."""

    def __init__(self, config: Config, directory: Path, devices: int, fallbacks: Sequence[Sequence[str]] = ()) -> None:
        """Creates the elastic job.

        Args:
            config: the run's config, from which the config of each generation derives.
            directory: RUN_DIR.
            devices: number of devices of each process.
            fallbacks: groups of `key=value`, tried in order if the mesh of `config` does not fit.
        """
        self.config, self.directory, self.devices = absolute(config), directory.absolute(), devices
        self.fallbacks = ((), *map(tuple, fallbacks))
        self.is_simulated = config.simulate is not None
        self._vocab = _vocabulary(config)

    def as_json(self) -> dict[str, Any]:
        """Returns the arguments of `ElasticJob` as JSON, for another process."""
        fallbacks = list(map(list, self.fallbacks[1:]))
        return {"config": as_dict(self.config), "directory": str(self.directory), "devices": self.devices,
                "fallbacks": fallbacks}  # fmt: skip

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ElasticJob:
        """Creates the job that `as_json` described."""
        config, _ = load.resolve(None, base={"resolved": True, **fields["config"]}, paths=False, checks=())
        return cls(config, Path(fields["directory"]), fields["devices"], fields["fallbacks"])

    def largest_placement(self, available: int) -> Placement | None:
        """Returns the placement with the most processes, at most `available`; None if no mesh fits."""
        for processes in range(available, 0, -1):
            for overrides in self.fallbacks:
                try:
                    return self.placement(processes, overrides)
                except ConfigError:
                    continue
        return None

    def placement(self, processes: int, overrides: Sequence[str] = ()) -> Placement:
        """Returns the placement of exactly `processes`. Raises ConfigError if the mesh does not fit them."""
        devices = processes * self.devices
        overrides = (*([f"simulate={devices}"] if self.is_simulated else []), *overrides)
        checks = (lambda c: check_layout(c, devices, self._vocab),)
        base = {"resolved": True, **as_dict(self.config)}
        config, _ = load.resolve(None, *overrides, base=base, paths=False, checks=checks)  # as it is, not fitted
        mesh = shape_text(layout.resolve_layout(config.layout, config.mesh, config.axis_rules, devices).sizes)
        return Placement(processes, devices, overrides, mesh, config)

    def write_config(self, placement: Placement) -> None:
        """Writes the config that all workers of a generation read. Raises OSError if the disk refuses it."""
        run_dirs.write_config(self.directory, placement.config)

    def newest_checkpoint(self) -> int | None:
        """Returns the step of the newest committed checkpoint; None if there is none, or the disk cannot be read."""
        try:
            return CheckpointStore(self.directory / "checkpoints").latest()
        except OSError:
            return None


def open_job(
    source: str,
    overrides: Sequence[str],
    processes: int,
    devices: int | None,
    fallbacks: Sequence[Sequence[str]],
    continues: bool = True,
) -> ElasticJob:
    """Opens the job of a config in a new run directory, or of an existing run.

    Args:
        source: YAML file, or RUN_DIR.
        overrides: `key=value`.
        processes: number of processes of all nodes.
        devices: number of devices of each process; None: an equal share of `simulate`, else 1.
        fallbacks: see `ElasticJob`.
        continues: continue the run in DIR/NAME, if there is one; else begin one in the first free directory.

    Raises:
        UserError: bad input, DIR/NAME holds the run of another config, or no number of processes fits the mesh; then
            nothing is written.
    """
    existing = Path(source) if Path(source).is_dir() else None
    config, _ = resolve(saved_config(existing) if existing else source, *overrides, checks=())
    if devices is None:
        devices, rest = divmod(config.simulate or processes, processes)
        if rest:
            message = f"{config.simulate} simulated devices cannot be divided among {processes} processes"
            raise UserError(f"launch: {message}; expected --devices-per-process")
    if existing is None and continues:
        existing = config.run_dir if can_continue(config, config.run_dir, _elastic_keys(fallbacks)) else None
    directory = existing or (config.run_dir if continues else free_directory(config, says_difference=False))
    job = ElasticJob(config, directory, devices, fallbacks)
    if job.largest_placement(processes) is None:
        job.placement(processes)  # raises the reason
    if existing is None:
        directory.mkdir(parents=True, exist_ok=True)
    return job


def _elastic_keys(fallbacks: Sequence[Sequence[str]]) -> set[str]:
    """Returns the keys that generations of one job may set to different values."""
    keys = {"simulate", *(text.partition("=")[0] for group in fallbacks for text in group)}
    return keys | set(LAYOUT_KEYS) if "layout" in keys else keys


def _vocabulary(config: Config) -> int | None:
    """Returns the size of the vocabulary if it is known without the data."""
    if not is_decoder(config.model) or not config.data.is_text:
        return None
    try:
        return vocabulary_size(config.model, load_tokenizer(config.data.tokenizer).vocab)
    except (UserError, OSError):
        return None  # a worker reports the error


@contextmanager
def described(script: Sequence[str]) -> Iterator[str]:
    """Yields a file with the config of a script, which runs up to the first use of its trainer.

    Raises:
        UserError: the script ended before.
    """
    with tempfile.TemporaryDirectory(prefix="jaxtrain-") as folder:
        file = Path(folder) / "config.yaml"
        done = subprocess.run(
            script_command(script, DESCRIBE, str(file)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace",
        )  # fmt: skip
        if not file.is_file():
            print("\n".join(done.stdout.splitlines()[-LINES:]), file=sys.stderr)
            ended = f"{shlex.join(script)} ended with exit code {done.returncode} before it trained"
            raise UserError(f"launch: {ended}; expected a script with jaxtrain.Trainer(...).fit() or steps()")
        yield str(file)


def script_command(script: Sequence[str], variable: str, value: str) -> list[str]:
    """Returns the command line of a script that ends with this process and gets an environment variable."""
    return [sys.executable, "-m", "jaxtrain.cli.script", str(os.getpid()), variable, value, *script]
