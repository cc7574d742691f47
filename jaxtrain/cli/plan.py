"""`jaxtrain plan`: from arguments to plans and their reports. No JAX here: another process compiles."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxtrain.cli.spinner import spinner
from jaxtrain.config import Config, ConfigError
from jaxtrain.core.resolve import resolve
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import Problem, UserError
from jaxtrain.models.decoder_params import vocabulary
from jaxtrain.models.layout_check import check_config
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.planning import compile, pods, predict
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.planning.report import diff, page, terminal
from jaxtrain.planning.result import Plan


def show(path: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Prints the plan of a config, and writes the files asked for; 1 where it does not fit, 2 where it did not compile.

    Raises:
        UserError: an unknown target, a config that does not fit it, or a file that cannot be written.
    """
    target = target_of(args)
    check_folders(args.json, args.html, args.hlo)
    found = plan(path, overrides, target, hlo=Path(args.hlo) if args.hlo else None, whole=args.whole)
    title = " ".join([path, *overrides])
    console = Console(highlight=False)
    console.print(terminal.report(found, title, console.width))
    if args.json:
        write(args.json, json.dumps({"title": title, **found.as_dict()}, indent=1))
    if args.html:
        write(args.html, page.page(found, title))
    return 2 if not found.compiled else 1 if found.fits is False else 0


def compare(a: str, b: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Prints what changes from one plan to another, and writes it.

    Args:
        a, b: each a config, `CONFIG key=value ...` as one text, or the JSON of a plan.
        overrides: of both configs.
    """
    if args.html or args.hlo:
        raise UserError("plan: --html and --hlo are of one plan, not of --diff")
    sides = [_side(text, overrides) for text in (a, b)]
    target = None if all(side.is_plan for side in sides) else target_of(args)
    check_folders(args.json)
    for side in sides:  # both, before the first is compiled
        if side.is_plan or target is None:
            _load(side.path)
        else:
            _resolve(side.path, side.overrides, target)
    left, right = (
        _load(side.path)
        if side.is_plan or target is None
        else plan(side.path, side.overrides, target, whole=args.whole)
        for side in sides
    )
    titles = sides[0].title, sides[1].title
    Console(highlight=False).print(diff.report(left, right, titles))
    if args.json:
        write(args.json, json.dumps(diff.as_dict(left, right, titles), indent=1))
    return 0


def plan(path: str, overrides: Sequence[str], target: Target, *, hlo: Path | None = None, whole: bool = False) -> Plan:
    """The plan of a config on a target; a line on stderr tells how long it takes.

    Args:
        hlo: file to write the compiled program's text to.
        whole: never extrapolate from smaller pods.

    Raises:
        UserError: before anything is compiled, where the config does not fit the target or an extra is missing.
    """
    config, vocab = _resolve(path, overrides, target)
    if problem := targets.missing(target, config.step.attention):
        raise UserError(problem)
    find_own_classes()
    with interruptible(), spinner(f"compiling {path} for {target}"):
        return predict.predict(config, vocab, str(target), hlo=hlo, largest=None if whole else pods.LARGEST)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt: the processes that compile are ended, and their files deleted, before this one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def find_own_classes() -> None:
    """Puts the working folder on the path: a user's own `package.module:Class`, for the process that compiles."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


@dataclass(frozen=True)
class Side:
    """One of two that are compared: a config, or the file of a plan."""

    path: str
    overrides: list[str]
    is_plan: bool

    @property
    def title(self) -> str:
        """What to call it."""
        return " ".join([self.path, *self.overrides])


def _side(text: str, overrides: Sequence[str]) -> Side:
    if text.endswith(".json"):
        return Side(text, [], True)
    words = [text] if os.path.exists(text) else text.split() or [text]
    return Side(words[0], [*overrides, *words[1:]], False)


def target_of(args: argparse.Namespace) -> Target:
    """The target asked for. Raises UserError for none, or one that does not exist."""
    if not args.target:
        raise UserError(f"plan: expected --target, such as {targets.SHAPES}")
    return targets.parse(args.target, args.slices)


def _resolve(path: str, overrides: Sequence[str], target: Target) -> tuple[Config, int | None]:
    """The config, checked against the devices of the target, and the vocabulary of its decoder.

    The data need not be there; the tokenizer only where `model.vocab` does not say how large it is.
    """

    def check(config: Config) -> list[Problem]:
        there = config.model_copy(update={"simulate": None})  # the target says which devices there are
        devices, vocab = target.devices, vocabulary_of(config)
        problems = check_config(there, devices, vocab) + check_pipeline(there, devices)
        if not problems and (wrong := compile.across_slices(config, target)):
            problems.append(Problem("", "mesh.dcn", wrong.removeprefix("mesh.dcn: ")))
        return problems

    config, _ = resolve(path, *overrides, paths=False, checks=[check])
    return config, vocabulary_of(config)


def vocabulary_of(config: Config) -> int | None:
    """Vocabulary of the decoder: the config's, else the tokenizer's."""
    if config.model.vocab is not None or config.model.type != "decoder" or config.data.type != "text":
        return config.model.vocab
    return vocabulary(config, load_tokenizer(config.data.tokenizer).vocab)


def _load(path: str) -> Plan:
    """A plan that `--json` wrote."""
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        found = Plan.from_dict(values)
        targets.parse(found.target)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = "expected a plan that `jaxtrain plan --json` wrote"
        raise ConfigError([Problem(path, "", f"not a plan ({type(error).__name__}); {message}")]) from error
    return found


def check_folders(*files: str | None) -> None:
    """Raises UserError where a file could not be written, before minutes of compiling."""
    for file in filter(None, files):
        folder = Path(file).parent
        if not folder.is_dir() or Path(file).is_dir():
            raise UserError(f"{file}: {'is a folder' if folder.is_dir() else f'no folder {folder}'}; expected a file")


def write(file: str, text: str) -> None:
    """Writes a file and says so."""
    Path(file).write_text(text + "\n", encoding="utf-8")
    print(f"written: {file}", file=sys.stderr)
