"""`jaxtrain checkpoint ls|inspect|verify|prune RUN_DIR`, also for a run that is still training."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxtrain.checkpoint import durable
from jaxtrain.checkpoint.files import MARKER, Lock
from jaxtrain.checkpoint.store import CheckpointStore, largest_first
from jaxtrain.cli import checkpoint_listing as listing
from jaxtrain.cli.progress import progress_bar
from jaxtrain.errors import CheckpointError, UserError, escape_unprintable
from jaxtrain.reports.layout_table import format_bytes

WIDE = 200  # columns if the output is not a terminal


def run(args: argparse.Namespace) -> int:
    """Runs the command; exit code 1 if `verify` finds damage."""
    _check_options(args)
    return ACTIONS[args.action](_store(args.run), args)


def _check_options(args: argparse.Namespace) -> None:
    """Raises UserError for options of another action."""
    allowed = {
        "ls": ("json", "durable"),
        "inspect": ("step", "json"),
        "verify": ("step", "durable"),
        "prune": ("step", "keep", "dry_run", "set_aside"),
    }
    for name in sorted({name for names in allowed.values() for name in names} - {*allowed[args.action]}):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"checkpoint {args.action}: {option} belongs to another action; see --help")
    if args.action == "inspect" and len(args.step) > 1:
        raise UserError(f"checkpoint inspect: expected one --step; found {len(args.step)}")
    if args.action == "prune" and not args.step and args.keep is None and not args.set_aside:
        raise UserError("checkpoint prune: expected --keep N, --step N or --set-aside")


def _store(directory: str) -> CheckpointStore:
    """Opens the checkpoints of a run directory, or a folder of steps itself, such as a durable copy."""
    folder = Path(directory).expanduser()
    inner = folder / "checkpoints"
    store = CheckpointStore(inner if inner.is_dir() else folder)
    if not store.directory.is_dir() or not listing.list_checkpoints(store):
        raise UserError(f"{directory}: no checkpoints found; expected a run directory")
    return store


def ls(store: CheckpointStore, args: argparse.Namespace) -> int:
    """Prints one line per step."""
    rows = _durable_rows(_durable_tier(args)) if args.durable else listing.list_checkpoints(store)
    if args.json:
        print(json.dumps([row.as_json() for row in rows], indent=1))
        return 0
    table = Table("step", "time", "size", "state", "metrics", "written by", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row))
    console = Console(highlight=False, markup=False)
    console.width = console.width if console.is_terminal else WIDE
    console.print(table)
    return 0


def _durable_rows(tier: durable.DurableTier) -> list[listing.CheckpointRow]:
    """Lists the steps of the durable tier by their markers."""
    rows = []
    for step in tier.steps():
        try:
            rows.append(listing.CheckpointRow(str(step), step, listing.GOOD, content=tier.content(step)))
        except CheckpointError as error:
            rows.append(listing.CheckpointRow(str(step), step, listing.DAMAGED, str(error)))
    return rows


def _cells(row: listing.CheckpointRow) -> list[str]:
    content = row.content
    time = f"{datetime.fromtimestamp(content['time']):%Y-%m-%d %H:%M:%S}" if content else ""
    metrics = " ".join(f"{name} {value:.5g}" for name, value in (content.get("metrics") or {}).items())
    state = f"{row.state}: {row.reason}" if row.reason else row.state
    writers = _writers(content.get("manifest", {}))
    stored = format_bytes(content["bytes"]) if content else ""
    return [escape_unprintable(cell) for cell in (row.name, time, stored, state, metrics, writers)]


def _writers(manifest: dict[str, Any]) -> str:
    """Returns e.g. `2 processes, data 2 x fsdp 4`."""
    processes = manifest.get("processes")
    if processes is None:
        return ""
    sizes = manifest.get("mesh")
    mesh = " x ".join(f"{axis} {count}" for axis, count in sizes.items()) if isinstance(sizes, dict) else ""
    return f"{processes} process{'es' if processes != 1 else ''}, {mesh or '1 device'}"


def inspect(store: CheckpointStore, args: argparse.Namespace) -> int:
    """Prints the marker and the tensors of one step."""
    step = args.step[0] if args.step else store.latest()
    if step is None:
        raise CheckpointError(f"no good checkpoint in {store.directory}; `jaxtrain checkpoint ls` shows why")
    content = store.marker(step)
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
    yield f"written   by {_writers(manifest) or 'an unknown run'}"
    for name, value in manifest.items():
        if name not in ("config", "processes", "mesh"):
            yield f"{name:<9} {_plain(value)}"
    config = manifest.get("config")
    if isinstance(config, dict):
        yield f"config    {config.get('name')}; --json prints it, `jaxtrain config RUN_DIR/config.yaml` the run's own"
    yield ""
    sizes = {name: listing.tensor_bytes(*spec) for name, spec in tensors.items()}
    width = max((len(name) for name in tensors), default=0)
    for name, (shape, dtype) in tensors.items():
        yield f"{name:<{width}}  {dtype:<9} {'x'.join(map(str, shape)) or 'scalar':<16} {format_bytes(sizes[name]):>10}"
    count = sum(math.prod(shape) for shape, _ in tensors.values())
    yield f"{len(tensors)} tensors, {count:,} numbers, {format_bytes(sum(sizes.values()))}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item not in ("", None)) or "none"
    return str(value)


def verify(store: CheckpointStore, args: argparse.Namespace) -> int:
    """Reads every byte; returns 1 if one differs from what was written."""
    tier = _durable_tier(args) if args.durable else durable.FolderTier(store.directory)
    steps = tier.steps()
    for step in args.step:
        if step not in steps:
            raise CheckpointError(f"no checkpoint {step} in {tier.location}; it has {steps or 'none'}")
    is_good = True
    for step in args.step or steps:
        problems = _problems(tier, step)
        if problems and step not in tier.steps():  # by the run, which may still be training
            print(f"{step}: deleted meanwhile")
            continue
        is_good &= not problems
        lines = [escape_unprintable(f"{step}: damaged: {problem}") for problem in problems]
        print("\n".join(lines) or f"{step}: good, every byte read")
    for row in listing.list_checkpoints(store) if not args.durable and not args.step else ():
        if row.state in (listing.ASIDE, listing.UNFINISHED):
            print(f"{row.name}: {row.state}, not read")
    return 0 if is_good else 1


def _problems(tier: durable.DurableTier, step: int) -> list[str]:
    """Returns all problems of a step; shows a progress bar while it reads."""
    try:
        content, results, done = tier.content(step), [], 0
    except FileNotFoundError:
        return [f"{MARKER} is missing"]
    except CheckpointError as error:
        return [str(error)]
    with progress_bar(f"checkpoint {step}") as progress:
        for name, expected in largest_first(content["files"]):
            results.append(tier.file_problem(step, name, expected))
            done += expected[0]
            progress(done, content["bytes"])
    return [problem for problem in results if problem]


def _durable_tier(args: argparse.Namespace) -> durable.DurableTier:
    """Opens the durable tier of the run's config. Raises UserError if it has none."""
    from jaxtrain.core.resolve import resolve

    directory = Path(args.run)
    config, _ = resolve(str(directory / "config.yaml"), paths=False, checks=())
    location = durable.run_location(config.checkpoint.durable, directory)
    if location is None:
        raise UserError(f"{directory}: the config sets no checkpoint.durable; expected no --durable")
    return durable.open_tier(location)


def prune(store: CheckpointStore, args: argparse.Namespace) -> int:
    """Deletes steps atomically, never the last good one."""
    lock = None if args.dry_run else Lock(store.directory / ".lock", advice="its own checkpoint.keep prunes; end it")
    try:
        chosen = listing.steps_to_prune(store, args.keep, args.step)
        if chosen and listing.newest_intact(store, chosen) is None:
            last = listing.newest_intact(store, ())
            why = "none of them is good" if last is None else f"{last} is the last good one"
            raise CheckpointError(f"{store.directory}: not deleted, {why}; expected a good checkpoint to stay")
        names = [str(step) for step in chosen]
        names += [row.name for row in listing.list_checkpoints(store) if args.set_aside and row.state == listing.ASIDE]
        files = (path for name in names for path in (store.directory / name).rglob("*") if path.is_file())
        freed = sum(path.stat().st_size for path in files)
        if not args.dry_run:
            store.delete(*names)
    finally:
        if lock is not None:
            lock.release()
    verb = "would delete" if args.dry_run else "deleted"
    print(f"{verb} {', '.join(names)} ({format_bytes(freed)})" if names else "nothing to delete")
    return 0


ACTIONS = {"ls": ls, "inspect": inspect, "verify": verify, "prune": prune}
