"""`jaxtrain import HF_DIR --to DIR`: creates a run from a Hugging Face model."""

from __future__ import annotations

import argparse

import jaxtrain
from jaxtrain.cli.setup import config_overrides, prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    prepare_jax_import(args.simulate)
    config = jaxtrain.import_model(args.model, args.to, *config_overrides(args))
    print(f"{args.to}: step 0 with the weights of {args.model}")
    if config.data.tokenizer == "bytes":
        print("its tokenizer is `bytes`: the model has no tokenizer.json; set data.tokenizer before its text is used")
    return 0
