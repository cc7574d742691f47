"""Communication of a step against theory: the real train step compiled for absent GPUs.

    python benchmarks/wire.py [--nodes 8] [--gpus 8] [--only cp] [--out wire.json]

Llama 3 8B: 2 x 4096 tokens per device under fsdp and fsdp_tp, sequences of 131072 over `context` under cp_*. Mixtral
8x7B: 2 x 4096 tokens per device under ep, capacity 1.25. Full remat, bf16. Bytes per device and step are counted in
the compiled program: every collective, times the trip counts of the enclosing loops. Theory, with n devices on an axis,
(n - 1) / n of a tensor gathered, scattered or exchanged, and three passes a layer, forward, recomputed and backward:

- weights: gathered twice and their gradient scattered once, experts over `fsdp`, others over all axes; rows of the
  embedding move twice over each axis that splits them;
- fsdp_tp: 6 gathers and 5 scatters of the residual stream a layer, and 1 and 1 for the loss;
- cp_ulysses: q, k, v and the output in each pass; cp_gather: k and v in each pass; cp_ring: n - 1 hops of k and v in
  each pass, and as many of their float32 gradients backward;
- ep: the capacity of all experts for a device's tokens, there and back in each pass.

Needs the extra `plan-gpu`. The JSON also holds every collective by mesh axis
(jaxtrain.hlo.collectives).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import common

OPERATIONS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
LONG = 131072
MOE = "model.moe={num_experts: 8, top_k: 2, capacity_factor: 1.25}"


@dataclass(frozen=True)
class Case:
    """A layout with `axis` over the GPUs of a node and fsdp over the nodes (None: fsdp over all)."""

    layout: str
    axis: str | None = None
    model: str = "llama3_8b"
    vocab: int = 128256
    sequence: int = 4096
    changes: tuple[str, ...] = ()

    def keys(self, nodes: int, gpus: int) -> list[str]:
        """Changes to the model's config."""
        count = nodes * gpus
        mesh = [f"mesh.fsdp={count}"] if self.axis is None else [f"mesh.fsdp={nodes}", f"mesh.{self.axis}={gpus}"]
        rows = nodes if self.axis == "context" else 2 * count
        data = [f"data.sequence={self.sequence}", f"data.global_batch={rows}", "data.validation_fraction=0"]
        return [f"layout={self.layout}", *mesh, *data, "step.remat=full", *self.changes]


CASES = (
    Case("fsdp"),
    Case("fsdp_tp", "model"),
    *(Case(layout, "context", sequence=LONG) for layout in ("cp_ulysses", "cp_ring", "cp_gather")),
    Case("ep", "expert", "mixtral_8x7b", 32000, changes=(MOE,)),
)


def theory(config: Any, sizes: dict[str, int], vocab: int) -> float:
    """Bytes per device that the layout sends in theory."""
    from jaxtrain.models.decoder_params import parameter_count

    model, moe = config.model, config.model.moe
    tokens = config.data.sequence * config.data.global_batch // prod(sizes.values())
    experts = 0 if moe is None else 3 * model.layers * moe.num_experts * model.embed * model.mlp
    dense = parameter_count(model, vocab) - vocab * model.embed - experts
    storage = [sizes[axis] for axis in ("fsdp", "context", "expert")]
    weights = 3 * 2 * (dense * _ring(prod(storage)) + experts / sizes["expert"] * _ring(sizes["fsdp"])) / sizes["model"]
    rows = sum(2 * 2 * tokens * model.embed * _ring(size) for size in storage)
    return weights + rows + _stream(model, sizes["model"], tokens) + model.layers * _layer(config, sizes, tokens)


def _ring(size: int) -> float:
    return (size - 1) / size


def _stream(model: Any, size: int, tokens: int) -> float:
    """Bytes of the residual streams of a tensor-parallel group."""
    return (11 * model.layers + 2) * 2 * tokens * size * model.embed * _ring(size)


def _layer(config: Any, sizes: dict[str, int], tokens: int) -> float:
    """Bytes that attention exchanges over `context`, and experts over `expert`, in a layer and its three passes."""
    from jaxtrain.kernels.moe.routing import expert_capacity

    model, moe, context = config.model, config.model.moe, sizes["context"]
    head = model.head_dim or model.embed // model.heads
    queries, keys = (2 * tokens * count * head for count in (model.heads, 2 * model.kv_heads))
    if config.context_parallel == "ring":
        return (3 + 2) * (context - 1) * keys
    if config.context_parallel == "gather":
        return 3 * context * keys * _ring(context)
    sent = 3 * (2 * queries + keys) * _ring(context)
    if moe is None:
        return sent
    rows, room = (
        tokens // config.data.sequence,
        expert_capacity(config.data.sequence, moe.num_experts, moe.top_k, moe.capacity_factor),
    )
    return sent + 3 * 2 * 2 * rows * moe.num_experts * room * model.embed * _ring(sizes["expert"])


def measure(case: Case, nodes: int, gpus: int, target: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One layout: a row of the table, bytes in GB per device; and every collective."""
    from jaxtrain.core.resolve import resolve
    from jaxtrain.planning import compile

    config, _ = resolve(f"configs/models/{case.model}.yaml", *case.keys(nodes, gpus), paths=False)
    report = compile.compile_report(config, case.vocab, target)
    expected = theory(config, report.sizes, case.vocab)
    sent: Counter[str] = Counter()
    for row in report.collectives:
        sent[row.op] += row.bytes
    total = sum(sent.values())
    return {
        "model": case.model, "layout": report.layout, "wire GB": total / 1e9, "theory GB": expected / 1e9,
        "ratio": total / expected, **{op: sent[op] / 1e9 for op in OPERATIONS},
        "state GB": report.memory.arguments / 1e9, "temporaries GB": report.memory.temporaries / 1e9,
        "compile s": report.seconds,
    }, [asdict(row) for row in report.collectives]  # fmt: skip


def main() -> int:
    """Prints the table."""
    parser = common.parser(__doc__)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--only", default="", help="layouts whose name begins so")
    args = parser.parse_args()
    from jaxtrain.planning.hardware import targets

    target = targets.parse(f"h100:{args.nodes}x{args.gpus}")
    if problem := targets.missing_packages(target):
        common.report("wire", args, {"skipped": problem}, common.machine(), f"wire: {problem}")
        return 0
    cases = [case for case in CASES if case.layout.startswith(args.only)][: 1 if args.quick else None]
    measured = [measure(case, args.nodes, args.gpus, str(target)) for case in cases]
    rows = [row for row, _ in measured]
    print(common.table(rows))
    note = f"compiled for {args.nodes} x {args.gpus} H100, none present"
    common.report("wire", args, rows, common.machine(), note, collectives=[collectives for _, collectives in measured])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
