"""Continuation of a run whose command line is run again, as schedulers do."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

from jaxtrain.config import Config
from jaxtrain.config.run_dir import CONFIG, PLACE, absolute
from jaxtrain.config.show import as_dict
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import ConfigError, Problem, UserError
from jaxtrain.trainer.compatibility import compare_configs

Resume = bool | Literal["auto"]
# Files that a run may have written before its config.
BEGINNING = (
    "checkpoints", "logs", "launch.jsonl", "launch.secret", "events.jsonl", "metrics.jsonl", "tensorboard",
    "layout.txt",
)  # fmt: skip
# The same before they have their names: another node writes them at this moment, or a kill has left them.
TEMPORARY = tuple(f"{name}." for name in (*BEGINNING, CONFIG))
SCHEDULED = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX", "TPU_WORKER_ID")


def is_scheduled(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether a scheduler or launcher started this process, which may start the same command line again."""
    return any(environ.get(name) for name in SCHEDULED) or environ.get("JAX_NUM_PROCESSES", "1") != "1"


def can_continue(config: Config, directory: Path, ignored: Collection[str] = ()) -> bool:
    """Returns whether a directory holds the run of this config. Does not look for checkpoints.

    Args:
        config: of the command line.
        directory: DIR/NAME.
        ignored: keys that may differ, such as those that a launcher sets.

    Returns:
        False if the directory is absent or empty, or if its run was killed before it had written its config.

    Raises:
        ConfigError: it holds the run of another config; names the keys that differ.
        UserError: it holds other files.
    """
    if not (directory / CONFIG).is_file():
        names = sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []
        others = [name for name in names if name not in BEGINNING and not name.startswith(TEMPORARY)]
        if others:
            raise UserError(f"{directory}: holds {others[0]} and is not a run (no {CONFIG}); expected another `name`")
        return False
    saved, _ = resolve(directory / CONFIG, paths=False, checks=())
    lines, _ = compare_configs(as_dict(absolute(saved)), as_dict(absolute(config)))
    skipped = tuple(f"{key}." for key in (*PLACE, *ignored))
    different = [line for line in lines if not f"{line.partition(':')[0]}.".startswith(skipped)]
    if different:
        change = f"jaxtrain resume {directory} key=value"
        hint = f"expected the config of the run there, `{change}` to change it, or another `name`"
        raise ConfigError([Problem(str(directory), "", f"{line}; {hint}") for line in different])
    return True
