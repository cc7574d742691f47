"""Builds the trackers of a config."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtrain.config.schema import Config
from jaxtrain.trackers.base import Tracker
from jaxtrain.trackers.files import JsonlTracker

PROJECT = "jaxtrain"


def build_trackers(config: Config, run_dir: Path, is_main: bool) -> list[Tracker]:
    """Returns the trackers of the config; none on processes other than 0.

    Raises:
        UserError: the package of a tracker is missing; names the extra to install.
    """
    from jaxtrain.trackers.mlflow import MLflowTracker
    from jaxtrain.trackers.tensorboard import TensorBoardTracker
    from jaxtrain.trackers.wandb import WandbTracker

    if not is_main:
        return []
    log = config.log
    members: list[Tracker] = [JsonlTracker(run_dir)]
    if log.tensorboard:
        members.append(TensorBoardTracker(run_dir))
    if log.wandb:
        members.append(WandbTracker(os.environ.get("WANDB_PROJECT", PROJECT), config.name, run_dir))
    if log.mlflow:
        members.append(MLflowTracker(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), config.name, run_dir))
    return members
