"""`jaxtrain schedule NAME`: prints and draws a pipeline schedule with its cost, or compares all schedules."""

from __future__ import annotations

import argparse

import jaxtrain
from jaxtrain.errors import ConfigError, Problem, UserError
from jaxtrain.io.terminal import plain_console
from jaxtrain.pipeline.schedules import draw


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    size, costs = (args.stages, args.microbatches, args.chunks), _costs(args.costs)
    if args.compare:
        found = jaxtrain.compare_schedules(args.schedule, *size, costs=costs)
    elif args.schedule is None:
        raise UserError("schedule: expected the name of a schedule, or --compare")
    else:
        found = jaxtrain.schedule(args.schedule, *size, costs=costs)
    console, table = plain_console(), found.tables[0]
    chart = found.save(args.out or f"{table.name}.svg") if args.out or not args.compare else None
    if args.compare:
        console.print(draw.comparison(found.tables, found.costs))
    else:
        console.print(*draw.text_grid(table, console.width), sep="\n")
        console.print(*draw.cost_lines(table, found.figures[0], found.costs), sep="\n", markup=False)
    if chart:
        print(f"chart: {chart}")
    return 0


def _costs(text: str) -> tuple[float, float, float]:
    """Parses F,B,W."""
    try:
        forward, backward, weight = map(float, text.split(","))
    except ValueError:
        forward = backward = weight = 0.0
    if not all(0 < cost < float("inf") for cost in (forward, backward, weight)):
        message = f"expected three numbers above 0, F,B,W such as 1,1.2,0.8; found {text!r}"
        raise ConfigError([Problem("command line", "--costs", message)])
    return forward, backward, weight
