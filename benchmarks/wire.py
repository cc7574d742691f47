"""What a step puts on the wire, against theory: the real train step compiled for GPUs that are not there.

    python benchmarks/wire.py [--nodes 8] [--gpus 8] [--out wire.json]

Llama 3 8B, 2 x 4096 tokens per device, full remat, bf16. Bytes per device and step are read off the compiled program:
every collective, times the trip counts of the loops around it. Theory, with n shards and full remat: FSDP gathers each
weight twice and reduces its gradient once, (n - 1) / n of it each time, and moves the rows of the embedding twice;
sequence parallelism gathers 6 and scatters 5 residual streams a layer, and 1 and 1 for the loss. Needs the extra
`plan-gpu`; says so otherwise. The JSON also holds every collective by mesh axis (jaxtrain.plan.communication).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import common

TOKENS = 2 * 4096  # per device


def theory(sizes: dict[str, int], model: Any, weights: int, table: int) -> float:
    """Bytes per device that the layout has to send."""
    fsdp, tp = sizes["fsdp"], sizes["model"]
    gathered = 3 * 2 * (weights - table) / tp * (fsdp - 1) / fsdp
    rows = 2 * 2 * TOKENS * model.embed * (fsdp - 1) / fsdp
    stream = 2 * TOKENS * tp * model.embed * (tp - 1) / tp  # of the tokens of a tensor-parallel group
    return gathered + rows + (11 * model.layers + 2) * stream * (tp > 1)


def measure(layout: str, mesh: list[str], target: str, count: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One layout: a row of the table, bytes in GB per device; and every collective."""
    from jaxtrain.config import resolve
    from jaxtrain.models.tensors import parameter_count
    from jaxtrain.plan import communication, compile

    fixed = ["data.sequence=4096", f"data.global_batch={2 * count}", "step.remat=full", "data.validation=0"]
    config, _ = resolve("configs/models/llama3_8b.yaml", *fixed, f"layout={layout}", *mesh, paths=False)
    report = compile.measure(config, 128256, target)
    weights = parameter_count(config.model, 128256)
    expected = theory(report.sizes, config.model, weights, 128256 * config.model.embed)
    sent: Counter[str] = Counter()
    for row in report.rows:
        sent[row.op] += row.bytes
    total = sum(sent.values())
    return {
        "layout": report.layout, "wire GB": total / 1e9, "theory GB": expected / 1e9, "ratio": total / expected,
        **{op: sent[op] / 1e9 for op in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")},
        "state GB": report.memory.arguments / 1e9, "temporaries GB": report.memory.temporaries / 1e9,
    }, communication.as_dict(report.rows)  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    args = parser.parse_args()
    from jaxtrain.plan import targets

    target = targets.parse(f"h100:{args.nodes}x{args.gpus}")
    if problem := targets.missing(target):
        common.report("wire", args, {"skipped": problem}, common.machine(), f"wire: {problem}")
        return 0
    count = args.nodes * args.gpus
    cases = [("fsdp", [f"mesh.fsdp={count}"]), ("fsdp_tp", [f"mesh.model={args.gpus}", f"mesh.fsdp={args.nodes}"])]
    measured = [measure(layout, mesh, str(target), count) for layout, mesh in cases[: 1 if args.quick else 2]]
    rows = [row for row, _ in measured]
    print(common.table(rows))
    note = f"compiled for {args.nodes} x {args.gpus} H100, none present"
    common.report("wire", args, rows, common.machine(), note, collectives=[collectives for _, collectives in measured])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
