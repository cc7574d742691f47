"""Call sites of collectives in a compiled program, and how often each runs: loops, branches, fusions.

A TPU program overlaps a collective with computation by carrying it through several fusions with the same chain id: one
starts it (`AsyncCollectiveStart`), others continue it while they multiply, one ends it (`AsyncCollectiveDone`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtrain.hlo.parse import Computation, Instruction, Module, root


@dataclass(frozen=True)
class CallSite:
    """A collective, and how often a device runs it in one run of the program.

    Args:
        op: one of COLLECTIVES; an all-reduce and a slice that TPU fuses count as a reduce-scatter.
        runs: product of the trip counts of the enclosing loops.
        is_conditional: a conditional or a loop that runs at most once encloses it, so `runs` is an upper bound.
        is_unbounded: an enclosing loop has no constant trip count and counts as one trip.
        scope: name scope of the innermost enclosing call, loop or fusion.
        once_loops: enclosing loops that run at most once, outermost first (`Instruction.once_loop`).
    """

    instruction: Instruction
    computation: str
    op: str
    runs: int = 1
    is_conditional: bool = False
    is_unbounded: bool = False
    scope: str = ""
    once_loops: tuple[str, ...] = ()


def call_sites(module: Module) -> list[CallSite]:
    """Every collective that the entry computation reaches, once for each path to it."""
    return _call_sites(module, module.entry, {})


def _call_sites(module: Module, name: str, cache: dict[str, list[CallSite]]) -> list[CallSite]:
    if name not in cache:
        sites = cache[name] = []
        for instruction in module.computations.get(name, {}).values():
            sites += _instruction_sites(module, name, instruction, cache)
    return cache[name]


def async_chain(computation: Computation) -> tuple[str, str]:
    """Chain id of a fused computation that carries a TPU's collective, and `start`, `continue` or `done`."""
    chain = next((one.chain_id for one in computation.values() if one.collective and one.chain_id), "")
    if not chain:
        return "", ""
    targets = {one.custom_call_target for one in computation.values()}
    if "AsyncCollectiveStart" in targets:
        return chain, "start"
    return chain, "done" if "AsyncCollectiveDone" in targets else "continue"


def _instruction_sites(
    module: Module, name: str, instruction: Instruction, cache: dict[str, list[CallSite]]
) -> Iterator[CallSite]:
    """Call sites of one instruction: itself, or those in what it calls. A carried collective counts at its start."""
    if op := instruction.collective:
        is_scatter = op == "all-reduce" and name.startswith("all-reduce-scatter")
        yield CallSite(instruction, name, "reduce-scatter" if is_scatter else op)
        return
    inside, trips = instruction.called + instruction.branches, 1
    if instruction.op == "while":
        inside = [instruction.attribute("condition"), instruction.attribute("body")]
        trips = 1 if instruction.once_loop else trip_count(module, module.computations[name], instruction)
    for part in inside:
        if instruction.op == "fusion" and async_chain(module.computations.get(part, {}))[1] in ("continue", "done"):
            continue
        for site in _call_sites(module, part, cache):
            yield replace(
                site, runs=site.runs * (1 if trips is None else trips), is_unbounded=site.is_unbounded or trips is None,
                is_conditional=site.is_conditional or part in instruction.branches or bool(instruction.once_loop),
                scope=site.scope or instruction.scope,
                once_loops=(*filter(None, [instruction.once_loop]), *site.once_loops),
            )  # fmt: skip


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Trip count of a loop; None if it is not constant.

    Reads `known_trip_count` if the compiler wrote it. Otherwise the condition must be `counter < constant`, the body
    must add a constant to the counter, and the counter must start at a constant: an unrolled loop on TPU steps by 2 or
    more, so the constant of the condition is not its trip count.
    """
    if match := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
        return int(match[1])
    counter, limit = _condition(module.computations.get(loop.attribute("condition"), {}))
    if counter is None or limit is None:
        return None
    step = _increment(module, module.computations.get(loop.attribute("body"), {}), counter)
    start = _constant(module, computation, _tuple_element(computation, loop.operands[0], counter))
    if step is None or step <= 0 or start is None:
        return None
    return max(0, -(-(limit - start) // step))


def _condition(condition: Computation) -> tuple[int | None, int | None]:
    """Index of the counter in the loop's tuple, and the exclusive limit of the counter."""
    compare = root(condition)
    if compare is None or compare.op != "compare" or compare.attribute("direction") not in ("LT", "LE"):
        return None, None
    counter, limit = (_copy_source(condition, condition.get(name)) for name in compare.operands)
    if counter is None or limit is None or counter.op != "get-tuple-element" or limit.int_constant is None:
        return None, None
    return int(counter.attribute("index")), limit.int_constant + (compare.attribute("direction") == "LE")


def _increment(module: Module, body: Computation, counter: int) -> int | None:
    """Constant that a loop's body adds to the counter."""
    result = root(body)
    if result is None or result.op != "tuple" or counter >= len(result.operands):
        return None
    addition = _copy_source(body, body.get(result.operands[counter]))
    if addition is None or addition.op != "add":
        return None
    terms = [_copy_source(body, body.get(name)) for name in addition.operands]
    counters = [t for t in terms if t and t.op == "get-tuple-element" and t.attribute("index") == str(counter)]
    steps = [value for value in (_constant(module, body, term) for term in terms) if value is not None]
    return steps[0] if len(counters) == len(steps) == 1 else None


def _copy_source(computation: Computation, instruction: Instruction | None) -> Instruction | None:
    """Instruction whose value this one copies, or the instruction itself."""
    while instruction is not None and instruction.op in ("copy", "bitcast", "copy-start", "copy-done"):
        instruction = computation.get(instruction.operands[0])
    return instruction


def _tuple_element(computation: Computation, tuple_name: str, index: int) -> Instruction | None:
    """Instruction that produced an element of a tuple."""
    source = computation.get(tuple_name)
    if source is None or source.op != "tuple" or index >= len(source.operands):
        return None
    return computation.get(source.operands[index])


def _constant(module: Module, computation: Computation, instruction: Instruction | None) -> int | None:
    """Value of an integer constant, through copies and fusions that only pass it on."""
    source = _copy_source(computation, instruction)
    if source is None or source.op != "fusion" or len(source.called) != 1:
        return None if source is None else source.int_constant
    inner = module.computations.get(source.called[0], {})
    return _constant(module, inner, root(inner))
