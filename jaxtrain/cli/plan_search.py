"""`jaxtrain plan --search`: from arguments to a ranking and a layout file. No JAX here: other processes compile."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from jaxtrain.cli import plan
from jaxtrain.cli.spinner import spinner
from jaxtrain.config.schema import LAYOUT_KEYS
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import UserError, join
from jaxtrain.exit_codes import INTERRUPTED
from jaxtrain.planning.search import ranking as results
from jaxtrain.planning.search.search import search

OPTIONS = ("objective", "devices", "budget", "top", "jobs", "out")  # of a search alone
FORMULAS = "looking at layouts: {done:,}"
COMPILES = "compiling the best: {done} of {of}, last {text}"


def show(path: str, overrides: Sequence[str], args: argparse.Namespace) -> int:
    """Prints the ranking of layouts for a config, and writes the first; 1 where none fits, 130 after an early Ctrl-C.

    Raises:
        UserError: an unknown target or objective, a config without a legal layout, or a file that cannot be written.
    """
    target = plan.target_of(args)
    file = args.out or f"{re.sub(r'[^a-z0-9]+', '-', str(target))}.yaml"
    plan.check_folders(args.json, file)
    if not args.out and not results.is_free(file):
        raise UserError(f"{file}: is there already, and no search wrote it; expected --out FILE")
    config, _ = resolve(path, *overrides, paths=False)
    given = {name: getattr(args, name) for name in ("objective", "devices", "top", "jobs")}
    options = {name: value for name, value in given.items() if value is not None}
    plan.find_own_classes()
    with spinner(f"looking at layouts for {target}") as progress:

        def tell(stage: str, done: int, of: int, text: str) -> None:
            line = (FORMULAS if stage == "formula" else COMPILES).format(done=done, of=of, text=text)
            progress.update(progress.task_ids[0], description=line)

        # Ctrl-C ends the search, not the command: what was found until then is shown.
        try:
            with plan.interruptible():
                vocab, budget = plan.vocabulary_of(config), seconds(args.budget)
                found = search(config, vocab, str(target), budget=budget, progress=tell, **options)
        except KeyboardInterrupt:
            print("jaxtrain: interrupted before any layout was looked at", file=sys.stderr)
            return INTERRUPTED
    console = Console(highlight=False)
    console.print(results.table(found), "", results.losers_table(found), "", Text(found.summary()), sep="\n")
    if args.json:
        plan.write(args.json, json.dumps(found.as_dict(), indent=1))
    if found.winner is None:
        return 1
    results.write_layout(found, file)
    command = ["jaxtrain", "train", path, *kept(overrides), f"layout={os.path.join('.', file)}", *found.winner.keys]
    print(f"written: {file}", file=sys.stderr)
    console.print(f"use it: {shlex.join(command)}", soft_wrap=True, markup=False)
    return 0


def kept(overrides: Sequence[str]) -> list[str]:
    """Those that go with another layout: keys that a layout holds would refine it."""
    return [text for text in overrides if re.split(r"[.=]", text)[0].strip() not in ("layout", *LAYOUT_KEYS)]


def seconds(text: str | None) -> float:
    """`90`, `90s`, `5m` or `1h` in seconds; five minutes where nothing is said. Raises UserError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text or "5m")
    if not found or float(found[1]) <= 0:
        raise UserError(f"plan: --budget {text}: expected a time such as 90s, 5m or 1h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def check_options(args: argparse.Namespace) -> None:
    """Refuses options of a search where there is none, and others beside one."""
    if args.search:
        if args.html or args.hlo or args.whole or args.diff:
            raise UserError("plan: --html, --hlo, --whole and --diff are not of --search; expected --json")
        if args.out and not args.out.endswith((".yaml", ".yml")):
            raise UserError(f"plan: --out {args.out}: a layout file ends in .yaml or .yml; expected {args.out}.yaml")
        return
    given = [f"--{name}" for name in OPTIONS if getattr(args, name) is not None]
    if given:
        raise UserError(f"plan: {join(given, 'and')} {'is' if len(given) == 1 else 'are'} of --search")
