"""Matmul FLOPs that one device runs in a compiled pipeline step, for pipeline.py. No JAX."""

from __future__ import annotations

import re
from math import prod

import numpy as np

from jaxtrain.pipeline.table import Action, Table
from jaxtrain.plan import hlo


def flops(text: str, table: Table | None = None) -> float:
    """FLOPs of all dots, loops as often as they run.

    Args:
        text: `compiled.as_text()`.
        table: says how often each branch of a conditional is taken, on a stage as busy as all together are on average:
            of one with 5 branches, the table's actions; of one with 2, once a microbatch. Without one there may be no
            dot in a conditional.

    Raises:
        ValueError: a dot in a conditional, or a loop, of which it is not known how often it runs.
    """
    module = hlo.parse(text)
    known: dict[str, float] = {}

    def of(name: str) -> float:
        if name not in known:
            computation = module.computations[name]
            known[name] = sum(one(computation, instruction) for instruction in computation.values())
        return known[name]

    def one(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
        if instruction.op == "dot":
            return dot(computation, instruction)
        if instruction.op == "while":
            body = of(instruction.attribute("body"))
            trips = hlo.trip_count(module, computation, instruction)
            if body and trips is None:
                raise ValueError(f"loop {instruction.name} has matmuls and no constant trip count")
            return body * (trips or 0)
        inside = [of(branch) for branch in instruction.branches]
        return sum(map(of, instruction.called)) + (shared(inside, table) if any(inside) else 0.0)

    return of(module.entry)


def dot(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
    """Twice the result's elements times the contracted ones."""
    dims = computation[instruction.operands[0]].shape.dims
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    contracted = [int(dim) for dim in found[1].split(",") if dim] if found else []
    return 2.0 * prod(instruction.shape.dims) * prod(dims[dim] for dim in contracted)


def shared(branches: list[float], table: Table | None) -> float:
    """FLOPs of a conditional in a tick, on the average of ticks and stages."""
    if table is not None and len(branches) == len(Action):
        return float(np.dot(branches, np.bincount(table.action.ravel(), minlength=len(Action)))) / table.action.size
    if table is not None and len(branches) == 2 and 0.0 in branches:
        return sum(branches) * table.microbatches / table.ticks
    raise ValueError(f"a conditional of {len(branches)} branches with matmuls, which no table tells apart")
