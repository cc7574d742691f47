"""The run that is launched: its folder, its newest checkpoint, and the mesh that so many processes can have."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxtrain.checkpoint import Store
from jaxtrain.config import Config, ConfigError
from jaxtrain.config.run_dir import absolute, free_directory, saved_config, write_config
from jaxtrain.config.show import as_dict
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.launch.policy import Placement
from jaxtrain.models.decoder_params import vocabulary
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.sharding import layout
from jaxtrain.sharding.axes import shape_text


class Job:
    """A run and the meshes it may have. One supervisor holds it, and only that one writes config.yaml between runs."""

    def __init__(self, config: Config, directory: Path, devices: int, fallbacks: Sequence[Sequence[str]] = ()) -> None:
        """
        Args:
            config: the run's own, of which every generation's is derived.
            directory: RUN_DIR.
            devices: of each process.
            fallbacks: groups of `key=value`, tried in order where the config's own mesh does not fit.
        """
        self.config, self.directory, self.devices = absolute(config), directory.absolute(), devices
        self.fallbacks = ((), *map(tuple, fallbacks))
        self.is_simulated = config.simulate is not None
        self._vocab = _vocab(config)

    def place(self, available: int) -> Placement | None:
        """The largest number of processes, `available` at most, that some mesh fits; None where none does."""
        for processes in range(available, 0, -1):
            for changes in self.fallbacks:
                try:
                    return self.fitted(processes, changes)
                except ConfigError:
                    continue
        return None

    def fitted(self, processes: int, changes: Sequence[str] = ()) -> Placement:
        """So many processes, with these changes of the config. Raises ConfigError where that does not fit."""
        count = processes * self.devices
        changes = (*([f"simulate={count}"] if self.is_simulated else []), *changes)
        checks = (lambda c: check_config(c, count, self._vocab), lambda c: check_pipeline(c, count))
        config, _ = resolve(None, *changes, base={"resolved": True, **as_dict(self.config)}, paths=False, checks=checks)
        mesh = shape_text(layout.resolve(config, count).sizes)
        return Placement(processes, count, changes, mesh, config)

    def begin(self, placement: Placement) -> None:
        """Writes the config that all workers of a generation read. Raises OSError where that cannot be done."""
        write_config(self.directory, placement.config)

    def newest(self) -> int | None:
        """Step of the newest committed checkpoint; None where there is none, or the disk does not say."""
        try:
            return Store(self.directory / "checkpoints").latest()
        except OSError:
            return None


def open_job(
    source: str, overrides: Sequence[str], processes: int, devices: int | None, fallbacks: Sequence[Sequence[str]]
) -> Job:
    """The job of a config, in a new folder, or of a run's folder.

    Args:
        source: YAML file, or RUN_DIR.
        overrides: `key=value`.
        processes: of all nodes.
        devices: of each process; None: an equal share of `simulate`, else 1.
        fallbacks: see `Job`.

    Raises:
        UserError: bad input, or no number of processes fits the mesh; nothing is written then.
    """
    resumed = Path(source) if Path(source).is_dir() else None
    config, _ = resolve(saved_config(resumed) if resumed else source, *overrides)
    if devices is None:
        devices, rest = divmod(config.simulate or processes, processes)
        if rest:
            message = f"{config.simulate} simulated devices cannot be shared out among {processes} processes"
            raise UserError(f"launch: {message}; expected --devices-per-process")
    directory = resumed or free_directory(config)
    job = Job(config, directory, devices, fallbacks)
    if job.place(processes) is None:
        job.fitted(processes)  # says why
    if resumed is None:
        directory.mkdir(parents=True, exist_ok=True)
    return job


def _vocab(config: Config) -> int | None:
    """Size of the vocabulary where it is known without the data."""
    if config.model.type != "decoder" or config.data.type != "text":
        return None
    try:
        return vocabulary(config, load_tokenizer(config.data.tokenizer).vocab)
    except (UserError, OSError):
        return None  # a worker says what is wrong with it
