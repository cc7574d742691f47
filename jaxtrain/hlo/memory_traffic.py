"""Bytes that an instruction of a compiled program reads and writes in device memory, or moves to and from the host.

Values inside a fusion stay on the chip: it reads its operands and writes its results. Of an operand it reads only the
part that it slices, and of a buffer it writes only the part that it updates.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxtrain.hlo.parse import Computation, HloShape, Instruction, Module, root

# Instructions that move no bytes: names for other buffers, and calls, whose bytes are counted inside.
ZERO_COST_OPS = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all",
    "partition-id", "replica-id", "opt-barrier", "add-dependency", "async-start", "async-update", "async-done",
    "copy-done", "slice-done", "dynamic-slice-done", "recv", "domain",
))  # fmt: skip
ALIAS_OPS = ("bitcast", "reshape", "copy", "convert")  # free inside a fusion
SLICE_OPS = ("dynamic-slice", "slice", "gather")
HBM, HOST = 0, 5  # memory spaces
TO_HOST, FROM_HOST = "to host", "from host"


def hbm_bytes(module: Module, instruction: Instruction, computation: Computation) -> int:
    """Bytes of device memory that one run of an instruction outside of fusions reads and writes."""
    op = instruction.op.removesuffix("-start")
    if instruction.op in ZERO_COST_OPS or op.endswith("-done"):
        return 0
    if op == "custom-call" and not instruction.operands:  # allocates a buffer
        return 0
    if op == "fusion":
        return _fusion_bytes(module, instruction, computation)
    if instruction.op == "copy-start":
        return _size_in_hbm((instruction.shape.parts or ())[:2])  # destination, source
    operands = _operand_shapes(instruction, computation)
    if op in SLICE_OPS:
        return sum(instruction.result.bytes for one in (instruction.result, *operands[:1]) if one.memory_space == HBM)
    if op == "dynamic-update-slice":
        return sum(operands[1].bytes for one in (operands[1], instruction.result) if one.memory_space == HBM)
    if op == "scatter":
        return 3 * _size_in_hbm(operands[-1:])
    return _size_in_hbm((*operands, instruction.shape))


def _operand_shapes(instruction: Instruction, computation: Computation) -> list[HloShape]:
    return [computation[name].shape for name in instruction.operands if name in computation]


def _size_in_hbm(shapes: Iterable[HloShape]) -> int:
    return sum(leaf.bytes for shape in shapes for leaf in shape.leaves if leaf.memory_space == HBM)


def host_transfer(module: Module, instruction: Instruction, computation: Computation) -> tuple[str, int]:
    """(TO_HOST or FROM_HOST, bytes) of one run of an instruction that moves data between device and host.

    ("", 0) for others. Activations that are offloaded until the backward pass are slices of host arrays, one for each
    layer: `dynamic-update-slice` writes them, `dynamic-slice` reads them, inside a fusion on GPUs.
    """
    if instruction.op in ZERO_COST_OPS or instruction.op.endswith("-done") or not instruction.operands:
        return "", 0
    if instruction.op == "copy-start" and instruction.shape.parts:
        destination, source, *_ = instruction.shape.parts
        written, read = [destination], [source]
    else:
        written, read = [instruction.result], _operand_shapes(instruction, computation)
    writes_host, reads_host = (
        any(leaf.memory_space == HOST for shape in shapes for leaf in shape.leaves) for shapes in (written, read)
    )
    is_update = instruction.op.removesuffix("-start") in ("fusion", "dynamic-update-slice")
    if is_update and writes_host and (update := _update_shape(module, computation, instruction)) is not None:
        return (TO_HOST, update.bytes) if update.memory_space != HOST else ("", 0)
    if writes_host == reads_host:
        return "", 0
    return TO_HOST if writes_host else FROM_HOST, sum(shape.bytes for shape in written)


def _fusion_bytes(module: Module, fusion: Instruction, computation: Computation) -> int:
    inner = module.computations.get(next(iter(fusion.called), ""), {})
    parameters = {one.parameter_number: one for one in inner.values() if one.op == "parameter"}
    read = 0
    for number, name in enumerate(fusion.operands):
        shape = computation[name].shape if name in computation else None
        if shape is None or not _size_in_hbm([shape]):
            continue
        part = _bytes_read(module, inner, parameters[number]) if number in parameters else None
        read += shape.bytes if part is None else min(part, shape.bytes)
    return read + _bytes_written(module, inner, fusion.result)


def _bytes_read(module: Module, inner: Computation, parameter: Instruction) -> int | None:
    """Bytes that a fusion reads of one of its operands; None for all of it."""
    total = 0
    for user in inner.values():
        if parameter.name not in user.operands:
            continue
        part: int | None = None
        is_first = user.operands[0] == parameter.name
        if user.op in SLICE_OPS and is_first:
            part = user.shape.bytes
        elif user.op == "dynamic-update-slice" and is_first:
            part = 0  # updated in place
        elif user.op in ALIAS_OPS:
            part = _bytes_read(module, inner, user)
        elif user.op == "fusion" and user.called:
            nested = module.computations.get(user.called[0], {})
            number = user.operands.index(parameter.name)
            inner_parameter = next((one for one in nested.values() if one.parameter_number == number), None)
            part = None if inner_parameter is None else _bytes_read(module, nested, inner_parameter)
        if part is None:
            return None
        total += part
    return total


def _bytes_written(module: Module, inner: Computation, result: HloShape) -> int:
    """Bytes that a fusion writes: of a buffer that it updates in place, only the update."""
    output = root(inner)
    if output is None:
        return _size_in_hbm([result])
    outputs = [inner.get(name) for name in output.operands] if output.op == "tuple" else [output]
    if len(outputs) != len(result.leaves):
        return _size_in_hbm([result])
    total = 0
    for output, leaf in zip(outputs, result.leaves):
        if leaf.memory_space == HBM:
            update = _update_shape(module, inner, output)
            total += leaf.bytes if update is None else min(update.bytes, leaf.bytes)
    return total


def _update_shape(module: Module, inner: Computation, output: Instruction | None) -> HloShape | None:
    """Shape of the update if an output is a dynamic-update-slice, also an asynchronous one; else None."""
    while output is not None and output.op in ALIAS_OPS and output.operands:
        output = inner.get(output.operands[0])
    if output is None:
        return None
    op = output.op.removesuffix("-start")
    if op == "dynamic-update-slice":
        update = inner.get(output.operands[1])
        return None if update is None else update.shape
    if op == "fusion" and output.called and output.result.parts is None:
        nested = module.computations.get(output.called[0], {})
        return _update_shape(module, nested, root(nested))
    return None
