"""A mean over replicas of which values travel in 8, 4, 2 bits or 1, with what was lost kept for the next time.

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
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.sharding.quantized_blocks import FP8, SCALE_BYTES, Bits, pack, unpack
from jaxtrain.sync.compression.wire import (
    SAME,
    flat_mean,
    flat_mean_bytes,
    inner_axes,
    inner_devices,
    on_each_device,
    on_each_replica,
    pad_to_devices,
    padded,
    replica_axis,
    replica_count,
    stacked,
)
from jaxtrain.sync.replica_dim import divided

Tree = Any
BLOCK = 128  # most values of the last dim with one scale; so no block has values of two layers
ONE_BIT_BLOCK = 128, 1024  # least and most values of the last dim of tensors in 1 bit: a row is a block
SMALLEST = 1024  # values of a tensor that is worth it; smaller ones travel in float32
BITS: dict[str, Bits] = {"none": 0, "int8": 8, "int4": 4, "int2": 2, "fp8": FP8}  # of a value; 0: float32


class Residuals(NamedTuple):
    """Error feedback of all tensors, each a tree like the parameters.

    Attributes:
        worker: what each replica has not sent yet, float32 [replicas, ...].
        server: what each replica has not handed on of the part that it sums, float32 [replicas, blocks, values].
    """

    worker: Tree
    server: Tree


def initial_residuals(params: Tree, replicas: int, bits: Bits) -> Residuals:
    """Returns residuals of zeros."""
    worker = jax.tree.map(lambda p: jnp.zeros((replicas, *p.shape), jnp.float32), params)
    return Residuals(worker, jax.tree.map(lambda p: jnp.zeros(server_shape(p, replicas, bits), jnp.float32), params))


def server_shape(p: Any, replicas: int, bits: Bits) -> tuple[int, int, int]:
    """Returns the shape of a server's residual of a tensor: [replicas, blocks, values]."""
    blocks, values = _parts(p.shape, replicas, bits) if is_quantized(p, bits) else (1, 1)
    return replicas, blocks, values


def server_specs(params: Tree, replicas: int, bits: Bits, mesh: Mesh) -> Tree:
    """Returns PartitionSpecs of the residuals of the servers: every device has those of the blocks that it sends."""
    axis = replica_axis(mesh)
    return jax.tree.map(lambda p: divided(server_shape(p, replicas, bits), mesh, axis), params)


def is_quantized(p: Any, bits: Bits) -> bool:
    """Returns whether a tensor is large enough to be quantised; in 1 bit, whether its rows can be blocks, too."""
    is_large = prod(p.shape) >= SMALLEST
    return is_large and (bits != 1 or (ONE_BIT_BLOCK[0] <= p.shape[-1] <= ONE_BIT_BLOCK[1] and p.shape[-1] % 8 == 0))


def quantized_mean(x: Tree, residuals: Residuals | None, bits: Bits, mesh: Mesh) -> tuple[Tree, Residuals | None]:
    """Returns the mean over the replicas as all of them receive it, without a replica dim, and the new residuals.

    The sums over time of the means, of the mean over replicas of the worker's residuals and of the server's residuals
    are those of the true means.

    Args:
        x: values of all replicas, float32 [replicas, ...].
        residuals: of the time before; None: what is lost is lost.
        bits: 8, 4, 2, 1 or "fp8".
        mesh: with the axis `replica`, or `data` if that is 1.
    """
    replicas = replica_count(mesh)
    zeros = initial_residuals(jax.tree.map(lambda v: v[0], x), replicas, bits) if residuals is None else residuals
    leaves, structure = jax.tree.flatten(x)
    worker, server = jax.tree.leaves(zeros.worker), jax.tree.leaves(zeros.server)
    means: list[Any] = [None] * len(leaves)
    exact = [i for i, v in enumerate(leaves) if not is_quantized(v[0], bits)]
    for i, mean in zip(exact, flat_mean([leaves[i] for i in exact], mesh), strict=True):
        means[i] = mean
    rounded = [i for i in range(len(leaves)) if i not in exact]
    if rounded:
        xs, workers, servers = ([values[i] for i in rounded] for values in (leaves, worker, server))
        for i, *found in zip(rounded, *_means_of_parts(xs, workers, servers, bits, mesh), strict=True):
            means[i], worker[i], server[i] = found
    mean, *kept = (jax.tree.unflatten(structure, values) for values in (means, worker, server))
    return mean, None if residuals is None else Residuals(*kept)


def _means_of_parts(
    xs: list[jax.Array], workers: list[jax.Array], servers: list[jax.Array], bits: Bits, mesh: Mesh
) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
    """Returns the means of tensors, and the residuals.

    All tensors travel together, in one all-to-all and one all-gather. Every device of a replica sends a part of the
    blocks.
    """
    axis, replicas, inner = replica_axis(mesh), replica_count(mesh), inner_devices(mesh)
    shapes, pers = [x.shape[1:] for x in xs], [server.shape[1] for server in servers]
    whole, parts = stacked(mesh, None, inner_axes(mesh)), stacked(mesh, inner_axes(mesh))

    def encoded(x: jax.Array, worker: jax.Array, server: jax.Array) -> Any:
        total = x[0] + worker[0]
        message = pack(to_blocks(total, replicas, bits), bits)
        left = total - from_blocks(unpack(message, bits), x.shape[1:], bits)
        return pad_to_devices(message, 1, inner)[None], left[None], pad_to_devices(server, 1, inner)

    def swap(messages: list[jax.Array], servers: list[jax.Array]) -> Any:
        exchange = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
        arrived = _together(exchange, [message[0] for message in messages])
        sums = [unpack(each, bits).sum(0) / replicas + server[0] for each, server in zip(arrived, servers)]
        messages = [pack(part, bits) for part in sums]
        left = [(part - unpack(message, bits))[None] for part, message in zip(sums, messages)]
        gather = partial(jax.lax.all_gather, axis_name=axis, tiled=True)
        return _together(gather, [message[None] for message in messages]), left

    def decoded(messages: list[jax.Array]) -> list[jax.Array]:
        return [
            from_blocks(unpack(message[:, :per], bits), shape, bits)
            for message, per, shape in zip(messages, pers, shapes)
        ]

    on_all = lambda *trees: [list(column) for column in zip(*map(encoded, *trees))]  # noqa: E731
    messages, workers, servers = on_each_replica(mesh, on_all)(xs, workers, servers)
    send = on_each_device(mesh, swap, (whole, parts), (PartitionSpec(None, inner_axes(mesh)), parts))
    messages, servers = send(messages, servers)
    means = on_each_replica(mesh, decoded, SAME, SAME)(messages)
    cut = lambda servers: [server[:, :per] for server, per in zip(servers, pers)]  # noqa: E731
    return means, workers, on_each_replica(mesh, cut)(servers)


def _together(exchange: Any, messages: list[jax.Array]) -> list[jax.Array]:
    """Returns what one collective makes of the rows of several arrays, each [rows, blocks, bytes]."""
    flat = exchange(jnp.concatenate([message.reshape(len(message), -1) for message in messages], 1))
    ends = np.cumsum([prod(message.shape[1:]) for message in messages])[:-1]
    return [x.reshape(-1, *like.shape[1:]) for x, like in zip(jnp.split(flat, ends, 1), messages, strict=True)]


def to_blocks(x: jax.Array, replicas: int, bits: Bits) -> jax.Array:
    """Returns [...] as [replicas, blocks, values], filled with zeros. Blocks lie along the last dim."""
    per, block = _parts(x.shape, replicas, bits)
    width = row_blocks(x.shape[-1], bits)[0] * block
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])]).reshape(-1, block)
    return jnp.pad(x, [(0, replicas * per - len(x)), (0, 0)]).reshape(replicas, per, block)


def from_blocks(blocks: jax.Array, shape: tuple[int, ...], bits: Bits) -> jax.Array:
    """Reverses `to_blocks`."""
    count, block = row_blocks(shape[-1], bits)
    width = count * block
    rows = blocks.reshape(-1, block)[: prod(shape[:-1]) * width // block]
    return rows.reshape(*shape[:-1], width)[..., : shape[-1]]


def sent_bytes(params: Tree, bits: Bits, replicas: int, inner: int = 1) -> int:
    """Returns the bytes that each replica sends for a mean: codes, scales, and what is not quantised.

    Args:
        params: shapes of the parameters.
        bits: of a value.
        replicas: number of replicas.
        inner: devices of a replica, which divide the blocks: some are filled up.
    """
    leaves, width = jax.tree.leaves(params), bits if isinstance(bits, int) else 8
    exact = [prod(p.shape) for p in leaves if not is_quantized(p, bits)]
    total = flat_mean_bytes(exact, replicas, inner)
    for per, block in (_parts(p.shape, replicas, bits) for p in leaves if is_quantized(p, bits)):
        total += 2 * (replicas - 1) * padded(per, inner) * (block * width / 8 + SCALE_BYTES)
    return round(total)


def is_sent_in_blocks(shape: tuple[int, ...], dtype: Any, shard: tuple[int, ...], bits: Bits) -> bool:
    """Returns whether islands and their servers send a parameter in few bits: a large one, if that makes it smaller.

    Args:
        shape: of the whole.
        dtype: of the parameter.
        shard: shape of what is encoded at once.
        bits: of a value; 0: nothing is.
    """
    if not bits or len(shape) < 2 or prod(shape) < SMALLEST or not jnp.issubdtype(dtype, jnp.inexact):
        return False
    return message_bytes(shard, bits) < prod(shard) * np.dtype(dtype).itemsize


def message_bytes(shape: tuple[int, ...], bits: Bits) -> int:
    """Returns the bytes of blocks along the last dim of an array: codes, and the scale of each block."""
    count, block = row_blocks(shape[-1], bits)
    width = bits if isinstance(bits, int) else 8
    return prod(shape[:-1]) * count * (block * width // 8 + SCALE_BYTES)


def _parts(shape: tuple[int, ...], replicas: int, bits: Bits) -> tuple[int, int]:
    """Returns the blocks that each replica sums, and the values of a block."""
    count, block = row_blocks(shape[-1], bits)
    return ceil(prod(shape[:-1]) * count / replicas), block


def row_blocks(size: int, bits: Bits) -> tuple[int, int]:
    """Returns the blocks of a row, equal ones, and their values: at most `BLOCK`, a multiple of 4, to fill bytes.

    In 1 bit a row is a block: zeros that fill it up would count in its scale, as would what is lost there.
    """
    if bits == 1:
        return 1, size
    count = ceil(size / BLOCK)
    return count, ceil(size / count / 4) * 4
