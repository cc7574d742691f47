"""`jaxtrain resume RUN_DIR`: resumes a run from its newest good checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxtrain.cli.commands.train import train
from jaxtrain.cli.setup import config_overrides, load_config, prepare_jax_import
from jaxtrain.config.run_dir import saved_config


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    directory = Path(args.run)
    config, _ = load_config(saved_config(directory), config_overrides(args))
    return train(config, directory, args, resume=True)
