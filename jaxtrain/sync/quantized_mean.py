"""A mean over replicas of which values travel in 8, 4 or 2 bits, with what was lost kept for the next time.

As the gradients of ZeRO++ (Wang et al. 2023, arXiv 2306.10209): an all-to-all of quantised parts, a sum in float32, and
an all-gather of the quantised sum. Both roundings have a residual that is added before the next one (error feedback,
Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847): a worker's of what it sends, and a server's of its part.
"""

from __future__ import annotations

from functools import partial
from math import ceil, prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.sharding.rules import REPLICA_AXIS

Tree = Any
BLOCK = 128  # most values of the last dim with one scale; so no block has values of two layers
SMALLEST = 1024  # values of a tensor that is worth it; smaller ones travel in float32
BITS = {"none": 0, "int8": 8, "int4": 4, "int2": 2}  # of a value; 0: float32
HIGHEST = {8: 127.0, 4: 7.0, 2: 1.5}  # code of the largest value of a block; codes are 1 apart


class Residuals(NamedTuple):
    """Error feedback of all tensors, each a tree like the parameters.

    Attributes:
        worker: what each replica has not sent yet, float32 [replicas, ...].
        server: what each replica has not handed on of the part that it sums, float32 [replicas, blocks, values].
    """

    worker: Tree
    server: Tree


def encode(x: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Quantises blocks by their largest value: the error is at most half the gap between two codes, `scale / 2`.

    Args:
        x: blocks, float32 [..., values]; 8 / `bits` divides their number.
        bits: 8, 4 or 2. 8 and 4 have a code for 0; the four codes of 2 are -1.5, -0.5, 0.5 and 1.5.

    Returns:
        codes, uint8 [..., values * bits / 8], and scales, float32 [...].
    """
    scale = jnp.max(jnp.abs(x), -1) / HIGHEST[bits]
    offset, top = HIGHEST[bits], 2 * HIGHEST[bits]
    safe = jnp.where(scale > 0, scale, 1.0)[..., None]
    codes = jnp.clip(jnp.round(x / safe + offset), 0, top).astype(jnp.uint8)
    per_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = sum((parts[..., i] << (i * bits) for i in range(per_byte)), jnp.zeros((), jnp.uint8))
    return packed.astype(jnp.uint8), scale


def decode(codes: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns the values of codes, float32 [..., values]."""
    per_byte = 8 // bits
    parts = jnp.stack([(codes >> (i * bits)) & (2**bits - 1) for i in range(per_byte)], -1)
    values = parts.reshape(*codes.shape[:-1], -1).astype(jnp.float32) - HIGHEST[bits]
    return values * scale[..., None]


def initial_residuals(params: Tree, replicas: int) -> Residuals:
    """Returns residuals of zeros."""

    def server(p: Any) -> jax.Array:
        per, block = _parts(p.shape, replicas) if is_quantized(p) else (1, 1)
        return jnp.zeros((replicas, per, block), jnp.float32)

    worker = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params)
    return Residuals(worker, jax.tree.map(server, params))


def is_quantized(p: Any) -> bool:
    """Returns whether a tensor is large enough to be quantised."""
    return prod(p.shape) >= SMALLEST


def quantized_mean(x: Tree, residuals: Residuals | None, bits: int, mesh: Mesh) -> tuple[Tree, Residuals | None]:
    """Returns the mean over the replicas as all of them receive it, without a replica dim, and the new residuals.

    The sums over time of the means, of the mean over replicas of the worker's residuals and of the server's residuals
    are those of the true means.

    Args:
        x: values of all replicas, float32 [replicas, ...].
        residuals: of the time before; None: what is lost is lost.
        bits: 8, 4 or 2.
        mesh: with the axis `replica`.
    """
    replicas, stacked = mesh.shape[REPLICA_AXIS], PartitionSpec(REPLICA_AXIS)
    zeros = initial_residuals(jax.tree.map(lambda v: v[0], x), replicas) if residuals is None else residuals

    def one(x: jax.Array, worker: jax.Array, server: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        if not is_quantized(x[0]):
            return jax.lax.psum(x[0], REPLICA_AXIS) / replicas, worker, server
        mean, worker, server = _mean_of_parts(x[0] + worker[0], server[0], bits, replicas)
        return mean, worker[None], server[None]

    mapped = partial(
        jax.shard_map, mesh=mesh, in_specs=stacked, out_specs=(PartitionSpec(), stacked, stacked),
        axis_names=frozenset({REPLICA_AXIS}), check_vma=False,
    )(one)  # fmt: skip
    found = jax.tree.map(mapped, x, zeros.worker, zeros.server)
    mean, worker, server = jax.tree.transpose(jax.tree.structure(x), jax.tree.structure((0, 0, 0)), found)
    return mean, None if residuals is None else Residuals(worker, server)


def _mean_of_parts(x: jax.Array, server: jax.Array, bits: int, replicas: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the mean, and the residuals, for code that is manual over `replica`."""
    codes, scale = encode(to_blocks(x, replicas), bits)
    left = x - from_blocks(decode(codes, scale, bits), x.shape)
    swap = partial(jax.lax.all_to_all, axis_name=REPLICA_AXIS, split_axis=0, concat_axis=0)
    part = decode(swap(codes), swap(scale), bits).sum(0) / replicas + server
    codes, scale = encode(part, bits)
    gather = partial(jax.lax.all_gather, axis_name=REPLICA_AXIS)
    mean = from_blocks(decode(gather(codes), gather(scale), bits), x.shape)
    return mean, left, part - decode(codes, scale, bits)


def to_blocks(x: jax.Array, replicas: int) -> jax.Array:
    """Returns [...] as [replicas, blocks, values], filled with zeros. Blocks lie along the last dim."""
    per, block = _parts(x.shape, replicas)
    width = _row(x.shape[-1])[0] * block
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]).reshape(-1, block)
    return jnp.pad(x, [(0, replicas * per - len(x)), (0, 0)]).reshape(replicas, per, block)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Reverses `to_blocks`."""
    count, block = _row(shape[-1])
    width = count * block
    rows = blocks.reshape(-1, block)[: prod(shape[:-1]) * width // block]
    return rows.reshape(*shape[:-1], width)[..., : shape[-1]]


def sent_bytes(params: Tree, bits: int, replicas: int) -> int:
    """Returns the bytes that each replica sends for a mean: codes, scales, and what is not quantised."""

    def one(p: Any) -> float:
        if not is_quantized(p):
            return 2 * 4 * prod(p.shape) * (replicas - 1) / replicas
        per, block = _parts(p.shape, replicas)
        return 2 * (replicas - 1) * per * (block * bits / 8 + 4)

    return round(sum(map(one, jax.tree.leaves(params))))


def _parts(shape: tuple[int, ...], replicas: int) -> tuple[int, int]:
    """Returns the blocks that each replica sums, and the values of a block."""
    count, block = _row(shape[-1])
    return ceil(prod(shape[:-1]) * count / replicas), block


def _row(size: int) -> tuple[int, int]:
    """Returns the blocks of a row, equal ones, and their values: at most `BLOCK`, a multiple of 4, to fill bytes."""
    count = ceil(size / BLOCK)
    return count, ceil(size / count / 4) * 4
