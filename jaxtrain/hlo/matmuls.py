"""FLOPs of the instructions of a compiled program that multiply matrices.

2 m n k each, as `jaxtrain.models.flops` counts: `dot`, `ragged-dot`, `convolution` (TPU writes matmuls so), the gemms
of cuBLAS, and the attention kernels of cuDNN and of Mosaic (splash), whose shapes tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from jaxtrain.hlo.parse import Computation, HloShape, Instruction, bits

_FMHA = "__cudnn$fmha"
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
SILENT = (
    "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    "annotate_device_placement", "MoveToHost", "MoveToDevice", "TopK", "X64Combine", "ConcatBitcast", "ZeroCrop",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """FLOPs of one run of an instruction.

    Args:
        dtype: HLO element type that is multiplied; `tf32` for float32 at default precision.
        flops: by the convention of `jaxtrain.models.flops`.
        inside: what a kernel computes besides, again, so that it need not store it.
        attention: a fused attention kernel.
    """

    dtype: str
    flops: float
    inside: float = 0.0
    attention: bool = False


def work(instruction: Instruction, computation: Computation, visible: float = 0.5) -> Work | None:
    """FLOPs of an instruction itself, not of what it calls; None where it multiplies no matrices.

    Args:
        visible: share of all keys that a query sees, for kernels whose call does not tell (splash).
    """
    count = _COUNTS.get(instruction.op)
    if count is None:
        return None
    operands = [computation[name].shape for name in instruction.operands if name in computation]
    return count(instruction, operands, visible)


def is_unknown(instruction: Instruction) -> bool:
    """A kernel that may multiply matrices and whose FLOPs nothing tells."""
    if instruction.op != "custom-call" or work(instruction, {}) is not None:
        return False
    return not any(name in instruction.target for name in (*SILENT, "cub", "cusolver", "fmha", "gemm", "matmul"))


def _dtype(instruction: Instruction, operands: Iterable[HloShape]) -> str:
    """The widest of what is multiplied."""
    known = [shape.dtype for shape in operands if shape.parts is None and shape.dtype]
    widest = max(known[:2], key=bits, default="bf16")
    exact = "highest" in instruction.attributes or "dot_f32_f32_f32" in instruction.attributes
    return "tf32" if widest == "f32" and not exact else widest


def _dot(instruction: Instruction, operands: list[HloShape], visible: float) -> Work:
    left = operands[0].dims if operands else ()
    contracted = prod(left[dim] for dim in instruction.sizes("lhs_contracting_dims"))
    return Work(_dtype(instruction, operands), 2.0 * instruction.shape.elements * contracted)


def _ragged(instruction: Instruction, operands: list[HloShape], visible: float) -> Work:
    """Every row of the left operand meets the matrix of one group only."""
    left, right = operands[0].dims, operands[1].dims
    contracted = prod(left[dim] for dim in instruction.sizes("lhs_contracting_dims"))
    if instruction.sizes("lhs_ragged_dims") and set(instruction.sizes("lhs_ragged_dims")) & set(
        instruction.sizes("lhs_contracting_dims")
    ):
        return Work(_dtype(instruction, operands), 2.0 * prod(left) * right[-1])
    return Work(_dtype(instruction, operands), 2.0 * instruction.shape.elements * contracted)


def _convolution(instruction: Instruction, operands: list[HloShape], visible: float) -> Work | None:
    """Products with padding are not computed and do not count."""
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not found or len(operands) < 2:
        return None
    shapes = (*operands[:2], instruction.shape)
    left, right, out = (dict(zip(labels, shape.dims)) for labels, shape in zip(found.groups(), shapes))
    window = _window(instruction.attributes)
    spatial = [label for label in found[3] if label.isdigit()]
    pairs = prod(
        _pairs(left[label], right[label], out[label], {key: values[int(label)] for key, values in window.items()})
        for label in spatial
    )
    return Work(_dtype(instruction, operands), 2.0 * out["b"] * out["f"] * right["i"] * pairs)


def _window(attributes: str) -> dict[str, list[str]]:
    """`window={size=1x8 pad=0_0x7_7}` as {"size": ["1", "8"], "pad": ["0_0", "7_7"]}."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    fields = (part.split("=") for part in found[1].split()) if found else ()
    return {key: values.split("x") for key, values in fields}


def _pairs(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """(output, kernel element) pairs of one dim that meet an element of the input."""
    stride, base, apart = (int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    if base == stride == 1:
        # Output o meets input o + k * apart - low.
        starts = (k * apart - low for k in range(kernel))
        return sum(max(0, min(out, size - start) - max(0, -start)) for start in starts)
    reach = (size - 1) * base + 1
    places = (o * stride + k * apart - low for o in range(out) for k in range(kernel))
    return sum(0 <= place < reach and place % base == 0 for place in places)


def _custom(instruction: Instruction, operands: list[HloShape], visible: float) -> Work | None:
    name = instruction.target
    if name.startswith(_FMHA):
        return _cudnn(instruction, operands)
    if found := _SPLASH.search(f"{instruction.name} {instruction.scope}"):
        return _splash(found[1], operands, visible)
    if "gemm" in name or "matmul" in name:
        return _gemm(instruction, operands)
    return None


def _gemm(instruction: Instruction, operands: list[HloShape]) -> Work | None:
    """cuBLAS: the dims that it contracts are in its config."""
    found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    if not found or not operands:
        return None
    contracted = prod(operands[0].dims[int(dim)] for dim in re.findall(r"\d+", found[1]))
    return Work(_dtype(instruction, operands), 2.0 * instruction.shape.leaves[0].elements * contracted)


def _cudnn(instruction: Instruction, operands: list[HloShape]) -> Work | None:
    """Scores [batch, heads, queries, keys] and the size of a head; half of the scores where the mask is causal.

    Backward has twice the products of forward, and computes the scores again.
    """
    found = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    if not found:
        return None
    *rows, keys = (int(size) for size in re.findall(r"\d+", found[1]))
    out = instruction.shape.leaves[0]
    product = 2.0 * prod(rows) * _seen(keys, instruction.attributes) * out.dims[-1]
    is_backward = "Backward" in instruction.target
    return Work(out.dtype, product * (4 if is_backward else 2), product * is_backward, attention=True)


def _seen(keys: int, attributes: str) -> float:
    """Keys that a query sees on average."""
    mask = re.search(r'"mask_type":\s*"(\w+)"', attributes)
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', attributes)
    if not mask or "CAUSAL" not in mask[1]:
        return keys
    near = min(int(window[1]) if window and int(window[1]) else keys, keys)
    return (near * (near + 1) / 2 + (keys - near) * near) / keys


def _splash(part: str, operands: list[HloShape], visible: float) -> Work | None:
    """q [batch, heads, queries, head_dim], then k of as many dims; dq computes 1 of the 2 gradients, dkv the other."""
    arrays = [shape for shape in operands if shape.dtype in ("bf16", "f16", "f32") and len(shape.dims) >= 3]
    if len(arrays) < 2:
        return None
    q, keys = arrays[0], arrays[1].dims[-2]
    product = 2.0 * q.elements * keys * visible
    # Both backward kernels compute the scores again; one of them also v's product, which the other has.
    again = {"fwd": 0, "dq": 1, "dkv": 2}[part]
    return Work(q.dtype, 2 * product, again * product, attention=True)


_COUNTS = {"dot": _dot, "ragged-dot": _ragged, "convolution": _convolution, "custom-call": _custom}
