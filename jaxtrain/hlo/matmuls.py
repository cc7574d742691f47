"""FLOPs of the matrix multiplications of a compiled program.

2 m n k each, as `jaxtrain.models.flops` counts: `dot`, `ragged-dot`, `convolution` (as TPU writes matmuls), the gemms
of cuBLAS, and the attention kernels of cuDNN and Mosaic (splash), counted by their shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from jaxtrain.hlo.parse import Computation, HloShape, Instruction, element_bits

_FMHA = "__cudnn$fmha"
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Parts of custom call targets that multiply no matrices, or whose FLOPs are counted here.
_KNOWN_TARGETS = (
    "AllocateBuffer", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape",
    "annotate_device_placement", "MoveToHost", "MoveToDevice", "TopK", "X64Combine", "ConcatBitcast", "ZeroCrop",
    "cub", "cusolver", "fmha", "gemm", "matmul",
)  # fmt: skip


@dataclass(frozen=True)
class MatmulWork:
    """FLOPs of one run of an instruction.

    Args:
        dtype: HLO element type of the operands; `tf32` for float32 at default precision.
        flops: by the convention of `jaxtrain.models.flops`.
        recomputed: FLOPs that a kernel repeats instead of storing their results.
        is_attention: the instruction is a fused attention kernel.
    """

    dtype: str
    flops: float
    recomputed: float = 0.0
    is_attention: bool = False


def matmul_work(instruction: Instruction, computation: Computation, visible: float = 0.5) -> MatmulWork | None:
    """FLOPs of an instruction itself, without what it calls; None if it multiplies no matrices.

    Args:
        instruction: of the computation.
        computation: holds the operands.
        visible: share of all keys that a query attends to, for kernels whose call does not say (splash).
    """
    if instruction.op not in ("dot", "ragged-dot", "convolution", "custom-call"):
        return None
    operands = [computation[name].shape for name in instruction.operands if name in computation]
    if instruction.op == "custom-call":
        return _custom_call(instruction, operands, visible)
    count = {"dot": _dot, "ragged-dot": _ragged_dot, "convolution": _convolution}[instruction.op]
    return count(instruction, operands)


def is_unknown_kernel(instruction: Instruction) -> bool:
    """Returns whether this is a kernel that may multiply matrices and whose FLOPs are not known."""
    if instruction.op != "custom-call" or matmul_work(instruction, {}) is not None:
        return False
    return not any(name in instruction.custom_call_target for name in _KNOWN_TARGETS)


def _dtype(instruction: Instruction, operands: Iterable[HloShape]) -> str:
    """Wider dtype of the two operands."""
    dtypes = [shape.dtype for shape in operands if shape.parts is None and shape.dtype]
    widest = max(dtypes[:2], key=element_bits, default="bf16")
    is_exact = "highest" in instruction.attributes or "dot_f32_f32_f32" in instruction.attributes
    return "tf32" if widest == "f32" and not is_exact else widest


def _dot(instruction: Instruction, operands: list[HloShape]) -> MatmulWork:
    left = operands[0].dims if operands else ()
    contracted = prod(left[dim] for dim in instruction.int_list("lhs_contracting_dims"))
    return MatmulWork(_dtype(instruction, operands), 2.0 * instruction.shape.elements * contracted)


def _ragged_dot(instruction: Instruction, operands: list[HloShape]) -> MatmulWork:
    """Every row of the left operand is multiplied with the matrix of one group only."""
    if set(instruction.int_list("lhs_ragged_dims")) & set(instruction.int_list("lhs_contracting_dims")):
        return MatmulWork(_dtype(instruction, operands), 2.0 * operands[0].elements * operands[1].dims[-1])
    return _dot(instruction, operands)


def _convolution(instruction: Instruction, operands: list[HloShape]) -> MatmulWork | None:
    """Products with padding are not computed and do not count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    if not labels or len(operands) < 2:
        return None
    shapes = (*operands[:2], instruction.shape)
    left, right, out = (dict(zip(names, shape.dims)) for names, shape in zip(labels.groups(), shapes))
    window = _window(instruction.attributes)
    pairs = prod(
        _products(left[dim], right[dim], out[dim], {key: values[int(dim)] for key, values in window.items()})
        for dim in labels[3] if dim.isdigit()
    )  # fmt: skip
    return MatmulWork(_dtype(instruction, operands), 2.0 * out["b"] * out["f"] * right["i"] * pairs)


def _window(attributes: str) -> dict[str, list[str]]:
    """Parses `window={size=1x8 pad=0_0x7_7}` into {"size": ["1", "8"], "pad": ["0_0", "7_7"]}."""
    match = re.search(r"window=\{([^}]*)\}", attributes)
    fields = (part.split("=") for part in match[1].split()) if match else ()
    return {key: values.split("x") for key, values in fields}


def _products(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Number of (output, kernel element) pairs of one dim whose input element is not padding."""
    stride, lhs_dilation, rhs_dilation = (int(window.get(key, 1)) for key in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    if lhs_dilation == stride == 1:
        # Output o reads input o + k * rhs_dilation - low.
        starts = (k * rhs_dilation - low for k in range(kernel))
        return sum(max(0, min(out, size - start) - max(0, -start)) for start in starts)
    extent = (size - 1) * lhs_dilation + 1
    reads = (o * stride + k * rhs_dilation - low for o in range(out) for k in range(kernel))
    return sum(0 <= read < extent and read % lhs_dilation == 0 for read in reads)


def _custom_call(instruction: Instruction, operands: list[HloShape], visible: float) -> MatmulWork | None:
    target = instruction.custom_call_target
    if target.startswith(_FMHA):
        return _cudnn_attention(instruction)
    if kernel := _SPLASH.search(f"{instruction.name} {instruction.scope}"):
        return _splash_attention(kernel[1], operands, visible)
    if "gemm" in target or "matmul" in target:
        return _gemm(instruction, operands)
    return None


def _gemm(instruction: Instruction, operands: list[HloShape]) -> MatmulWork | None:
    """cuBLAS: its config names the contracting dims."""
    dims = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    if not dims or not operands:
        return None
    contracted = prod(operands[0].dims[int(dim)] for dim in re.findall(r"\d+", dims[1]))
    return MatmulWork(_dtype(instruction, operands), 2.0 * instruction.shape.leaves[0].elements * contracted)


def _cudnn_attention(instruction: Instruction) -> MatmulWork | None:
    """cuDNN: from the shape of the scores [batch, heads, queries, keys] and head_dim; half the scores if causal.

    Backward has twice the matmuls of forward, and computes the scores again.
    """
    dims = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.attributes)
    if not dims:
        return None
    *rows, keys = (int(size) for size in re.findall(r"\d+", dims[1]))
    out = instruction.shape.leaves[0]
    flops = 2.0 * prod(rows) * _mean_attended_keys(keys, instruction.attributes) * out.dims[-1]
    is_backward = "Backward" in instruction.custom_call_target
    return MatmulWork(out.dtype, flops * (4 if is_backward else 2), flops * is_backward, is_attention=True)


def _mean_attended_keys(keys: int, attributes: str) -> float:
    """Mean number of keys that a query attends to."""
    mask = re.search(r'"mask_type":\s*"(\w+)"', attributes)
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', attributes)
    if not mask or "CAUSAL" not in mask[1]:
        return keys
    width = min(int(window[1]) if window and int(window[1]) else keys, keys)
    return (width * (width + 1) / 2 + (keys - width) * width) / keys


def _splash_attention(kernel: str, operands: list[HloShape], visible: float) -> MatmulWork | None:
    """Splash: q is [batch, heads, queries, head_dim], k has as many dims; dq and dkv share the gradients' matmuls."""
    arrays = [shape for shape in operands if shape.dtype in ("bf16", "f16", "f32") and len(shape.dims) >= 3]
    if len(arrays) < 2:
        return None
    q, keys = arrays[0], arrays[1].dims[-2]
    flops = 2.0 * q.elements * keys * visible
    # Both backward kernels recompute the scores; dkv also the product with v that dq has.
    recomputed = {"fwd": 0, "dq": 1, "dkv": 2}[kernel]
    return MatmulWork(q.dtype, 2 * flops, recomputed * flops, is_attention=True)
