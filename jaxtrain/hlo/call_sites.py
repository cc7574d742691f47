"""Call sites of collectives in a compiled program, and how often they run: loops and their trip counts, branches,
fusions.

A TPU program runs a collective beside computing by carrying it through several fusions, which all name it: one starts
it (`AsyncCollectiveStart`), others go on with it while they multiply, one ends it (`AsyncCollectiveDone`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtrain.hlo.parse import Computation, Instruction, Module


@dataclass(frozen=True)
class Site:
    """A collective and how often a device runs it in one run of the program.

    Args:
        op: one of COLLECTIVES; a reduce-scatter that TPU writes as an all-reduce and a slice is a reduce-scatter.
        times: product of the trip counts of the loops around it.
        conditional: a branch of a conditional holds it, or a loop of one turn or none, so `times` is the most.
        unknown: a loop around it has no constant trip count; `times` takes that loop once.
        scope: of the innermost call, loop or fusion around it.
        turns: of the loops of one turn or none around it, outermost first (`Instruction.turn`).
    """

    instruction: Instruction
    computation: str
    op: str
    times: int = 1
    conditional: bool = False
    unknown: bool = False
    scope: str = ""
    turns: tuple[str, ...] = ()


def sites(module: Module) -> list[Site]:
    """Every collective that the entry computation reaches, once for each way to it."""
    known: dict[str, list[Site]] = {}
    return _sites(module, module.entry, known)


def _sites(module: Module, name: str, known: dict[str, list[Site]]) -> list[Site]:
    if name not in known:
        found = known[name] = []
        for instruction in module.computations.get(name, {}).values():
            found += _of(module, name, instruction, known)
    return known[name]


def chained(computation: Computation) -> tuple[str, str]:
    """Returns the chain of a fused computation that carries a TPU's collective, and `start`, `on` or `done`."""
    chain = next((one.chain for one in computation.values() if one.collective and one.chain), "")
    targets = {one.target for one in computation.values()} if chain else set()
    place = "start" if "AsyncCollectiveStart" in targets else "done" if "AsyncCollectiveDone" in targets else "on"
    return chain, place if chain else ""


def _of(module: Module, name: str, instruction: Instruction, known: dict[str, list[Site]]) -> Iterator[Site]:
    """The sites of one instruction: itself, or what it calls. What a TPU carries on counts where it starts."""
    if op := instruction.collective:
        scattered = op == "all-reduce" and name.startswith("all-reduce-scatter")
        yield Site(instruction, name, "reduce-scatter" if scattered else op)
        return
    inside, trips = instruction.called + instruction.branches, 1
    if instruction.op == "while":
        inside = [instruction.attribute("condition"), instruction.attribute("body")]
        trips = 1 if instruction.turn else trip_count(module, module.computations[name], instruction)
    for part in inside:
        if instruction.op == "fusion" and chained(module.computations.get(part, {}))[1] in ("on", "done"):
            continue
        for site in _sites(module, part, known):
            yield replace(
                site, times=site.times * (1 if trips is None else trips), unknown=site.unknown or trips is None,
                conditional=site.conditional or part in instruction.branches or bool(instruction.turn),
                scope=site.scope or instruction.scope, turns=(*filter(None, [instruction.turn]), *site.turns),
            )  # fmt: skip


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of a loop; None if it is not constant.

    `known_trip_count` where the compiler wrote it. Else the condition must be `counter < constant`, the body must
    add a constant to the counter, and the loop begin with a constant: on TPU an unrolled loop steps by 2 or more, so
    that the constant of the condition alone would count it twice.
    """
    if written := re.search(r"known_trip_count\W+n\W+(\d+)", loop.attributes):
        return int(written[1])
    condition = module.computations.get(loop.attribute("condition"), {})
    body = module.computations.get(loop.attribute("body"), {})
    counter, limit, inclusive = _bound(condition)
    if counter is None or limit is None:
        return None
    step = _step(module, body, counter)
    first = _constant(module, computation, _element(computation, loop.operands[0], counter))
    if step is None or step <= 0 or first is None:
        return None
    return max(0, -(-(limit + inclusive - first) // step))


def _bound(condition: Computation) -> tuple[int | None, int | None, bool]:
    """(index of the counter in the loop's tuple, constant it is compared with, whether that is included)."""
    root = next((i for i in condition.values() if i.root), None)
    if root is None or root.op != "compare" or root.attribute("direction") not in ("LT", "LE"):
        return None, None, False
    counter, limit = (_source(condition, condition.get(name)) for name in root.operands)
    if counter is None or limit is None or counter.op != "get-tuple-element":
        return None, None, False
    return int(counter.attribute("index")), limit.literal, root.attribute("direction") == "LE"


def _step(module: Module, body: Computation, counter: int) -> int | None:
    """Returns the increment of the counter in the body."""
    root = next((i for i in body.values() if i.root), None)
    if root is None or root.op != "tuple" or counter >= len(root.operands):
        return None
    added = _source(body, body.get(root.operands[counter]))
    if added is None or added.op != "add":
        return None
    parts = [_source(body, body.get(name)) for name in added.operands]
    itself = [p for p in parts if p and p.op == "get-tuple-element" and p.attribute("index") == str(counter)]
    steps = [value for value in (_constant(module, body, part) for part in parts) if value is not None]
    return steps[0] if len(itself) == len(steps) == 1 else None


def _source(computation: Computation, instruction: Instruction | None) -> Instruction | None:
    """Returns the instruction that this one copies."""
    while instruction is not None and instruction.op in ("copy", "bitcast", "copy-start", "copy-done"):
        instruction = computation.get(instruction.operands[0])
    return instruction


def _element(computation: Computation, tuple_name: str, index: int) -> Instruction | None:
    """The instruction that made an element of a tuple."""
    made = computation.get(tuple_name)
    if made is None or made.op != "tuple" or index >= len(made.operands):
        return None
    return computation.get(made.operands[index])


def _constant(module: Module, computation: Computation, instruction: Instruction | None) -> int | None:
    """Value of an integer constant, seen through copies and fusions that only hand one on."""
    source = _source(computation, instruction)
    if source is None or source.op != "fusion" or len(source.called) != 1:
        return None if source is None else source.literal
    inner = module.computations.get(source.called[0], {})
    return _constant(module, inner, next((i for i in inner.values() if i.root), None))
