"""Rates of simulated devices on this host, measured in a few seconds while all of them are busy.

They share its cores, memory and caches, so a rate of one device is a rate of the host over their number. Seconds are
the processor time of this process over the cores, so that other programs do not count; on a quiet machine that keeps
all cores busy they are those of the clock. Each figure is the best of a few runs. An operation goes from array to
array, as in a step, where other operations and devices have used the caches since: collectives of what is still cached
are two to three times as fast. It works in place: new memory, which the system hands out, has a figure of its own.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.io.system import available_cores

RUNS = 8
WIDTH = 512  # of a matrix, with which ELEMENTS / WIDTH rows are multiplied
ELEMENTS = 2**18  # of a float32 array of 1 MiB: about what a layer of a small model makes, and gathers
ARRAYS = 64  # of all devices together: more than a cache holds
BLOCK = 2**26  # bytes of memory asked of the system
SETTLED = 0.001  # seconds until Linux has counted what threads ran that were running when the last result came


def measure(devices: Sequence[Any], dtype: Any) -> dict[str, float]:
    """Rates of one CPU device while all of them run.

    Args:
        dtype: of matrix multiplications.

    Returns:
        `flops` (FLOP/s of matrix multiplications), `memory` (bytes/s read and written by elementwise operations),
        `pages` (bytes/s of memory that the system hands out) and `launch` (seconds of an operation that does next to
        nothing); of several devices also `copy` and `reduce`
        (bytes/s of a collective that copies or adds, counted as twice its whole tensor) and `meeting` (seconds for
        each member of a group to find the others).
    """
    count = len(devices)
    each = max(2, ARRAYS // count)
    timed = partial(_seconds, Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,)))
    launch = timed(_small, 8, 256)
    multiply = partial(_multiply, jnp.ones((WIDTH, WIDTH), dtype))
    out = {
        "flops": 2 * ELEMENTS * WIDTH / (timed(multiply, ELEMENTS, each) - launch),
        "memory": 2 * 4 * ELEMENTS / (timed(_elementwise, ELEMENTS, each) - launch),
        "pages": BLOCK / min(_handed_out(BLOCK) for _ in range(RUNS)) * available_cores() / count,
        "launch": launch,
    }
    if count > 1:
        meeting = timed(_reduce, 8, 64)
        out |= {
            "meeting": meeting / count,
            "reduce": 2 * 4 * ELEMENTS / (timed(_reduce, ELEMENTS, each) - meeting),
            "copy": 2 * 4 * ELEMENTS / (timed(_copy, ELEMENTS // count * count, each) - meeting),
        }
    return out


def _seconds(mesh: Mesh, operation: Callable[[jax.Array], jax.Array], size: int, times: int) -> float:
    """Seconds of one of `times` runs of an operation, each on an array of so many elements on every device."""

    def body(arrays: jax.Array) -> jax.Array:
        def once(arrays: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
            return arrays.at[index].set(operation(arrays[index])), None

        return jax.lax.scan(once, arrays, jnp.arange(times))[0]

    spec = P(None, "all")
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False), donate_argnums=0)
    arrays = jax.device_put(jnp.ones((times, size * mesh.size), jnp.float32), NamedSharding(mesh, spec))
    arrays = run(arrays).block_until_ready()
    best = float("inf")
    for _ in range(RUNS):
        start = time.process_time()
        arrays = run(arrays).block_until_ready()
        time.sleep(SETTLED)
        best = min(best, time.process_time() - start)
    return best / available_cores() / times


def _handed_out(size: int) -> float:
    """Seconds of one core until so many bytes of new memory have pages."""
    start = time.process_time()
    with mmap.mmap(-1, size) as block:
        np.frombuffer(block, np.uint8)[:: mmap.PAGESIZE] = 1
        return time.process_time() - start


def _multiply(matrix: jax.Array, x: jax.Array) -> jax.Array:
    return (x.reshape(-1, WIDTH).astype(matrix.dtype) @ matrix).reshape(-1).astype(x.dtype)


def _small(x: jax.Array) -> jax.Array:
    return x + 1


def _elementwise(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x) + 1


def _reduce(x: jax.Array) -> jax.Array:
    return jax.lax.psum(x, "all") * 0.1


def _copy(x: jax.Array) -> jax.Array:
    return jax.lax.all_to_all(x, "all", 0, 0, tiled=True)
