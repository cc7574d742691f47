"""What each command does. JAX is imported only by those that compute."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.cli import xla_plugins
from jaxtrain.cli.diff import diff_lines
from jaxtrain.config import Config, ConfigError, Problem, json_schema, show
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.pipeline.schedules.cost import Costs
    from jaxtrain.pipeline.schedules.table import Table

__all__ = [
    "UserError", "checkpoint", "config", "data", "diff", "eval", "export", "generate", "import_", "launch", "plan",
    "report", "resume",
    "schedule", "schema", "train", "verify",
]  # fmt: skip


def config(args: argparse.Namespace) -> int:
    """Prints the resolved config, a line per key, and where each value came from."""
    resolved, provenance = resolve(args.config, *args.overrides, paths=False)
    print("\n".join(show(resolved, provenance)))
    return 0


def checkpoint(args: argparse.Namespace) -> int:
    """Lists, describes, verifies or deletes checkpoints; 1 where one is damaged."""
    from jaxtrain.cli.checkpoints import run

    return run(args)


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
    """Builds token caches, or trains a tokenizer on all sources."""
    from jaxtrain.cli.spinner import ProgressBar
    from jaxtrain.data import prepare

    # A tokenizer may be trained from a config that names it already.
    resolved, _ = resolve(args.config, *args.overrides, paths=args.action == "build")
    with ProgressBar("tokenizing" if args.action == "build" else "reading") as progress:
        if args.action == "tokenizer":
            sources, validation = prepare.text_sources(resolved.data), resolved.data.validation
            made = prepare.train_tokenizer(sources, args.vocab, args.out, progress, validation, resolved.data.cache)
            lines = [f"{made.path}: {made.vocab:,} tokens, from {made.documents:,} documents in {made.seconds:.1f} s"]
        else:
            lines = [
                f"{built.source}: {built.tokens['train']:,} training and {built.tokens['validation']:,} validation "
                f"tokens, entropy {built.entropy:.4f} nats, in {built.path} ({built.seconds:.1f} s)"
                for built in prepare.build(resolved.data, progress, resolved.eval.sets.values())
            ]
    print("\n".join(lines))
    return 0


def train(args: argparse.Namespace) -> int:
    """Trains from a config file."""
    overrides = _overrides(args)
    resolved, _ = resolve(args.config, *overrides)
    return _train(resolved, None, args, resume=False)


def resume(args: argparse.Namespace) -> int:
    """Goes on with a run."""
    _before_jax(args)
    from jaxtrain.config.run_dir import saved_config

    directory = Path(args.run)
    resolved, _ = resolve(saved_config(directory), *_overrides(args))
    return _train(resolved, directory, args, resume=True)


def launch(args: argparse.Namespace) -> int:
    """Trains in several processes; the exit code is the first failed one's, 75 where all saved after a signal."""
    from jaxtrain.cli import launch

    return launch.launch(args)


def eval(args: argparse.Namespace) -> int:
    """Prints the validation loss of a checkpoint, or its scores on tasks."""
    for name in ("limit", "num_fewshot"):
        value = getattr(args, name)
        if value is not None and value < (1 if name == "limit" else 0):
            raise UserError(f"eval: --{name.replace('_', '-')}: {value} is too few")
    _before_jax(args)
    from jaxtrain.inference import harness
    from jaxtrain.inference.runs import evaluate

    run, step, overrides = Path(args.run), args.step, _overrides(args)
    if args.tasks is None:
        found = evaluate(run, step, args.batches, overrides)
        said = [json.dumps(found)]
    else:
        tasks = [name.strip() for name in args.tasks.split(",") if name.strip()]
        options = {"include_path": args.include_path, "limit": args.limit, "num_fewshot": args.num_fewshot}
        found = harness.evaluate_tasks(run, step, overrides, tasks, **options)
        said = harness.lines(found)
    if args.out:
        harness.write(Path(args.out), found)
    print("\n".join(said))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Prints a prompt and its continuation as it comes, or several with theirs, an empty line between them."""
    if args.temperature < 0 or (args.top_p is not None and not 0 < args.top_p <= 1):
        raise UserError("generate: expected --temperature >= 0 and 0 < --top-p <= 1")
    if args.tokens < 1 or (args.top_k is not None and args.top_k < 1):
        raise UserError("generate: expected --tokens and --top-k of at least 1")
    prompts = _prompts(args)
    _before_jax(args)
    from jaxtrain.inference.runs import complete, open_model, streamer

    sampling = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    opened = open_model(Path(args.run), args.step, _overrides(args))
    if len(prompts) == 1:
        _write(streamer(*opened, **sampling)(prompts[0], args.tokens, args.seed))
        return 0
    for index, text in enumerate(complete(*opened, prompts, args.tokens, args.seed, **sampling)):
        _write(["\n" if index else "", text])
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
    """Of --prompt, and of the lines of --prompts that are not empty."""
    prompts = list(args.prompt)
    if args.prompts is not None:
        try:
            text = Path(args.prompts).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"--prompts: {args.prompts} is not UTF-8 (byte {error.start + 1}); convert it") from error
        prompts += [line for line in text.split("\n") if line]
    if not prompts or not all(prompts):
        what = "a prompt is empty" if prompts else "no prompt; give --prompt TEXT or --prompts FILE"
        raise UserError(f"generate: {what}; expected at least one character, such as a newline")
    return prompts


def import_(args: argparse.Namespace) -> int:
    """Makes a run's folder of a Hugging Face model."""
    _before_jax(args)
    from jaxtrain.cli.import_export import import_model

    config = import_model(Path(args.model), Path(args.to), _overrides(args))
    print(f"{args.to}: step 0 with the weights of {args.model}")
    if config.data.tokenizer == "bytes":
        print("its tokenizer is `bytes`: the model has no tokenizer.json; set data.tokenizer before its text is used")
    return 0


def export(args: argparse.Namespace) -> int:
    """Makes a Hugging Face model of a checkpoint."""
    _before_jax(args)
    from jaxtrain.cli.import_export import export_model
    from jaxtrain.reports.layout_table import size

    options = {"step": args.step, "dtype": args.dtype, "shard_size": args.shard_size, "family": args.family}
    done = export_model(Path(args.run), Path(args.to), **options, overrides=_overrides(args))
    print(f"{args.to}: {done.family} of step {done.step}, {size(done.bytes)} of {done.dtype}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Compares every layout with one device; 1 where one differs."""
    if args.simulate < 1 or args.steps < 1:
        raise UserError("verify: expected --simulate and --steps of at least 1")
    _before_jax(args)
    from rich.console import Console

    from jaxtrain.cli.spinner import ProgressBar
    from jaxtrain.verification.report import WIDEST, details, lines, table
    from jaxtrain.verification.verify import verify as run

    names = [name.strip() for name in args.layouts.split(",") if name.strip()]
    options = {"layouts": names, "devices": args.simulate, "steps": args.steps, "inject": args.inject}
    with ProgressBar("verifying") as progress:
        outcome = run(args.config, args.overrides, **options, progress=progress)
    width = None if sys.stdout.isatty() else 2 * WIDEST  # a file or pipe has none of its own
    console = Console(width=width, highlight=False)
    console.print("shrunk to compile fast, in float32:", *(f"  {change}" for change in outcome.changes), sep="\n")
    console.print(table(outcome, console.width))
    for line in details(outcome, console.width) + lines(outcome):
        console.print(line, markup=False, soft_wrap=True)
    return 0 if outcome.rows and all(row.is_equal for row in outcome.rows) else 1


def plan(args: argparse.Namespace) -> int:
    """Prints what a config needs on a target, compares two, or finds the best layout; 1 where it does not fit."""
    from jaxtrain.cli import plan, plan_search

    plan_search.check_options(args)
    overrides = list(args.overrides)
    if args.diff:  # then the first value takes the config's place
        overrides[:0] = [args.config] if args.config is not None else []
        a, b = args.diff
        return plan.compare(a, b, overrides, args)
    if args.config is None:
        raise UserError("plan: expected a config, or --diff A B")
    if args.search:
        return plan_search.show(args.config, overrides, args)
    return plan.show(args.config, overrides, args)


def report(args: argparse.Namespace) -> int:
    """Prints where the time of a run went, its curves and its restarts."""
    from jaxtrain.cli.report import show

    return show(args)


def schedule(args: argparse.Namespace) -> int:
    """Prints a pipeline schedule and its figures, and draws it; or sets all schedules side by side."""
    from rich.console import Console

    from jaxtrain.pipeline.schedules import draw
    from jaxtrain.pipeline.schedules.cost import price

    if args.schedule is None and not args.compare:
        raise UserError("schedule: expected the name of a schedule, or --compare")
    costs, tables = _costs(args.costs), _tables(args)
    console = Console(highlight=False)
    drawn = draw.chart(tables, costs, args.out or f"{tables[0].name}.svg") if args.out or not args.compare else None
    if args.compare:
        console.print(draw.compare(tables, costs))
    else:
        console.print(*draw.grid(tables[0], console.width), sep="\n")
        console.print(*draw.summary(tables[0], price(tables[0], costs), costs), sep="\n", markup=False)
    if drawn:
        print(f"chart: {drawn}")
    return 0


def _tables(args: argparse.Namespace) -> list[Table]:
    """The table asked for; to compare, a user's own and all that are shipped."""
    from jaxtrain.pipeline.schedules.files import is_file, load
    from jaxtrain.pipeline.schedules.shipped import SCHEDULES, make

    stages, microbatches, asked = args.stages, args.microbatches, []
    if args.schedule and is_file(args.schedule):
        asked = [load(args.schedule, stages, microbatches, args.chunks)]
        stages, microbatches = asked[0].stages, asked[0].microbatches
    size = (4 if stages is None else stages, 8 if microbatches is None else microbatches)
    if args.schedule and not asked:
        made = load(args.schedule, *size, args.chunks)
        asked = [] if args.compare else [made]
    shipped = SCHEDULES.items() if args.compare else ()
    return [*asked, *(make(name, *size, None if kind.chunks else args.chunks) for name, kind in shipped)]


def _costs(text: str) -> Costs:
    from jaxtrain.pipeline.schedules.cost import Costs

    try:
        costs = Costs(*map(float, text.split(",")))
    except (TypeError, ValueError):
        costs = Costs(0, 0, 0)
    if not all(0 < cost < float("inf") for cost in costs) or text.count(",") != 2:
        message = f"expected three numbers above 0, F,B,W such as 1,1.2,0.8; found {text!r}"
        raise ConfigError([Problem("command line", "--costs", message)])
    return costs


def _train(resolved: Config, directory: Path | None, args: argparse.Namespace, *, resume: bool) -> int:
    if args.deadline is not None and not 0 <= args.deadline < float("inf"):
        raise UserError(f"--deadline: expected seconds, or 0 for none; found {args.deadline:g}")
    _before_jax(args, resolved.simulate)
    from jaxtrain import api
    from jaxtrain.callbacks.samples import LossPlot, Samples
    from jaxtrain.errors import TrainingError
    from jaxtrain.exit_codes import SAVED
    from jaxtrain.trackers.console import Screen
    from jaxtrain.trackers.goodput import Ledger, process_age

    console, ledger = Screen(resolved.steps), Ledger(age=process_age() if args.is_all else 0.0)
    try:
        result = api.train(
            resolved, directory, resume=resume, profile=_span(args.profile), console=console, ledger=ledger,
            deadline=args.deadline, verbose=args.verbose, callbacks=[LossPlot(), Samples()],
        )  # fmt: skip
    except TrainingError as error:
        print(f"jaxtrain: {error}", file=sys.stderr)
        return 1
    console.print(f"next  {result.resume_command}")
    return SAVED if result.stopped_by else 0


def _overrides(args: argparse.Namespace) -> list[str]:
    """The `key=value` arguments and `--simulate`."""
    return [*args.overrides, *([] if args.simulate is None else [f"simulate={args.simulate}"])]


def _before_jax(args: argparse.Namespace, simulate: int | None = None) -> None:
    """What has to be so before JAX is imported."""
    if simulate or args.simulate:
        os.environ["JAX_PLATFORMS"] = "cpu"  # a TPU or GPU that is here is not even looked for
    xla_plugins.set_aside()
    sys.path.append(os.getcwd())  # a user's own `package.module:Class`


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
