"""Memory of ZeRO stages: bytes per device of the real program against the formulas, and the compiled step's memory.

    python benchmarks/memory.py [--microbatches 4] [--out memory.json]

First an abstract Llama of 1.36e9 parameters: the sharded train state, and the other memory of a step, the gathered
bf16 copy and gradients. The paper (Rajbhandari et al. 2020, arXiv 1910.02054) counts 16 bytes a parameter for
mixed-precision Adam: 2 weights, 2 gradients, 12 float32 weights and moments; stage 1 shards the 12, stage 2 also the
gradients, stage 3 all. Here gradients are accumulated in float32, as in Megatron-LM's distributed optimizer: `paper 4`
is the paper with 4 bytes a gradient. Stages 0 and 3 cast weights layer by layer and keep no copy, and with one
microbatch the gradients of layers stay in bf16; stage 1 then reduces gradients at once, as stage 2: `here` is the
formula with these changes, `rest` the other memory of the program.

Then the compiler's own figures for a small Llama with few tokens, on simulated CPU devices (float32, because this
backend widens bf16 copies) and, where their compilers are installed, on absent GPUs and TPUs. `held` is the same
sum for that model; `total` also has activations and memory that the compiler adds.
"""

from __future__ import annotations

import argparse
import json
from math import prod
from typing import Any

import common

LAYOUTS = ("ddp", "zero1", "zero2", "zero3")
FIXED = ("data.validation_fraction=0", "step.remat=full", "loss.vocab_chunks=8")
SMALL = (
    "model.embed=1024", "model.layers=8", "model.heads=8", "model.kv_heads=8", "model.mlp=4096", "model.vocab=4096",
    "data.sequence=128",
)  # fmt: skip
QUICK = (
    "model.embed=256", "model.layers=2", "model.heads=4", "model.kv_heads=4", "model.mlp=1024", "model.vocab=512",
    "data.sequence=32",
)  # fmt: skip


def paper(stage: int, parameters: int, shards: int, gradient: int = 2) -> float:
    """Bytes per device by the paper; `gradient`: bytes of a gradient."""
    parts = (12, gradient, 2)  # optimizer, gradients, weights: stage n shares out the first n
    return parameters * sum(part / (shards if place < stage else 1) for place, part in enumerate(parts))


def here(stage: int, parameters: int, ends: int, shards: int, microbatches: int, width: int = 2) -> float:
    """Bytes per device by jaxtrain's formula: a copy of `width` bytes a parameter in stages 1, 2; float32 gradients,
    except those of layers that are neither accumulated nor gathered. `ends`: parameters outside layers."""
    whole_gradients = stage == 0 or (stage == 1 and microbatches > 1)
    state = 12 if stage == 0 else 12 / shards
    gathers = stage in (1, 2) and shards > 1
    gradient = 4 * parameters - (0 if gathers or microbatches > 1 else (4 - width) * (parameters - ends))
    return parameters * (state + width * gathers) + gradient / (1 if whole_gradients else shards)


def configured(layout: str, devices: int, microbatches: int, *more: str) -> Any:
    """Config of a stage with one row a device and microbatch."""
    from jaxtrain.core.resolve import resolve

    own = (f"mesh.data={devices}", f"step.microbatches={microbatches}", f"data.global_batch={devices * microbatches}")
    model = None if more else "configs/models/llama_1b.yaml"
    return resolve(model, *FIXED, *own, f"layout={layout}", *more, paths=False)[0]


def held(config: Any, devices: list[Any]) -> dict[str, int]:
    """Number of parameters, of those outside layers, and bytes per device of every part."""

    from jaxtrain.core.program import build_program
    from jaxtrain.planning import step_program
    from jaxtrain.planning.cost import memory

    program = build_program(config, config.model.vocab, devices)
    sizes = {path: prod(shape) for path, (shape, _) in program.model_def.tensors().items()}
    ends = sum(size for path, size in sizes.items() if not path.startswith("layers/"))
    whole_step = {
        name: size for name, size in step_program.weight_and_gradient_bytes(program).items() if name != "gathered"
    }  # a layer's
    return {"parameters": sum(sizes.values()), "ends": ends, **memory.state_bytes(program.state), **whole_step}


def by_formula(counts: list[int], microbatches: list[int]) -> list[dict[str, Any]]:
    """Rows of the first table, in a process with as many simulated devices as the largest count."""
    import jax

    rows = []
    for stage, layout in enumerate(LAYOUTS):
        for parts in microbatches:
            for count in counts:
                own = held(configured(layout, count, parts), jax.devices()[:count])
                psi, ends = own.pop("parameters"), own.pop("ends")
                kept = sum(own.values())
                expected = here(stage, psi, ends, count, parts)
                rows.append({
                    "stage": stage, "devices": count, "microbatches": parts,
                    **{f"{part} GB": own[part] / 1e9 for part in ("params", "opt_state", "weights", "gradients")},
                    "held GB": kept / 1e9, "here GB": expected / 1e9, "ratio": kept / expected,
                    "rest MB": (kept - expected) / 1e6, "paper GB": paper(stage, psi, count) / 1e9,
                    "paper 4 GB": paper(stage, psi, count, 4) / 1e9,
                })  # fmt: skip
    return rows


def compiled(case: dict[str, Any], own: dict[str, int]) -> dict[str, Any]:
    """A row of the second table: the compiled step, in a child process, and the bytes of `held`."""
    from jaxtrain.config.schema import Config
    from jaxtrain.planning import compile

    config = Config(**case["config"])
    names = {key: case[key] for key in ("target", "stage", "devices", "microbatches")}
    try:
        memory = compile.compile_report(config, None, case["target"]).memory
    except RuntimeError as error:  # of the compiler: said in the table, the others go on
        return names | {"error": str(error).splitlines()[-1][:200]}
    psi, ends, count, many = own.pop("parameters"), own.pop("ends"), case["devices"], case["microbatches"]
    kept = sum(own.values()) + 20 * config.data.sequence * many  # five arrays of a batch
    formula = here(case["stage"], psi, ends, count, many, 4 if config.precision == "fp32" else 2)
    total = memory.arguments + memory.temporaries
    return {
        **names,
        "arguments MB": memory.arguments / 1e6, "temporaries MB": memory.temporaries / 1e6, "total MB": total / 1e6,
        "formula MB": formula / 1e6, "held MB": kept / 1e6, "more MB": (total - kept) / 1e6,
        "bytes/parameter": total / psi,
    }  # fmt: skip


def case(target: str, count: int, stage: int, many: int, small: tuple[str, ...]) -> dict[str, Any]:
    """Description of a row of the second table."""
    precision = "fp32" if target.startswith("cpu") else "bf16"
    config = configured(LAYOUTS[stage], count, many, *small, f"precision={precision}")
    names = {"target": target, "devices": count, "stage": stage, "microbatches": many}
    return {**names, "config": config.model_dump(mode="json")}


def cases(args: argparse.Namespace) -> list[tuple[str, int]]:
    """(target, devices) of the second table whose compilers are installed."""
    from jaxtrain.planning.hardware import targets

    if args.quick:
        return [("cpu:8", 8)]
    wanted = [(f"cpu:{n}", n) for n in (1, 8)] + [("h100:1x8", 8), ("h100:8x8", 64), ("v5p:2x2x2", 8)]
    out = []
    for target, count in wanted:
        if problem := targets.missing_packages(targets.parse(target)):
            print(f"memory: left out: {problem}")
        else:
            out.append((target, count))
    return out


def child(spec: dict[str, Any]) -> dict[str, Any]:
    """Runs with simulated devices: the first table, and the held bytes of the second."""
    import jax

    from jaxtrain.config.schema import Config

    rows = by_formula(spec["counts"], spec["microbatches"])
    cases = spec["cases"]
    return {"rows": rows, "held": [held(Config(**c["config"]), jax.devices()[: c["devices"]]) for c in cases]}


def main() -> int:
    """Prints both tables."""
    parser = common.parser(__doc__)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(json.loads(args.child))))
        return 0
    counts = [1, 8] if args.quick else [1, 2, 4, 8, 16, 32, 64]
    parts = sorted({1, args.microbatches})
    asked = [
        case(target, count, stage, many, QUICK if args.quick else SMALL)
        for target, count in cases(args) for stage in ((1, 2) if args.quick else range(4))
        for many in (parts if target == "h100:1x8" else parts[-1:])
    ]  # fmt: skip
    env = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(counts[-1])}
    made = common.in_child(__file__, {"counts": counts, "microbatches": parts, "cases": asked}, env)
    if "error" in made:
        raise SystemExit(f"memory: {made['error']}")
    print(common.table(made["rows"]))
    rows = [compiled(*pair) for pair in zip(asked, made["held"])]
    print()
    print(common.table([row for row in rows if "error" not in row]))
    for row in rows:
        if "error" in row:
            print(f"{row['target']}, stage {row['stage']}, microbatches {row['microbatches']}: {row['error']}")
    common.report("memory", args, {"formula": made["rows"], "compiled": rows}, common.machine())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
