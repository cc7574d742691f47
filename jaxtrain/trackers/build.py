"""Builds the trackers that a config asks for."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtrain.config.schema import Config
from jaxtrain.trackers.base import Tracker
from jaxtrain.trackers.files import Files

PROJECT = "jaxtrain"


def trackers(config: Config, run_dir: Path, is_main: bool) -> list[Tracker]:
    """The trackers that the config asks for; none on processes other than 0.

    Raises:
        UserError: a tracker whose package is missing, in one line with the extra to install.
    """
    from jaxtrain.trackers.mlflow import MLflow
    from jaxtrain.trackers.tensorboard import TensorBoard
    from jaxtrain.trackers.wandb import WandB

    if not is_main:
        return []
    log = config.log
    members: list[Tracker] = [Files(run_dir)]
    if log.tensorboard:
        members.append(TensorBoard(run_dir))
    if log.wandb:
        members.append(WandB(os.environ.get("WANDB_PROJECT", PROJECT), config.name, run_dir))
    if log.mlflow:
        members.append(MLflow(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), config.name, run_dir))
    return members
