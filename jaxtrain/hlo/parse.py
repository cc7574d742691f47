"""Reads the text of a compiled XLA program: computations, loops with their trip counts, collectives.

The text is that of `compiled.as_text()` for CPU, CUDA and TPU. These differ: CPU and CUDA write `known_trip_count` on
a loop where TPU leaves it to the loop's condition; CUDA splits collectives into `-start` and `-done`; TPU fuses a
reduce-scatter as an all-reduce and a slice in a computation of its own, and its shapes carry tiled layouts.
"""

from __future__ import annotations

import re
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
class HloShape:
    """An array, or a tuple of shapes where `parts` is not None.

    `space` is where it lies: 0 the device's memory, 1 a TPU's VMEM, 5 the host's memory.
    """

    dtype: str = ""
    dims: tuple[int, ...] = ()
    parts: tuple[HloShape, ...] | None = None
    space: int = 0

    @property
    def leaves(self) -> tuple[HloShape, ...]:
        """Arrays of the shape, in order."""
        return (self,) if self.parts is None else tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each rounded up to whole bytes; without the padding of a tiled layout."""
        return sum(-(-leaf.elements * bits(leaf.dtype) // 8) for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """Number of elements of an array."""
        return prod(self.dims)


def shape(text: str) -> HloShape:
    """`bf16[2,64]{1,0:T(8,128)(2,1)}` or `(f32[], (s32[4], u32[]))`; a dynamic `<=8` counts as 8."""
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return HloShape(parts=tuple(shape(part) for part in _split(text[1:-1])))
    found = _ARRAY.match(text)
    if not found:
        return HloShape(next(iter(re.findall(r"^\w+", text)), "token"))
    space = _SPACE.search(text)
    dims = tuple(int(size.strip(" <=")) for size in found[2].split(",") if size.strip())
    return HloShape(found[1], dims, space=int(space[1]) if space else 0)


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
    def shape(self) -> HloShape:
        """Shape of the result."""
        return shape(self._shape)

    @property
    def scope(self) -> str:
        """`op_name` of the metadata: the path of JAX's name scopes; empty where the compiler lost it."""
        return self._quoted("op_name")

    @property
    def target(self) -> str:
        """Library call or kernel of a custom call; empty for other instructions."""
        return self._quoted("custom_call_target") if self.op == "custom-call" else ""

    @property
    def chain(self) -> str:
        """Name that the fusions of one TPU collective have in common; else empty."""
        return self._quoted("chain_id")

    @property
    def rendezvous(self) -> str:
        """Name that a `send` and a `recv` between TPU slices have in common; else empty."""
        return self._quoted("_xla_host_transfer_rendezvous")

    def _quoted(self, name: str) -> str:
        found = re.search(rf'{name}="([^"]*)"', self.attributes)
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
        """Number of a `parameter(0)`; -1 for other instructions."""
        return int(self._inside) if self.op == "parameter" else -1

    @property
    def collective(self) -> str | None:
        """Kind of collective that this starts: `all-gather` of `all-gather` and `all-gather-start`, None of others.

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
    def result(self) -> HloShape:
        """Returns the shape of a collective's result: the shape itself, or the results out of the tuple that a `-start`
        gives.

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
