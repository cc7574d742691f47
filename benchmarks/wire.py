"""What a step puts on the wire, against theory: the real train step compiled for GPUs that are not there.

    python benchmarks/wire.py [--nodes 8] [--gpus 8] [--out wire.json]

Llama 3 8B, 2 x 4096 tokens per device, full remat, bf16. Bytes per device and step are read off the compiled program:
every collective, times the trip counts of the loops around it. Theory, with n shards and full remat: FSDP gathers each
weight twice and reduces its gradient once, (n - 1) / n of it each time, and moves the rows of the embedding twice;
sequence parallelism gathers 6 and scatters 5 residual streams a layer, and 1 and 1 for the loss. Needs the packages
that benchmarks/targets.py names; says so otherwise.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from math import prod
from typing import Any

import common

WIDTHS = {"f32": 4, "bf16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1, "f16": 2, "s64": 8, "u64": 8}
COLLECTIVE = re.compile(r"= (.*?) (all-gather|reduce-scatter|all-reduce|collective-permute|all-to-all)(-start)?\(")
TOKENS = 2 * 4096  # per device


def bytes_of(shape: str) -> int:
    """Bytes of an HLO shape or tuple of shapes."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(WIDTHS[kind] * prod(int(d) for d in dims.split(",") if d) for kind, dims in found if kind in WIDTHS)


def group_of(line: str) -> int:
    """Devices that take part in a collective."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\].*? \{(.*?)\}", line):
        sizes = {axis: int(n) for axis, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        return prod(sizes[axis] for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    groups = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    return len(groups[1].split(",")) if groups else 2


def wire(line: str) -> tuple[str, float]:
    """(operation, bytes that a device sends) of a collective."""
    match = COLLECTIVE.search(line)
    assert match
    shape, op, started = match.groups()
    n, size = group_of(line), bytes_of(shape)
    # The result of a `-start` holds operands and results.
    shares = {
        "all-gather": 1 + 1 / n,
        "reduce-scatter": 1 + n,
        "all-to-all": 2,
        "collective-permute": 2,
        "all-reduce": 1,
    }
    out = size / shares[op] if started else size
    share = (n - 1) / n
    sent = {"all-gather": out * share, "reduce-scatter": out * (n - 1), "all-reduce": 2 * out * share}
    return op, sent.get(op, out * (share if op == "all-to-all" else 1))


def traffic(hlo: str) -> Counter[str]:
    """Bytes per device by operation, loops counted as often as they run."""
    bodies: dict[str, list[str]] = {}
    name = ""
    for line in hlo.splitlines():
        if not line.startswith(" ") and line.endswith("{"):
            name = re.sub(r"^ENTRY ", "", line).lstrip("%").split(" ")[0]
            bodies[name] = []
        elif name:
            bodies[name].append(line)
    total: Counter[str] = Counter()

    def walk(name: str, times: int) -> None:
        for line in bodies.get(name, ()):
            if loop := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                trips = re.search(r'known_trip_count.*?"n":"(\d+)"', line)
                walk(loop[1], times * (int(trips[1]) if trips else 1))
                continue
            for called in re.findall(r"(?:branch_computations=\{|calls=)%?([\w.\-]+)", line):
                walk(called, times)
            if COLLECTIVE.search(line):
                op, size = wire(line)
                total[op] += times * size

    entry = re.search(r"^ENTRY %?([\w.\-]+)", hlo, re.M)
    assert entry
    walk(entry[1], 1)
    return total


def theory(sizes: dict[str, int], model: Any, weights: int, table: int) -> float:
    """Bytes per device that the layout has to send."""
    fsdp, tp = sizes["fsdp"], sizes["model"]
    gathered = 3 * 2 * (weights - table) / tp * (fsdp - 1) / fsdp
    rows = 2 * 2 * TOKENS * model.embed * (fsdp - 1) / fsdp
    stream = 2 * TOKENS * tp * model.embed * (tp - 1) / tp  # of the tokens of a tensor-parallel group
    return gathered + rows + (11 * model.layers + 2) * stream * (tp > 1)


def measure(layout: str, mesh: list[str], devices: list[Any]) -> dict[str, Any]:
    """One layout: bytes on the wire, theory and memory, in GB per device."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.config import resolve
    from jaxtrain.models.tensors import parameter_count
    from jaxtrain.train.batches import batch_sharding
    from jaxtrain.train.program import build

    rows = 2 * len(devices)
    fixed = ["data.sequence=4096", f"data.global_batch={rows}", "step.remat=full", "data.validation=0"]
    config, _ = resolve("configs/models/llama3_8b.yaml", *fixed, f"layout={layout}", *mesh, paths=False)
    program = build(config, 128256, devices)
    sharding = batch_sharding(program.sharder, 2, True)
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "positions": jnp.int32, "segments": jnp.int32}
    batch = {
        name: jax.ShapeDtypeStruct((rows, 4096), kind, sharding=sharding)
        for name, kind in (kinds | {"weights": jnp.float32}).items()
    }
    compiled = program.step.lower(program.state, batch).compile()
    memory, sent = compiled.memory_analysis(), traffic(compiled.as_text())
    weights = parameter_count(config.model, 128256)
    expected = theory(program.layout.sizes, config.model, weights, 128256 * config.model.embed)
    total = sum(sent.values())
    return {
        "layout": str(program.layout), "wire GB": total / 1e9, "theory GB": expected / 1e9, "ratio": total / expected,
        **{op: sent[op] / 1e9 for op in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")},
        "state GB": memory.argument_size_in_bytes / 1e9, "temporaries GB": memory.temp_size_in_bytes / 1e9,
    }  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import targets

    try:
        devices = targets.devices("h100", args.nodes, args.gpus)
    except Exception as error:  # whatever JAX says of a missing plugin
        print(f"wire: no CUDA compiler, install jax-cuda13-plugin, jax-cuda13-pjrt and nvidia-cudnn-cu13 ({error})")
        common.report("wire", args, {"skipped": "no CUDA compiler"}, common.machine())
        return 0
    count = len(devices)
    cases = [("fsdp", [f"mesh.fsdp={count}"]), ("fsdp_tp", [f"mesh.model={args.gpus}", f"mesh.fsdp={args.nodes}"])]
    rows = [measure(layout, mesh, devices) for layout, mesh in cases[: 1 if args.quick else 2]]
    print(common.table(rows))
    common.report("wire", args, rows, common.machine(), f"compiled for {args.nodes} x {args.gpus} H100, none present")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
