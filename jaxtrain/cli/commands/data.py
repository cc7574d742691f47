"""`jaxtrain data show|build|tokenizer CONFIG`: shows a batch, builds token caches, or trains a tokenizer."""

from __future__ import annotations

import argparse

import jaxtrain
from jaxtrain.cli.progress import progress_bar
from jaxtrain.cli.setup import prepare_jax_import


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.action == "show":
        prepare_jax_import(None)  # a user's own class may import JAX
        with progress_bar("tokenizing") as progress:
            text = jaxtrain.show_data(args.config, *args.overrides, step=args.step, rows=args.rows, progress=progress)
        print(text)
        return 0
    with progress_bar("tokenizing" if args.action == "build" else "reading") as progress:
        if args.action == "tokenizer":
            made = jaxtrain.train_tokenizer(
                args.config, *args.overrides, vocab=args.vocab, out=args.out, progress=progress
            )
            lines = [f"{made.path}: {made.vocab:,} tokens, from {made.documents:,} documents in {made.seconds:.1f} s"]
        else:
            lines = [
                f"{built.source}: {built.tokens['train']:,} training and {built.tokens['validation']:,} validation "
                f"tokens, entropy {built.entropy:.4f} nats, in {built.path} ({built.seconds:.1f} s)"
                for built in jaxtrain.build_data(args.config, *args.overrides, progress=progress)
            ]
    print("\n".join(lines))
    return 0
