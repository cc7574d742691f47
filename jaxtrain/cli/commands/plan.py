"""`jaxtrain plan CONFIG --target T`: prints a plan, compares two, or searches for the best layout.

Other processes compile; this one does not import JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

import jaxtrain
from jaxtrain.cli.output import check_output_files, write_file
from jaxtrain.cli.progress import spinner
from jaxtrain.config import ConfigError
from jaxtrain.config.schema import LAYOUT_KEYS
from jaxtrain.errors import Problem, UserError, join_words
from jaxtrain.exit_codes import ERROR, INTERRUPTED, OK, USAGE
from jaxtrain.io.terminal import plain_console
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.planning.report import diff, page, terminal
from jaxtrain.planning.result import Plan
from jaxtrain.planning.search import ranking
from jaxtrain.planning.target_config import config_for_target

SEARCH_OPTIONS = ("objective", "devices", "budget", "top", "jobs", "out")
ESTIMATING = "estimating layouts: {done:,}"
COMPILING = "compiling the best: {done} of {of}, last {text}"


def run(args: argparse.Namespace) -> int:
    """Runs the command; exit code 1 if the config does not fit, 2 if it does not compile.

    Raises:
        UserError: an unknown target or objective, a config that does not fit it, or a file that cannot be written.
    """
    _check_options(args)
    overrides = list(args.overrides)
    if args.diff:  # then the first positional argument is an override, too
        overrides[:0] = [args.config] if args.config is not None else []
        a, b = args.diff
        return _show_diff(a, b, overrides, args)
    if args.config is None:
        raise UserError("plan: expected a config, or --diff A B")
    return (_show_search if args.search else _show_plan)(args.config, overrides, args)


def _check_options(args: argparse.Namespace) -> None:
    """Raises UserError for options that do not go together."""
    if args.search:
        if args.html or args.hlo or args.whole or args.diff or args.dcn or args.server_dcn:
            raise UserError(
                "plan: --html, --hlo, --whole, --diff, --dcn and --server-dcn do not go with --search; expected --json"
            )
        if args.out and not args.out.endswith((".yaml", ".yml")):
            raise UserError(f"plan: --out {args.out}: a layout file ends in .yaml or .yml; expected {args.out}.yaml")
        return
    given = [f"--{name}" for name in SEARCH_OPTIONS if getattr(args, name) is not None]
    if given:
        raise UserError(f"plan: {join_words(given, 'and')} {'needs' if len(given) == 1 else 'need'} --search")


def _show_plan(path: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    target = _target(args)
    check_output_files(args.json, args.html, args.hlo)
    hlo = Path(args.hlo) if args.hlo else None
    plan = _plan(path, overrides, target, hlo=hlo, whole=args.whole, dcn=args.dcn, server_dcn=args.server_dcn)
    title = " ".join([path, *overrides])
    console = plain_console()
    console.print(terminal.report(plan, title, console.width))
    if args.json:
        write_file(args.json, json.dumps({"title": title, **plan.as_dict()}, indent=1))
    if args.html:
        write_file(args.html, page.page(plan, title))
    return USAGE if not plan.compiled else ERROR if plan.fits is False else OK


def _show_diff(a: str, b: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Prints what changes from one plan to another, and writes it.

    Args:
        a, b: each a config, `CONFIG key=value ...` as one text, or the JSON of a plan.
        overrides: of both configs.
        args: options.
    """
    if args.html or args.hlo:
        raise UserError("plan: --html and --hlo do not go with --diff; expected --json")
    sides = [_side(text, overrides) for text in (a, b)]
    target = None if all(side.is_plan for side in sides) else _target(args)
    check_output_files(args.json)
    for side in sides:  # checks both before the first is compiled
        if target is None or side.is_plan:
            _read_plan(side.path)
        else:
            config_for_target(side.path, *side.overrides, target=target)
    left, right = (
        _read_plan(side.path)
        if target is None or side.is_plan
        else _plan(side.path, side.overrides, target, whole=args.whole, dcn=args.dcn, server_dcn=args.server_dcn)
        for side in sides
    )
    titles = sides[0].title, sides[1].title
    plain_console().print(diff.report(left, right, titles))
    if args.json:
        write_file(args.json, json.dumps(diff.as_dict(left, right, titles), indent=1))
    return OK


def _show_search(path: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Prints the ranking of layouts for a config and writes the best one as a layout file.

    Returns 1 if no layout fits, 130 after Ctrl-C before the first result.
    """
    target = _target(args)
    file = args.out or f"{re.sub(r'[^a-z0-9]+', '-', str(target))}.yaml"
    check_output_files(args.json, file)
    if not args.out and not ranking.can_overwrite(file):
        raise UserError(f"{file}: already exists, and no search wrote it; expected --out FILE")
    given = {name: getattr(args, name) for name in ("objective", "devices", "top", "jobs")}
    options = {name: value for name, value in given.items() if value is not None}
    _add_working_folder()
    with spinner(f"estimating layouts for {target}") as progress:

        def report(stage: str, done: int, of: int, text: str) -> None:
            line = (ESTIMATING if stage == "estimate" else COMPILING).format(done=done, of=of, text=text)
            progress.update(progress.task_ids[0], description=line)

        # Ctrl-C ends the search, not the command: the results so far are shown.
        try:
            with _interruptible():
                budget = _seconds(args.budget)
                result = jaxtrain.search(path, str(target), *overrides, budget=budget, progress=report, **options)
        except KeyboardInterrupt:
            print("jaxtrain: interrupted before the first layout was estimated", file=sys.stderr)
            return INTERRUPTED
    console = plain_console()
    console.print(
        ranking.ranking_table(result), "", ranking.families_table(result), "", Text(result.summary()), sep="\n"
    )
    if args.json:
        write_file(args.json, json.dumps(result.as_dict(), indent=1))
    if result.winner is None:
        return ERROR
    ranking.write_layout(result, file)
    kept = _without_layout(overrides)
    command = ["jaxtrain", "train", path, *kept, f"layout={os.path.join('.', file)}", *result.winner.keys]
    print(f"written: {file}", file=sys.stderr)
    console.print(f"use it: {shlex.join(command)}", soft_wrap=True, markup=False)
    return OK


def _plan(path: str, overrides: Sequence[str], target: Target, **options: Any) -> Plan:
    """Plans a config on a target; a line on stderr shows the elapsed time.

    Args:
        path: config file.
        overrides: `key=value`.
        target: hardware to plan for.
        options: of `jaxtrain.plan`.

    Raises:
        UserError: before anything is compiled, if the config does not fit the target or an extra is missing.
    """
    _add_working_folder()
    with _interruptible(), spinner(f"compiling {path} for {target}"):
        return jaxtrain.plan(path, str(target), *overrides, **options)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turns Ctrl-C into KeyboardInterrupt, so that compiling processes end and their files go before this process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _add_working_folder() -> None:
    """Adds the working folder to the module path: the compiling process may need a user's `package.module:Class`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


@dataclass(frozen=True)
class _Side:
    """One side of a comparison: a config, or the file of a plan."""

    path: str
    overrides: list[str]
    is_plan: bool

    @property
    def title(self) -> str:
        return " ".join([self.path, *self.overrides])


def _side(text: str, overrides: Sequence[str]) -> _Side:
    if text.endswith(".json"):
        return _Side(text, [], True)
    words = [text] if os.path.exists(text) else text.split() or [text]
    return _Side(words[0], [*overrides, *words[1:]], False)


def _target(args: argparse.Namespace) -> Target:
    """Returns the target of --target. Raises UserError if it is missing or unknown."""
    if not args.target:
        raise UserError(f"plan: expected --target, such as {targets.SHAPES}")
    return targets.parse(args.target, args.slices)


def _read_plan(path: str) -> Plan:
    """Reads a plan that `--json` wrote."""
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        plan = Plan.from_dict(values)
        targets.parse(plan.target)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = "expected a plan that `jaxtrain plan --json` wrote"
        raise ConfigError([Problem(path, "", f"not a plan ({type(error).__name__}); {message}")]) from error
    return plan


def _without_layout(overrides: Sequence[str]) -> list[str]:
    """Drops the overrides that would change keys of the layout file."""
    return [text for text in overrides if re.split(r"[.=]", text)[0].strip() not in ("layout", *LAYOUT_KEYS)]


def _seconds(text: str | None) -> float:
    """Parses `90`, `90s`, `5m` or `1h`; default: five minutes. Raises UserError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text or "5m")
    if not match or float(match[1]) <= 0:
        raise UserError(f"plan: --budget {text}: expected a time such as 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
