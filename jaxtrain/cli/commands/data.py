"""`jaxtrain data build|tokenizer CONFIG`: builds token caches, or trains a tokenizer on all sources."""

from __future__ import annotations

import argparse

from jaxtrain.cli.progress import progress_bar
from jaxtrain.core.resolve import resolve
from jaxtrain.data import prepare


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    # The config may name the tokenizer that is about to be trained.
    config, _ = resolve(args.config, *args.overrides, paths=args.action == "build", checks=())
    with progress_bar("tokenizing" if args.action == "build" else "reading") as progress:
        if args.action == "tokenizer":
            sources, validation = prepare.text_sources(config.data), config.data.validation_fraction
            made = prepare.train_tokenizer(sources, args.vocab, args.out, progress, validation, config.data.cache_dir)
            lines = [f"{made.path}: {made.vocab:,} tokens, from {made.documents:,} documents in {made.seconds:.1f} s"]
        else:
            lines = [
                f"{built.source}: {built.tokens['train']:,} training and {built.tokens['validation']:,} validation "
                f"tokens, entropy {built.entropy:.4f} nats, in {built.path} ({built.seconds:.1f} s)"
                for built in prepare.build_caches(config.data, progress, config.eval.sets.values())
            ]
    print("\n".join(lines))
    return 0
