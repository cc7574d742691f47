"""Bytes that an instruction of a compiled program moves between the chip and its memory.

What a fusion computes inside stays on the chip: it reads its operands and writes its results. It reads of an operand
only the part that it slices, and writes of a buffer only the part that it updates.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxtrain.hlo.parse import Computation, HloShape, Instruction, Module

# What moves nothing: names for parts of other buffers, and what is accounted for where it calls.
FREE = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "async-start", "async-update", "async-done",
    "copy-done", "slice-done", "dynamic-slice-done", "recv", "domain",
))  # fmt: skip
ALIASES = ("bitcast", "reshape", "copy", "convert")  # inside of a fusion they cost nothing
SLICES = ("dynamic-slice", "slice", "gather")
HBM, HOST = 0, 5
TO_HOST, FROM_HOST = "to host", "from host"


def moved(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes read and written by one run of an instruction that is not inside of a fusion."""
    op = instruction.op
    if op in FREE or op.endswith("-done"):
        return 0
    if op == "custom-call" and not instruction.operands:  # a buffer that another one fills
        return 0
    if op in ("fusion", "fusion-start"):
        return _fusion(module, instruction, instruction.result, computation)
    operands = [computation[name].shape for name in instruction.operands if name in computation]
    if op == "copy-start":
        return _here(_sides(instruction.shape))
    if op.removesuffix("-start") in SLICES:
        part = instruction.result
        return sum(part.bytes for shape in (part, *operands[:1]) if shape.space == HBM)
    if op.removesuffix("-start") == "dynamic-update-slice":
        part = operands[1]
        return sum(part.bytes for shape in (part, instruction.result) if shape.space == HBM)
    if op == "scatter":
        return 3 * _here(operands[-1:])
    return _here(operands) + _here([instruction.shape])


def _here(shapes: Iterable[HloShape]) -> int:
    """Bytes of what lies in the device's memory."""
    return sum(leaf.bytes for shape in shapes for leaf in shape.leaves if leaf.space == HBM)


def _sides(shape: HloShape) -> list[HloShape]:
    """Returns (destination, source) of an asynchronous copy, or (operands, results) of another start."""
    return list(shape.parts or [])[:2]


def with_host(module: Module, instruction: Instruction, computation: Computation) -> tuple[str, int]:
    """(TO_HOST or FROM_HOST, bytes) of one run of an instruction that moves something between device and host.

    ("", 0) of any other. Values that wait in the host's memory for the backward pass are parts of arrays there, one for
    each layer: `dynamic-update-slice` writes them, `dynamic-slice` reads them, on a GPU inside of a fusion.
    """
    if instruction.op in FREE or instruction.op.endswith("-done") or not instruction.operands:
        return "", 0
    to, source = _ends(instruction, computation)
    into, out = (any(leaf.space == HOST for shape in shapes for leaf in shape.leaves) for shapes in (to, source))
    is_update = instruction.op.removesuffix("-start") in ("fusion", "dynamic-update-slice")
    if is_update and into and (update := _update(module, computation, instruction)) is not None:
        return (TO_HOST, update.bytes) if update.space != HOST else ("", 0)
    if into == out:
        return "", 0
    return TO_HOST if into else FROM_HOST, sum(shape.bytes for shape in to)


def _ends(instruction: Instruction, computation: Computation) -> tuple[list[HloShape], list[HloShape]]:
    """Returns the values that an instruction writes, and those it reads."""
    if instruction.op == "copy-start":
        to, source = _sides(instruction.shape)
        return [to], [source]
    return [instruction.result], [computation[name].shape for name in instruction.operands if name in computation]


def _fusion(module: Module, instruction: Instruction, result: HloShape, computation: Computation) -> int:
    inner = module.computations.get(next(iter(instruction.called), ""), {})
    by_number = {one.number: one for one in inner.values() if one.op == "parameter"}
    read = 0
    for number, name in enumerate(instruction.operands):
        shape = computation[name].shape if name in computation else None
        if shape is None or not _here([shape]):
            continue
        part = _read(module, inner, by_number[number]) if number in by_number else None
        read += shape.bytes if part is None else min(part, shape.bytes)
    return read + _written(module, inner, result)


def _read(module: Module, inner: Computation, parameter: Instruction) -> int | None:
    """Bytes that a fusion reads of one of its operands; None for all."""
    total = 0
    for user in inner.values():
        if parameter.name not in user.operands:
            continue
        if user.op in SLICES and user.operands[0] == parameter.name:
            part: int | None = user.shape.bytes
        elif user.op == "dynamic-update-slice" and user.operands[0] == parameter.name:
            part = 0  # updated in place
        elif user.op in ALIASES:
            part = _read(module, inner, user)
        elif user.op == "fusion" and user.called:
            nested = module.computations.get(user.called[0], {})
            at = user.operands.index(parameter.name)
            own = next((one for one in nested.values() if one.number == at), None)
            part = None if own is None else _read(module, nested, own)
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _written(module: Module, inner: Computation, result: HloShape) -> int:
    """Bytes that a fusion writes: of a buffer that it updates in place, the update alone."""
    root = next((one for one in inner.values() if one.root), None)
    if root is None:
        return _here([result])
    outputs = [inner.get(name) for name in root.operands] if root.op == "tuple" else [root]
    if len(outputs) != len(result.leaves):
        return _here([result])
    total = 0
    for output, leaf in zip(outputs, result.leaves):
        if leaf.space == HBM:
            update = _update(module, inner, output)
            total += leaf.bytes if update is None else min(update.bytes, leaf.bytes)
    return total


def _update(module: Module, inner: Computation, output: Instruction | None) -> HloShape | None:
    """Returns the update if an output is a dynamic-update-slice, also an asynchronous one."""
    while output is not None and output.op in ALIASES and output.operands:
        output = inner.get(output.operands[0])
    if output is None:
        return None
    op = output.op.removesuffix("-start")
    if op == "dynamic-update-slice":
        update = inner.get(output.operands[1])
        return None if update is None else update.shape
    if op == "fusion" and output.called and output.result.parts is None:
        nested = module.computations.get(output.called[0], {})
        return _update(module, nested, next((one for one in nested.values() if one.root), None))
    return None
