"""Cost of a checkpoint: stall per save against size and leaf count, write and restore throughput.

    python benchmarks/checkpoint.py [--sizes 16 64 256 1024] [--leaves 32 256] [--repeats 5] [--quick]
                                    [--out checkpoint.json]

`stall` is how long `Checkpointer.save` keeps its caller, on a state that a training step then donates; `copy` is a
plain blocking device-to-host copy of the same state (every shard of the first replica into fresh NumPy memory),
interleaved with it: the yardstick is stall <= copy. `next step` is the donating step right after a save, `step` one
without; `blocked` is the stall plus the time that the save adds to that step. `write` runs from
`save` to the commit (data, checksums, fsync, marker); `restore` reads with checksums from a warm page cache, `cold`
after it was dropped. Times are medians.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import common
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint import Checkpointer, Committed

MIB = 2**20


def make_state(size: int, leaves: int) -> dict[str, jax.Array]:
    """`leaves` float32 matrices of `size` MiB in all, sharded over every device."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 2) if devices.size % 2 == 0 else devices[:, None], ("fsdp", "model"),
                axis_types=(AxisType.Auto,) * 2)  # fmt: skip
    sharding = NamedSharding(mesh, PartitionSpec("fsdp", "model"))
    rows = size * MIB // 4 // leaves // 256
    keys = jax.random.split(jax.random.key(0), leaves)
    init = jax.jit(lambda key: jax.random.normal(key, (rows, 256)), out_shardings=sharding)
    return {f"w{i}": init(key) for i, key in enumerate(keys)}


def plain_copy(state: dict[str, jax.Array]) -> float:
    """Seconds of a blocking copy of the first replica to fresh host memory."""
    begun = time.perf_counter()
    shards = [shard.data for x in state.values() for shard in x.addressable_shards if shard.replica_id == 0]
    for shard in shards:
        shard.copy_to_host_async()
    copies = [np.array(shard, copy=True) for shard in shards]
    seconds = time.perf_counter() - begun
    del copies
    return seconds


def drop_from_cache(folder: Path) -> None:
    """Drops the files from the page cache, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(size: int, leaves: int, repeats: int, folder: Path) -> dict[str, float]:
    """One row of the table; times in ms, throughput in MiB/s."""
    state = make_state(size, leaves)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0.999, s), donate_argnums=0)
    state = jax.block_until_ready(step(state))
    stalls, copies, plain, after, writes, cold, warm = ([] for _ in range(7))
    with Checkpointer(folder, keep=1) as checkpoints:
        for number in range(repeats + 1):
            copies.append(plain_copy(state))
            begun = time.perf_counter()
            state = jax.block_until_ready(step(state))
            plain.append(time.perf_counter() - begun)
            checkpoints.save(number, state, manifest={})
            begun = time.perf_counter()
            state = jax.block_until_ready(step(state))
            after.append(time.perf_counter() - begun)
            checkpoints.wait()
            (event,) = checkpoints.poll()
            if not isinstance(event, Committed):
                raise SystemExit(str(event))
            stalls.append(event.stall)
            writes.append(event.seconds)
        del state
        for times, forget in ((warm, False), (cold, True)):
            for _ in range(2):
                if forget:
                    drop_from_cache(folder)
                begun = time.perf_counter()
                restored, _ = checkpoints.restore(None, like)
                jax.block_until_ready(restored)
                times.append(time.perf_counter() - begun)
                del restored
    middle = statistics.median
    return {
        "MiB": size,
        "leaves": leaves,
        "stall ms": middle(stalls[1:]) * 1e3,
        "stall max ms": max(stalls[1:]) * 1e3,
        "copy ms": middle(copies[1:]) * 1e3,
        "step ms": middle(plain[1:]) * 1e3,
        "next step ms": middle(after[1:]) * 1e3,
        "blocked ms": (middle(stalls[1:]) + max(0.0, middle(after[1:]) - middle(plain[1:]))) * 1e3,
        "write MiB/s": size / middle(writes[1:]),
        "restore MiB/s": size / min(warm),
        "cold MiB/s": size / min(cold),
    }


def main() -> None:
    """Prints the table and, with --out, writes it as JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024], help="MiB")
    parser.add_argument("--leaves", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", help="folder on the disk to measure; default: the temporary folder")
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.leaves, args.repeats = [4], [8], 1
    print(common.title(common.machine()))
    rows = []
    for size in args.sizes:
        for leaves in args.leaves:
            with tempfile.TemporaryDirectory(dir=args.dir) as folder:
                row = measure(size, leaves, args.repeats, Path(folder))
            if not rows:
                print(" ".join(f"{name:>13}" for name in row))
            rows.append(row)
            print(" ".join(f"{value:13.1f}" if isinstance(value, float) else f"{value:13d}" for value in row.values()))
    common.report("checkpoint", args, rows, common.machine())


if __name__ == "__main__":
    main()
