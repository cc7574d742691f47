"""`jaxtrain schedule NAME`: prints and draws a pipeline schedule with its cost, or compares all schedules."""

from __future__ import annotations

import argparse

from rich.console import Console

from jaxtrain.config import ConfigError, Problem
from jaxtrain.errors import UserError
from jaxtrain.pipeline.schedules import draw
from jaxtrain.pipeline.schedules.cost import Costs, schedule_cost
from jaxtrain.pipeline.schedules.files import is_file, load_table
from jaxtrain.pipeline.schedules.shipped import SCHEDULES, shipped_table
from jaxtrain.pipeline.schedules.table import Table


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.schedule is None and not args.compare:
        raise UserError("schedule: expected the name of a schedule, or --compare")
    costs, tables = _costs(args.costs), _tables(args)
    console = Console(highlight=False)
    chart = (
        draw.save_chart(tables, costs, args.out or f"{tables[0].name}.svg") if args.out or not args.compare else None
    )
    if args.compare:
        console.print(draw.comparison(tables, costs))
    else:
        console.print(*draw.text_grid(tables[0], console.width), sep="\n")
        console.print(*draw.cost_lines(tables[0], schedule_cost(tables[0], costs), costs), sep="\n", markup=False)
    if chart:
        print(f"chart: {chart}")
    return 0


def _tables(args: argparse.Namespace) -> list[Table]:
    """Returns the requested table; with --compare, the user's own table and all shipped ones."""
    stages, microbatches, tables = args.stages, args.microbatches, []
    if args.schedule and is_file(args.schedule):
        tables = [load_table(args.schedule, stages, microbatches, args.chunks)]
        stages, microbatches = tables[0].stages, tables[0].microbatches
    size = (4 if stages is None else stages, 8 if microbatches is None else microbatches)
    if args.schedule and not tables:
        table = load_table(args.schedule, *size, args.chunks)
        tables = [] if args.compare else [table]
    shipped = SCHEDULES.items() if args.compare else ()
    return [*tables, *(shipped_table(name, *size, None if kind.chunks else args.chunks) for name, kind in shipped)]


def _costs(text: str) -> Costs:
    """Parses F,B,W."""
    try:
        costs = Costs(*map(float, text.split(",")))
    except (TypeError, ValueError):
        costs = Costs(0, 0, 0)
    if not all(0 < cost < float("inf") for cost in costs) or text.count(",") != 2:
        message = f"expected three numbers above 0, F,B,W such as 1,1.2,0.8; found {text!r}"
        raise ConfigError([Problem("command line", "--costs", message)])
    return costs
