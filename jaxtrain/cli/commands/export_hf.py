"""`jaxtrain export RUN_DIR --to HF_DIR`: writes a checkpoint as a Hugging Face model."""

from __future__ import annotations

import argparse

import jaxtrain
from jaxtrain.cli.setup import config_overrides, prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    options = {"step": args.step, "dtype": args.dtype, "shard_size": args.shard_size, "family": args.family}
    done = jaxtrain.export(args.run, args.to, *config_overrides(args), **options)
    print("\n".join([f"{args.to}: {done}", *done.notes]))
    return 0
