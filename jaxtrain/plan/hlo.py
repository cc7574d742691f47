"""Reads the text of a compiled XLA program: computations, loops with their trip counts, collectives. No JAX.

The text is that of `compiled.as_text()` for CPU, CUDA and TPU. These differ: CPU and CUDA write `known_trip_count` on
a loop where TPU leaves it to the loop's condition; CUDA splits collectives into `-start` and `-done`; TPU fuses a
reduce-scatter as an all-reduce and a slice in a computation of its own, and its shapes carry tiled layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

COLLECTIVES = (
    "all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\]")
_ACROSS = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SPACE = re.compile(r"\bS\((\d+)\)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_NAMED = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_ONCE = re.compile(r"\bonce_(\w+)/while$")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")


def bits(dtype: str) -> int:
    """Bits of an element: f32 32, bf16 16, f8e4m3fn 8, s4 4, c64 64, pred 8 (it is stored in a byte)."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width:
        raise ValueError(f"HLO: unknown element type `{dtype}`")
    return int(width[1])


@dataclass(frozen=True)
class Shape:
    """An array, or a tuple of shapes where `parts` is not None.

    `space` is where it lies: 0 the device's memory, 1 a TPU's VMEM, 5 the host's memory.
    """

    dtype: str = ""
    dims: tuple[int, ...] = ()
    parts: tuple[Shape, ...] | None = None
    space: int = 0

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """All arrays."""
        return (self,) if self.parts is None else tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each rounded up to whole bytes; without the padding of a tiled layout."""
        return sum(-(-leaf.elements * bits(leaf.dtype) // 8) for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """Of an array."""
        return prod(self.dims)


def shape(text: str) -> Shape:
    """`bf16[2,64]{1,0:T(8,128)(2,1)}` or `(f32[], (s32[4], u32[]))`; a dynamic `<=8` counts as 8."""
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return Shape(parts=tuple(shape(part) for part in _split(text[1:-1])))
    found = _ARRAY.match(text)
    if not found:
        return Shape(next(iter(re.findall(r"^\w+", text)), "token"))
    space = _SPACE.search(text)
    dims = tuple(int(size.strip(" <=")) for size in found[2].split(",") if size.strip())
    return Shape(found[1], dims, space=int(space[1]) if space else 0)


def _split(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    raise ValueError(f"HLO: unbalanced brackets in `{text.strip()[:80]}`")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation. `attributes` is all text after the operands, metadata included."""

    name: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    root: bool
    _shape: str
    _inside: str

    @cached_property
    def shape(self) -> Shape:
        """Of the result."""
        return shape(self._shape)

    @property
    def scope(self) -> str:
        """`op_name` of the metadata: the path of JAX's name scopes; empty where the compiler lost it."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def literal(self) -> int | None:
        """Value of an integer constant."""
        text = self._inside.strip()
        return int(text) if self.op == "constant" and re.fullmatch(r"-?\d+", text) else None

    def attribute(self, name: str) -> str:
        """Text of a plain attribute such as `index=4` or `body=%b`; empty where there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""

    def sizes(self, name: str) -> tuple[int, ...]:
        """Numbers of an attribute such as `lhs_contracting_dims={1,2}`; empty where there is none."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(size) for size in found[1].split(",") if size) if found else ()

    @property
    def number(self) -> int:
        """Of a `parameter(0)`; -1 of anything else."""
        return int(self._inside) if self.op == "parameter" else -1

    @property
    def collective(self) -> str | None:
        """Which collective this starts: `all-gather` of `all-gather` and `all-gather-start`, None of others.

        Between TPU slices a collective is a `send` to the host, which says what becomes of it.
        """
        if self.op == "send" and (across := _ACROSS.search(self.attributes)):
            name = across[1].lower().replace("_", "-")
            return name if name in COLLECTIVES else "collective-permute"
        op = self.op.removesuffix("-start")
        return op if op in COLLECTIVES else None

    @property
    def called(self) -> list[str]:
        """Computations that this runs once; of an asynchronous call only its start counts."""
        late = self.op.endswith(("-done", "-update"))
        return [] if late else _names(_CALLED, self.attributes)

    @property
    def turn(self) -> str:
        """Name of a loop of one turn or none (`jaxtrain.pipeline.stage.once`); empty of anything else."""
        found = _ONCE.search(self.scope) if self.op == "while" else None
        return found[1] if found else ""

    @property
    def branches(self) -> list[str]:
        """Computations of which a conditional runs one."""
        return _names(_BRANCHES, self.attributes)

    @property
    def result(self) -> Shape:
        """What a collective gives: the shape itself, or the results out of the tuple that a `-start` gives.

        Of a `send` what it sends.
        """
        parts = self.shape.parts
        if self.op == "send" and parts:
            return parts[0]
        # all-reduce-start gives its results alone; the others (operands, results, contexts ...).
        plain = self.op == "all-reduce-start" and (parts is None or parts[0].parts is None)
        return self.shape if plain or not self.op.endswith("-start") or not parts else parts[1]


def _names(pattern: re.Pattern[str], text: str) -> list[str]:
    return [
        name.strip(" %") for found in pattern.findall(text) for name in found.strip("{}").split(",") if name.strip()
    ]


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    """Computations by name, each with its instructions by name in order."""

    computations: dict[str, Computation]
    entry: str


def parse(text: str) -> Module:
    """The module of a compiled program's text. Raises ValueError where there is no entry computation."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry, last = "", ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            entry, last = header[2] if header[1] else entry, ""
        elif (named := _NAMED.match(line)) and computations:
            last = named[2]
            current[last] = _instruction(line, named)
        elif (last and line[:1] not in (" ", "}")) or line.startswith("}}"):  # a kernel's metadata hold line ends
            current[last] = replace(current[last], attributes=f"{current[last].attributes} {line}")
    if not entry:
        raise ValueError("HLO: no ENTRY computation; expected the text of a compiled program")
    return Module(computations, entry)


def _instruction(line: str, named: re.Match[str]) -> Instruction:
    at = named.end()
    end = _closing(line, at) if line[at] == "(" else line.index(" ", at)
    start = line.index("(", end)
    close = _closing(line, start)
    inside = _COMMENT.sub("", line[start + 1 : close - 1])
    return Instruction(
        name=named[2], op=line[end:start].strip(), operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        attributes=line[close:], root=bool(named[1]), _shape=line[at:end], _inside=inside,
    )  # fmt: skip


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


def _of(module: Module, name: str, instruction: Instruction, known: dict[str, list[Site]]) -> Iterator[Site]:
    """The sites of one instruction: itself, or what it calls."""
    if op := instruction.collective:
        scattered = op == "all-reduce" and name.startswith("all-reduce-scatter")
        yield Site(instruction, name, "reduce-scatter" if scattered else op)
        return
    inside, trips = instruction.called + instruction.branches, 1
    if instruction.op == "while":
        inside = [instruction.attribute("condition"), instruction.attribute("body")]
        trips = 1 if instruction.turn else trip_count(module, module.computations[name], instruction)
    for part in inside:
        for site in _sites(module, part, known):
            yield replace(
                site, times=site.times * (1 if trips is None else trips), unknown=site.unknown or trips is None,
                conditional=site.conditional or part in instruction.branches or bool(instruction.turn),
                scope=site.scope or instruction.scope, turns=(*filter(None, [instruction.turn]), *site.turns),
            )  # fmt: skip


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How often a loop's body runs; None where that is no constant.

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
    """What the body adds to the counter."""
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
    """What an instruction is a copy of."""
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
