"""What each command does. JAX is imported only by those that compute."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.config import Config, ConfigError, Problem, diff_lines, json_schema, resolve, show
from jaxtrain.models.check import check_config

# One line on the screen is enough for these: the message says what is wrong and what would be right.
USER_ERRORS = (ValueError, ImportError, FileNotFoundError, PermissionError)


def config(args: argparse.Namespace) -> int:
    """Prints the resolved config, a line per key, and where each value came from."""
    resolved, provenance = resolve(args.config, *args.overrides, paths=False, checks=[check_config])
    print("\n".join(show(resolved, provenance)))
    return 0


def schema(args: argparse.Namespace) -> int:
    """Prints the JSON Schema."""
    del args
    print(json.dumps(json_schema(), indent=1))
    return 0


def diff(args: argparse.Namespace) -> int:
    """Prints the keys whose values differ."""
    print("\n".join(diff_lines(args.a, args.b)) or "no difference")
    return 0


def data(args: argparse.Namespace) -> int:
    """Builds token caches, or trains a tokenizer on the first source."""
    from jaxtrain.cli.screen import ProgressBar
    from jaxtrain.data import commands

    resolved, _ = resolve(args.config, *args.overrides)
    with ProgressBar("tokenizing" if args.action == "build" else "reading") as progress:
        if args.action == "tokenizer":
            source, validation = resolved.data.sources[0], resolved.data.validation
            made = commands.train_tokenizer(source, args.vocab, args.out, progress, validation)
            lines = [f"{made.path}: {made.vocab:,} tokens, from {made.documents:,} documents in {made.seconds:.1f} s"]
        else:
            lines = [
                f"{built.source}: {built.tokens['train']:,} training and {built.tokens['validation']:,} validation "
                f"tokens, entropy {built.entropy:.4f} nats, in {built.path} ({built.seconds:.1f} s)"
                for built in commands.build(resolved.data, progress)
            ]
    print("\n".join(lines))
    return 0


def train(args: argparse.Namespace) -> int:
    """Trains from a config file."""
    overrides = _simulated(args)
    resolved, _ = resolve(args.config, *overrides, checks=[check_config])
    return _train(resolved, None, args, resume=False)


def resume(args: argparse.Namespace) -> int:
    """Goes on with a run."""
    from jaxtrain.cli.runs import saved_config

    directory = Path(args.run)
    resolved, _ = resolve(saved_config(directory), *_simulated(args), checks=[check_config])
    return _train(resolved, directory, args, resume=True)


def eval(args: argparse.Namespace) -> int:
    """Prints the validation loss of a checkpoint."""
    from jaxtrain.cli.runs import evaluate

    print(json.dumps(evaluate(Path(args.run), args.step, args.batches, _simulated(args))))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Prints a prompt and its continuation as it comes."""
    from jaxtrain.cli.runs import open_generator

    if args.temperature < 0 or (args.top_p is not None and not 0 < args.top_p <= 1) or args.tokens < 1:
        raise ValueError("generate: expected --temperature >= 0, 0 < --top-p <= 1, --tokens >= 1")
    if args.top_k is not None and args.top_k < 1:
        raise ValueError("generate: expected --top-k >= 1")
    stream = open_generator(
        Path(args.run), args.step, _simulated(args),
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
    )  # fmt: skip
    _write(stream(args.prompt, args.tokens, args.seed))
    return 0


def _train(resolved: Config, directory: Path | None, args: argparse.Namespace, *, resume: bool) -> int:
    _before_jax(resolved)
    from jaxtrain.checkpoint import EXIT_SAVED
    from jaxtrain.cli.runs import finish
    from jaxtrain.observe.progress import Screen
    from jaxtrain.train.loop import NotSaved
    from jaxtrain.train.loop import train as run

    screen = Screen(resolved.steps)
    try:
        result = run(resolved, directory, resume=resume, profile=_span(args.profile), screen=screen)
    except NotSaved as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return 1
    finish(resolved, result, screen)
    return EXIT_SAVED if result.stopped_by else 0


def _simulated(args: argparse.Namespace) -> list[str]:
    extra = [] if args.simulate is None else [f"simulate={args.simulate}"]
    return [*getattr(args, "overrides", []), *extra]


def _before_jax(resolved: Config) -> None:
    """What has to be in the environment before JAX is imported."""
    if resolved.simulate is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU or GPU plugin is not even looked for
    sys.path.insert(0, os.getcwd())  # a user's own `package.module:Class`


def _span(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        start, stop = map(int, text.split(":"))
    except ValueError:
        start, stop = 0, 0
    if not 0 <= start < stop:
        raise ConfigError([Problem("command line", "--profile", f"expected START:STOP such as 10:13; found {text!r}")])
    return start, stop


def _write(pieces: Iterable[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
