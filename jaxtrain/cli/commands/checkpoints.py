"""`jaxtrain checkpoint ls|inspect|verify|prune|rewind RUN_DIR`, also for a run that is still training."""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rich.table import Table

import jaxtrain
from jaxtrain.cli.progress import progress_bar
from jaxtrain.errors import UserError, escape_unprintable
from jaxtrain.io.terminal import plain_console
from jaxtrain.reports.checkpoint_listing import ASIDE, TITLES, UNFINISHED, checkpoint_cells, tensor_bytes, writers
from jaxtrain.reports.layout_table import format_bytes

WIDE = 200  # columns if the output is not a terminal


def run(args: argparse.Namespace) -> int:
    """Runs the command; exit code 1 if `verify` finds damage."""
    _check_options(args)
    return ACTIONS[args.action](args)


def _check_options(args: argparse.Namespace) -> None:
    """Raises UserError for options of another action."""
    allowed = {
        "ls": ("json", "durable"),
        "inspect": ("step", "json"),
        "verify": ("step", "durable"),
        "prune": ("step", "keep", "dry_run", "set_aside"),
        "rewind": ("step",),
    }
    for name in sorted({name for names in allowed.values() for name in names} - {*allowed[args.action]}):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"checkpoint {args.action}: {option} belongs to another action; see --help")
    if args.action == "inspect" and len(args.step) > 1:
        raise UserError(f"checkpoint inspect: expected one --step; found {len(args.step)}")
    if args.action == "rewind" and len(args.step) != 1:
        raise UserError("checkpoint rewind: expected one --step, to go back to")
    if args.action == "prune" and not args.step and args.keep is None and not args.set_aside:
        raise UserError("checkpoint prune: expected --keep N, --step N or --set-aside")


def ls(args: argparse.Namespace) -> int:
    """Prints one line per step."""
    found = jaxtrain.checkpoints(args.run, is_durable=args.durable)
    if args.json:
        print(json.dumps([row.as_json() for row in found], indent=1))
        return 0
    table = Table(*TITLES, box=None, pad_edge=False)
    for row in found:
        table.add_row(*map(escape_unprintable, checkpoint_cells(row)))
    console = plain_console(markup=False)
    console.width = console.width if console.is_terminal else WIDE
    console.print(table)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Prints the marker and the tensors of one step."""
    content = jaxtrain.checkpoints(args.run).inspect(args.step[0] if args.step else None)
    if args.json:
        print(json.dumps(content, indent=1))
        return 0
    print("\n".join(map(escape_unprintable, _lines(content))))
    return 0


def _lines(content: dict[str, Any]) -> Iterator[str]:
    """Describes a step for the terminal."""
    manifest, tensors = content["manifest"], content["tensors"]
    yield f"step      {content['step']}"
    yield f"time      {datetime.fromtimestamp(content['time']):%Y-%m-%d %H:%M:%S}"
    yield f"size      {format_bytes(content['bytes'])} in {len(content['files'])} files"
    for name, value in (content["metrics"] or {}).items():
        yield f"metric    {name} {value:.6g}"
    yield f"written   by {writers(manifest) or 'an unknown run'}"
    for name, value in manifest.items():
        if name not in ("config", "processes", "mesh"):
            yield f"{name:<9} {_plain(value)}"
    config = manifest.get("config")
    if isinstance(config, dict):
        yield f"config    {config.get('name')}; --json prints it, `jaxtrain config RUN_DIR/config.yaml` the run's own"
    yield ""
    sizes = {name: tensor_bytes(*spec) for name, spec in tensors.items()}
    width = max((len(name) for name in tensors), default=0)
    for name, (shape, dtype) in tensors.items():
        yield f"{name:<{width}}  {dtype:<9} {'x'.join(map(str, shape)) or 'scalar':<16} {format_bytes(sizes[name]):>10}"
    count = sum(math.prod(shape) for shape, _ in tensors.values())
    yield f"{len(tensors)} tensors, {count:,} numbers, {format_bytes(sum(sizes.values()))}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item not in ("", None)) or "none"
    return str(value)


def verify(args: argparse.Namespace) -> int:
    """Reads every byte, with a progress bar; returns 1 if one differs from what was written."""
    found = jaxtrain.checkpoints(args.run, is_durable=args.durable)
    steps, is_good = args.step or found.steps(), True
    with progress_bar("checkpoints") as progress:
        result = found.verify(*args.step, progress=progress)
    for step in steps:
        if step not in result:  # by the run, which may still be training
            print(f"{step}: deleted meanwhile")
            continue
        is_good &= not result[step]
        lines = [escape_unprintable(f"{step}: damaged: {problem}") for problem in result[step]]
        print("\n".join(lines) or f"{step}: good, every byte read")
    for row in found if not args.durable and not args.step else ():
        if row.state in (ASIDE, UNFINISHED):
            print(f"{row.name}: {row.state}, not read")
    return 0 if is_good else 1


def prune(args: argparse.Namespace) -> int:
    """Deletes steps, or says what would be deleted."""
    found = jaxtrain.checkpoints(args.run)
    pruned = found.prune(args.keep, args.step, set_aside=args.set_aside, dry_run=args.dry_run)
    verb = "would delete" if args.dry_run else "deleted"
    names = ", ".join(pruned.names)
    print(f"{verb} {names} ({format_bytes(pruned.bytes)})" if names else "nothing to delete")
    return 0


def rewind(args: argparse.Namespace) -> int:
    """Sets later steps aside, and says how the run goes on from the step."""
    (step,) = args.step
    later = jaxtrain.checkpoints(args.run).rewind(step)
    names = ", ".join(f"old-{abandoned}" for abandoned in later)
    print(f"set aside as {names}" if later else f"nothing is later than {step}")
    print(f"next  jaxtrain resume {shlex.quote(args.run)}  # from step {step}")
    return 0


ACTIONS = {"ls": ls, "inspect": inspect, "verify": verify, "prune": prune, "rewind": rewind}
