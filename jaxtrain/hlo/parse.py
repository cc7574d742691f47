"""Parser of a compiled XLA program's text: computations, instructions, shapes.

The text is that of `compiled.as_text()` for CPU, CUDA and TPU. CPU and CUDA write `known_trip_count` on a loop; TPU
leaves it to the loop's condition. CUDA splits collectives into `-start` and `-done`. TPU fuses a reduce-scatter as an
all-reduce and a slice in one computation, and its shapes have tiled layouts.
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
_DCN_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_MEMORY_SPACE = re.compile(r"\bS\((\d+)\)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*->.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(?:calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)")
_ONCE_LOOP = re.compile(r"\brun_if_(\w+)/while$")


def element_bits(dtype: str) -> int:
    """Bits of an element: f32 32, bf16 16, f8e4m3fn 8, s4 4, c64 64, pred 8 (stored in a byte)."""
    if dtype in _BITS:
        return _BITS[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width:
        raise ValueError(f"HLO: unknown element type `{dtype}`")
    return int(width[1])


@dataclass(frozen=True)
class HloShape:
    """An array, or a tuple of shapes if `parts` is not None.

    `memory_space` is 0 for device memory, 1 for a TPU's VMEM, 5 for host memory.
    """

    dtype: str = ""
    dims: tuple[int, ...] = ()
    parts: tuple[HloShape, ...] | None = None
    memory_space: int = 0

    @property
    def leaves(self) -> tuple[HloShape, ...]:
        """Arrays of the shape, in order."""
        return (self,) if self.parts is None else tuple(leaf for part in self.parts for leaf in part.leaves)

    @property
    def bytes(self) -> int:
        """Bytes of all arrays, each rounded up to whole bytes; without the padding of a tiled layout."""
        return sum(-(-leaf.elements * element_bits(leaf.dtype) // 8) for leaf in self.leaves)

    @property
    def elements(self) -> int:
        """Number of elements of an array."""
        return prod(self.dims)


def parse_shape(text: str) -> HloShape:
    """Parses `bf16[2,64]{1,0:T(8,128)(2,1)}` or `(f32[], (s32[4], u32[]))`; a dynamic `<=8` counts as 8."""
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return HloShape(parts=tuple(parse_shape(part) for part in _split_tuple(text[1:-1])))
    array = _ARRAY.match(text)
    if not array:
        return HloShape(next(iter(re.findall(r"^\w+", text)), "token"))
    space = _MEMORY_SPACE.search(text)
    dims = tuple(int(size.strip(" <=")) for size in array[2].split(",") if size.strip())
    return HloShape(array[1], dims, memory_space=int(space[1]) if space else 0)


def _split_tuple(text: str) -> list[str]:
    """Splits at the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _after_bracket(text: str, start: int) -> int:
    """Index after the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index + 1
    raise ValueError(f"HLO: unbalanced brackets in `{text.strip()[:80]}`")


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation. `attributes` is all text after the operands, metadata included."""

    name: str
    op: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool
    _shape: str
    _arguments: str

    @cached_property
    def shape(self) -> HloShape:
        """Shape of the result, with the operands and contexts of a `-start`."""
        return parse_shape(self._shape)

    @property
    def result(self) -> HloShape:
        """Shape of a collective's result, without the operands and contexts of a `-start`; of a `send`, its data."""
        parts = self.shape.parts
        if self.op == "send" and parts:
            return parts[0]
        # all-reduce-start returns only its results; other starts return (operands, results, contexts ...).
        is_result = self.op == "all-reduce-start" and (parts is None or parts[0].parts is None)
        return self.shape if is_result or not self.op.endswith("-start") or not parts else parts[1]

    @property
    def scope(self) -> str:
        """Path of JAX's name scopes (`op_name` of the metadata); empty if the compiler lost it."""
        return _first_scope(self._quoted("op_name"))

    @property
    def custom_call_target(self) -> str:
        """Library call or kernel of a custom call; empty for other instructions."""
        return self._quoted("custom_call_target") if self.op == "custom-call" else ""

    @property
    def chain_id(self) -> str:
        """Name that the fusions of one TPU collective share; else empty."""
        return self._quoted("chain_id")

    @property
    def rendezvous(self) -> str:
        """Name that a `send` and a `recv` between TPU slices share; else empty."""
        return self._quoted("_xla_host_transfer_rendezvous")

    def _quoted(self, name: str) -> str:
        match = re.search(rf'{name}="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def attribute(self, name: str) -> str:
        """Text of a plain attribute such as `index=4` or `body=%b`; empty if absent."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match[1] if match else ""

    def int_list(self, name: str) -> tuple[int, ...]:
        """Integers of an attribute such as `lhs_contracting_dims={1,2}`; empty if absent."""
        match = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(size) for size in match[1].split(",") if size) if match else ()

    @property
    def int_constant(self) -> int | None:
        """Value of an integer constant; None for other instructions."""
        text = self._arguments.strip()
        return int(text) if self.op == "constant" and re.fullmatch(r"-?\d+", text) else None

    @property
    def parameter_number(self) -> int:
        """Number of a `parameter(0)`; -1 for other instructions."""
        return int(self._arguments) if self.op == "parameter" else -1

    @property
    def collective(self) -> str | None:
        """Kind of collective that this starts, such as `all-gather` for `all-gather-start`; else None.

        Between TPU slices a collective is a `send` to the host, whose attributes name the kind.
        """
        if self.op == "send" and (transfer := _DCN_TRANSFER.search(self.attributes)):
            name = transfer[1].lower().replace("_", "-")
            return name if name in COLLECTIVES else "collective-permute"
        op = self.op.removesuffix("-start")
        return op if op in COLLECTIVES else None

    @property
    def called(self) -> list[str]:
        """Computations that this runs once; an asynchronous call counts at its start."""
        return [] if self.op.endswith(("-done", "-update")) else _names(_CALLED, self.attributes)

    @property
    def branches(self) -> list[str]:
        """Computations of which a conditional runs one."""
        return _names(_BRANCHES, self.attributes)

    @property
    def once_loop(self) -> str:
        """Name of a loop that runs at most once (`jaxtrain.pipeline.stage.run_if`); else empty."""
        match = _ONCE_LOOP.search(self.scope) if self.op == "while" else None
        return match[1] if match else ""


def _first_scope(scope: str) -> str:
    """Returns the first of several scopes: newer XLA names `a/(b:c)` what it made of `a/b` and `a/c`."""
    depth = first = 0
    start = scope.find("/(") + 1
    for at in range(start, len(scope)) if start else ():
        depth += {"(": 1, ")": -1}.get(scope[at], 0)
        if scope[at] == ":" and depth == 1:
            first = first or at
        if depth == 0:
            return scope[:start] + scope[start + 1 : first] + scope[at + 1 :] if first else scope
    return scope


def _names(pattern: re.Pattern[str], text: str) -> list[str]:
    groups = (group.strip("{}").split(",") for group in pattern.findall(text))
    return [name.strip(" %") for group in groups for name in group if name.strip()]


Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Module:
    """Computations by name, each with its instructions by name in order."""

    computations: dict[str, Computation]
    entry: str


def root(computation: Computation) -> Instruction | None:
    """Root instruction of a computation; None for an empty one."""
    return next((one for one in computation.values() if one.is_root), None)


def parse(text: str) -> Module:
    """Parses the text of a compiled program. Raises ValueError if it has no entry computation."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry, last = "", ""
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations.setdefault(header[2], {})
            entry, last = header[2] if header[1] else entry, ""
        elif (match := _INSTRUCTION.match(line)) and computations:
            last = match[2]
            current[last] = _instruction(line, match)
        elif (last and line[:1] not in (" ", "}")) or line.startswith("}}"):  # line breaks in a kernel's metadata
            current[last] = replace(current[last], attributes=f"{current[last].attributes} {line}")
    if not entry:
        raise ValueError("HLO: no ENTRY computation; expected the text of a compiled program")
    return Module(computations, entry)


def _instruction(line: str, match: re.Match[str]) -> Instruction:
    shape_start = match.end()
    if shape_start == len(line):
        raise ValueError(f"HLO: no shape in `{line.strip()[:80]}`")
    shape_end = _after_bracket(line, shape_start) if line[shape_start] == "(" else line.index(" ", shape_start)
    start = line.index("(", shape_end)
    end = _after_bracket(line, start)
    arguments = _COMMENT.sub("", line[start + 1 : end - 1])
    return Instruction(
        name=match[2], op=line[shape_end:start].strip(), operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        attributes=line[end:], is_root=bool(match[1]), _shape=line[shape_start:shape_end], _arguments=arguments,
    )  # fmt: skip
