"""`jaxtrain import HF_DIR --to DIR`: creates a run from a Hugging Face model."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxtrain.cli.setup import config_overrides, prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    from jaxtrain.cli.hf_conversion import import_model

    config = import_model(Path(args.model), Path(args.to), config_overrides(args))
    print(f"{args.to}: step 0 with the weights of {args.model}")
    if config.data.tokenizer == "bytes":
        print("its tokenizer is `bytes`: the model has no tokenizer.json; set data.tokenizer before its text is used")
    return 0
