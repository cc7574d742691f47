"""Cost of in-memory checkpoints on two nodes: stall per copy, time of the copy, time to restore.

    python benchmarks/peers.py [--sizes 16 64 256 1024] [--leaves 32] [--repeats 5] [--out peers.json]

Two nodes are two processes of this machine, so that the network is loopback. `stall` is how long the methods `snapshot`
and `replicate` of a `MemoryCheckpointer` block their caller if no copy is in flight, on a state that a training
step then donates; `step` that step without a copy, `next step` the one right after it; `copy` is from `snapshot` until
both nodes hold it (two copies, checksums); `restore` from a warm program to a state whose arrays are ready, checked,
`disk` the same of a checkpoint in the page cache, for comparison. Medians; milliseconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import common
import jax
from checkpoint import make_state

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.memory.checkpointer import MemoryCheckpointer
from jaxtrain.checkpoint.memory.client import PeerConfig

NODE = """
import sys
from jaxtrain.checkpoint.memory.server import SnapshotServer
server = SnapshotServer("127.0.0.1", "t", print)
print(server.port, flush=True)
sys.stdin.read()
"""


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    begun = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun)


def measure(size: int, leaves: int, repeats: int, ports: list[int]) -> dict[str, float]:
    """One row of the table."""
    state = make_state(size, leaves)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0.999, s), donate_argnums=0)
    problems: list[str] = []
    memory = MemoryCheckpointer(PeerConfig(1, 1, "t", tuple(("127.0.0.1", port) for port in ports)), problems.append)
    stall, copy, plain, after, back, disk = ([] for _ in range(6))

    def train() -> None:
        nonlocal state
        state = jax.block_until_ready(step(state))

    def from_memory() -> None:
        found = memory.newest(after=-1)
        jax.block_until_ready(memory.restore(found, like) if found else None)

    def give(number: int) -> None:
        memory.snapshot(number, state, {})
        memory.replicate()

    train()
    for number in range(repeats + 1):
        plain.append(timed(train))
        begun = time.perf_counter()
        stall.append(timed(lambda number=number: give(number)))
        after.append(timed(train))
        memory.wait()
        copy.append(1e3 * (time.perf_counter() - begun))
    back = [timed(from_memory) for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpoints:
        checkpoints.save(1, state, manifest={})
        checkpoints.wait()
        disk = [timed(lambda: jax.block_until_ready(checkpoints.restore(None, like)[0])) for _ in range(2)]
    memory.discard_after(-1)
    if problems:
        raise SystemExit("\n".join(problems))
    middle = {"stall": stall, "step": plain, "next step": after, "copy": copy}
    row = {"MiB": size, "leaves": leaves} | {name: statistics.median(times[1:]) for name, times in middle.items()}
    return row | {"MiB/s": 1e3 * size / row["copy"], "restore": min(back), "disk": min(disk)}


def main() -> None:
    """Prints the table and, with --out, writes it as JSON."""
    parser = common.parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64, 256, 1024], help="MiB")
    parser.add_argument("--leaves", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.leaves, args.repeats = [4], [8], 1
    machine, command = common.machine(), [sys.executable, "-c", NODE]
    print(common.title(machine))
    nodes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        ports = [int(node.stdout.readline()) for node in nodes if node.stdout is not None]
        rows = [measure(size, leaves, args.repeats, ports) for size in args.sizes for leaves in args.leaves]
    finally:
        for node in nodes:
            node.kill()
    print(common.table(rows, 1))
    common.report("peers", args, rows, machine)


if __name__ == "__main__":
    main()
