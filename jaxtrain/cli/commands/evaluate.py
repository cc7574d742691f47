"""`jaxtrain eval RUN_DIR`: prints the validation metrics of a checkpoint, or its scores on tasks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jaxtrain.cli.setup import config_overrides, prepare_jax_import
from jaxtrain.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"eval: --{name.replace('_', '-')}: expected at least {least}; found {value}")
    unused = [name for name in ("include_path", "limit", "num_fewshot") if getattr(args, name) is not None]
    if args.tasks is None and unused:
        raise UserError(f"eval: --{unused[0].replace('_', '-')} is for tasks; expected --tasks A,B with it")
    prepare_jax_import(args.simulate)
    from jaxtrain.inference import eval_harness
    from jaxtrain.inference.model import evaluate

    run_dir, overrides = Path(args.run), config_overrides(args)
    if args.tasks is None:
        scores = evaluate(run_dir, args.step, args.batches, overrides)
        lines = [json.dumps(scores)]
    else:
        tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
        options = {"include_path": args.include_path, "limit": args.limit, "num_fewshot": args.num_fewshot}
        scores = eval_harness.evaluate_tasks(run_dir, args.step, overrides, tasks, **options)
        lines = eval_harness.format_lines(scores)
    if args.out:
        eval_harness.write_results(Path(args.out), scores)
    print("\n".join(lines))
    return 0
