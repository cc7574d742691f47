"""Rates of simulated devices on this host, measured in a few seconds while all of them are busy.

The devices share the host's cores, memory and caches, so the rate of a device is that of the host over their number.
Seconds are the processor time of this process over the number of cores, which excludes other programs; on an idle
machine that keeps all cores busy they equal wall time. Each rate is the best of a few runs. An operation moves from
array to array, as in a step, so that its operands are not cached: collectives of cached arrays are two to three times
as fast. It works in place: allocation of memory by the system is measured separately.
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
WIDTH = 512  # of a matrix, which ELEMENTS / WIDTH rows are multiplied with
ELEMENTS = 2**18  # of a float32 array of 1 MiB: about the size of a small model's layer
ARRAYS = 64  # of all devices together: more than a cache holds
BLOCK = 2**26  # bytes of memory allocated from the system
CLOCK_DELAY = 0.001  # seconds until Linux accounts the processor time of threads that still ran


def measure_rates(devices: Sequence[Any], dtype: Any) -> dict[str, float]:
    """Measures the rates of one CPU device while all devices run.

    Args:
        devices: CPU devices of this process.
        dtype: of matrix multiplications.

    Returns:
        `flops` (FLOP/s of matrix multiplications), `memory` (bytes/s of elementwise operations, reads and writes),
        `pages` (bytes/s of memory allocated by the system) and `launch` (seconds of an operation on few elements); for
        several devices also `copy` and `reduce` (bytes/s of a collective that copies or adds, counted as twice its
        full tensor) and `barrier` (seconds for each member of a group to meet the others).
    """
    count = len(devices)
    arrays = max(2, ARRAYS // count)
    timed = partial(_seconds, Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,)))
    launch = timed(_small, 8, 256)
    multiply = partial(_multiply, jnp.ones((WIDTH, WIDTH), dtype))
    out = {
        "flops": 2 * ELEMENTS * WIDTH / (timed(multiply, ELEMENTS, arrays) - launch),
        "memory": 2 * 4 * ELEMENTS / (timed(_elementwise, ELEMENTS, arrays) - launch),
        "pages": BLOCK / min(_allocation_seconds(BLOCK) for _ in range(RUNS)) * available_cores() / count,
        "launch": launch,
    }
    if count > 1:
        barrier = timed(_reduce, 8, 64)
        out |= {
            "barrier": barrier / count,
            "reduce": 2 * 4 * ELEMENTS / (timed(_reduce, ELEMENTS, arrays) - barrier),
            "copy": 2 * 4 * ELEMENTS / (timed(_copy, ELEMENTS // count * count, arrays) - barrier),
        }
    return out


def _seconds(mesh: Mesh, operation: Callable[[jax.Array], jax.Array], size: int, times: int) -> float:
    """Seconds of one of `times` runs of an operation, each on an array of `size` elements on every device."""

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
        time.sleep(CLOCK_DELAY)
        best = min(best, time.process_time() - start)
    return best / available_cores() / times


def _allocation_seconds(size: int) -> float:
    """Seconds of one core to allocate and touch `size` bytes."""
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
