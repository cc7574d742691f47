"""`jaxtrain export RUN_DIR --to HF_DIR`: writes a checkpoint as a Hugging Face model."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxtrain.cli.setup import config_overrides, prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    from jaxtrain.cli.hf_conversion import export_model
    from jaxtrain.reports.layout_table import format_bytes

    options = {"step": args.step, "dtype": args.dtype, "shard_size": args.shard_size, "family": args.family}
    done = export_model(Path(args.run), Path(args.to), **options, overrides=config_overrides(args))
    print(f"{args.to}: {done.family} of step {done.step}, {format_bytes(done.bytes)} of {done.dtype}")
    if done.tokens is None:
        print("no tokenizer: the run has none that jaxtrain reads; add the files of yours before text is generated")
    elif done.tokens < done.rows:
        padding = done.rows - done.tokens
        print(f"vocabulary of {done.rows:,}: {done.tokens:,} tokens, and {padding:,} rows of padding, never generated")
    return 0
