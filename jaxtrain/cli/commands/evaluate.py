"""`jaxtrain eval RUN_DIR`: prints the validation metrics of a checkpoint, or its scores on tasks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import jaxtrain
from jaxtrain.cli.setup import config_overrides, prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    tasks = None if args.tasks is None else [name.strip() for name in args.tasks.split(",") if name.strip()]
    names = ("step", "batches", "include_path", "limit", "num_fewshot")
    options = {name: getattr(args, name) for name in names}
    scores = jaxtrain.evaluate(args.run, *config_overrides(args), tasks=tasks, **options)
    from jaxtrain.inference import eval_harness

    if args.out:
        eval_harness.write_results(Path(args.out), scores)
    print("\n".join([json.dumps(scores)] if tasks is None else eval_harness.format_lines(scores)))
    return 0
