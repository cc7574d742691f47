"""Training speed and memory against transformers + torch: the same Llama, AdamW, batch and dtype, on the same device.

    python benchmarks/peer_torch.py [--sizes small medium] [--precision fp32 bf16] [--threads N] [--turns 7] [--block 3]
                                    [--compile] [--out peer_torch.json]

Both start from the same weights (copied over) and take the same batches; the first losses must agree within 1e-4 (bf16:
2e-2), or the comparison fails. One process trains both in turns of `--block` steps; `ratio` is the median over turns of
jaxtrain's tokens/s over torch's in the turn next to it, with quartiles. Memory is measured in separate processes: on
CPU the peak resident memory during three steps, after a first one that compiles, minus that after the imports (`whole`
in the JSON includes XLA's compiler); on GPU the allocator's peak. On CPU both use as many threads; on a busy machine
`--threads 1` and the processor seconds per step (`cpu s`) are the fairer figures, since threads that wait for each
other burn time.

torch: `LlamaForCausalLM`, scaled-dot-product attention, `torch.optim.AdamW` (fused), gradients clipped to norm 1, bf16
by autocast over float32 weights. jaxtrain: the step that `jaxtrain train` runs, its defaults. Neither recomputes
activations. Needs the extra `peer`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from typing import Any

import common
import numpy as np

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed": 64, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 192, "vocab": 512, "rows": 2, "length": 64},
    "small": {
        "embed": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 704, "vocab": 8192, "rows": 2, "length": 512,
    },
    "medium": {
        "embed": 512, "layers": 8, "heads": 8, "kv_heads": 8, "mlp": 1408, "vocab": 16000, "rows": 1, "length": 512,
    },
    "gpu": {
        "embed": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "mlp": 2816, "vocab": 32000, "rows": 4,
        "length": 4096,
    },
}  # fmt: skip
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
LR, BETAS, EPSILON, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
RING = 4  # different batches, taken in turn


def batches(shape: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """Rows of one document each, which match transformers' causal mask."""
    return [common.packed_batch(seed, shape["rows"], shape["length"], shape["vocab"], 1) for seed in range(RING)]


class Ours:
    """jaxtrain's step."""

    def __init__(self, spec: dict[str, Any]):
        import jax

        from jaxtrain.config.schema import Config
        from jaxtrain.core.placement import batch_sharding
        from jaxtrain.core.program import build_program

        size = dict(spec["shape"])
        rows, length, vocab = size.pop("rows"), size.pop("length"), size.pop("vocab")
        config = Config(**{
            "steps": 1000, "precision": spec["precision"], "model": size,
            "data": {"sequence": length, "global_batch": rows},
            "optimizer": {"lr": LR, "betas": BETAS, "epsilon": EPSILON, "weight_decay": DECAY,
            "decay_all_parameters": True, "grad_clip_norm": CLIP}, "schedule": {"name": "constant"},
        })  # fmt: skip
        self.program = build_program(config, vocab, jax.devices()[:1])
        self.state = self.program.init()
        self.sharding = batch_sharding(self.program.sharder, 2, True)
        self.epsilon, self.theta = config.model.norm_epsilon, config.model.rope_theta

    def steps(self, hosts: list[dict[str, np.ndarray]]) -> list[float]:
        import jax

        losses = []
        for host in hosts:
            self.state, metrics = self.program.step(self.state, jax.device_put(host, self.sharding))
            losses.append(metrics["loss"])
        return [float(loss) for loss in losses]

    def peak(self) -> int | None:
        import jax

        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


class Theirs:
    """transformers + torch."""

    def __init__(self, spec: dict[str, Any], like: Ours | None):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = spec["shape"]
        self.device = "cuda" if spec["platform"] == "gpu" else "cpu"
        config = LlamaConfig(
            vocab_size=shape["vocab"], hidden_size=shape["embed"], intermediate_size=shape["mlp"],
            num_hidden_layers=shape["layers"], num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"], max_position_embeddings=shape["length"],
            rms_norm_eps=like.epsilon if like else 1e-6, rope_theta=like.theta if like else 1e4,
            tie_word_embeddings=False, attn_implementation="sdpa", use_cache=False,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).to(self.device, torch.float32).train()
        if like is not None:
            copy_weights(like.state["params"], self.model)
        self.run = torch.compile(self.model) if spec["compile"] else self.model
        self.is_bf16 = spec["precision"] == "bf16"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=True
        )

    def steps(self, hosts: list[dict[str, np.ndarray]]) -> list[float]:
        import torch

        losses = []
        for host in hosts:
            tokens, targets = (
                torch.from_numpy(host[n].astype(np.int64)).to(self.device) for n in ("tokens", "targets")
            )
            with torch.autocast(self.device, torch.bfloat16, enabled=self.is_bf16):
                logits = self.run(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    def peak(self) -> int | None:
        import torch

        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None


def copy_weights(params: dict[str, Any], model: Any) -> None:
    """jaxtrain's parameters into a LlamaForCausalLM; torch stores linear weights [out, in]."""
    import torch

    host = {path: np.array(leaf) for path, leaf in flat(params)}
    state = {
        "model.embed_tokens.weight": host["embed/table"],
        "model.norm.weight": host["final_norm/scale"],
        "lm_head.weight": host["head"].T,
    }
    for i in range(host["layers/mlp/up"].shape[0]):
        at = {name.removeprefix("layers/"): value[i] for name, value in host.items() if name.startswith("layers/")}
        layer = f"model.layers.{i}."
        for name in "qkv":
            w = at[f"attention/{name}"]
            state[f"{layer}self_attn.{name}_proj.weight"] = w.reshape(w.shape[0], -1).T
        o = at["attention/o"]
        state[f"{layer}self_attn.o_proj.weight"] = o.reshape(o.shape[0], -1)
        for name in ("gate", "up"):
            state[f"{layer}mlp.{name}_proj.weight"] = at[f"mlp/{name}"].T
        state[f"{layer}mlp.down_proj.weight"] = at["mlp/down"]
        state[f"{layer}input_layernorm.weight"] = at["attention_norm/scale"]
        state[f"{layer}post_attention_layernorm.weight"] = at["mlp_norm/scale"]
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in state.items()}
    model.load_state_dict(tensors, strict=True)


def flat(tree: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """(path, leaf) of a nested dict."""
    if not isinstance(tree, dict):
        return [(before, tree)]
    return [pair for key, value in tree.items() for pair in flat(value, f"{before}/{key}" if before else key)]


def speed(spec: dict[str, Any]) -> dict[str, Any]:
    """Both in this process, in turns."""
    import torch

    torch.set_num_threads(spec["threads"])
    ours = Ours(spec)
    theirs = Theirs(spec, ours)
    ring = batches(spec["shape"])
    first = [side.steps(ring[:2]) for side in (ours, theirs)]
    off = [abs(a / b - 1) for a, b in zip(*first)]
    if not max(off) < TOLERANCE[spec["precision"]]:
        raise SystemExit(f"not the same model: first losses {first[0]} of jaxtrain, {first[1]} of torch")
    tokens = spec["shape"]["rows"] * spec["shape"]["length"] * spec["block"]
    rates: dict[str, list[float]] = {"jaxtrain": [], "torch": []}
    busy: dict[str, list[float]] = {"jaxtrain": [], "torch": []}
    for turn in range(spec["turns"] + 1):
        hosts = [ring[(turn * spec["block"] + i) % RING] for i in range(spec["block"])]
        pair = (("jaxtrain", ours), ("torch", theirs))
        for name, side in pair if turn % 2 else reversed(pair):
            begin, cpu = time.perf_counter(), time.process_time()
            side.steps(hosts)  # reads its last loss: nothing is left running
            if turn:
                rates[name].append(tokens / (time.perf_counter() - begin))
                busy[name].append((time.process_time() - cpu) / spec["block"])
    last = [side.steps(ring[:1])[0] for side in (ours, theirs)]
    ratios = [a / b for a, b in zip(rates["jaxtrain"], rates["torch"])]
    return {
        "machine": common.machine("torch", "transformers"),
        "tokens_per_sec": {name: common.spread(values) for name, values in rates.items()},
        "ratio": common.spread(ratios),
        "cpu_seconds_per_step": {name: common.spread(values) for name, values in busy.items()},
        "losses": {"jaxtrain": [*first[0], last[0]], "torch": [*first[1], last[1]]},
        "first_losses_differ": max(off),
        "parameters": sum(p.numel() for p in theirs.model.parameters()),
    }


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes of one side in this process, above the memory of the imports."""
    if spec["side"] == "torch":
        import torch
        import transformers.models.llama.modeling_llama  # noqa: F401

        torch.set_num_threads(spec["threads"])
        before, side = common.peak_rss(), Theirs(spec, None)
    else:
        import jax

        import jaxtrain.core.program  # noqa: F401

        jax.devices()
        before, side = common.peak_rss(), Ours(spec)
    hosts = batches(spec["shape"])
    side.steps(hosts[:1])
    whole, is_reset = common.peak_rss(), common.reset_peak_rss()
    side.steps(hosts[:3])
    on_device = side.peak()
    if on_device is not None:
        return {"peak": on_device, "whole": on_device}
    return {"peak": (common.peak_rss() if is_reset else whole) - before, "whole": whole - before, "imports": before}


def missing() -> str | None:
    """Describes missing packages, in one line."""
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    return f"peer_torch needs {' and '.join(absent)}: pip install 'jaxtrain[peer]'" if absent else None


def point(spec: dict[str, Any], env: dict[str, str]) -> dict[str, Any]:
    """Speed and memory of one size in one precision."""
    result = common.in_child(__file__, spec | {"what": "speed"}, env)
    peaks = {
        side: common.in_child(__file__, spec | {"what": "memory", "side": side}, env) for side in ("jaxtrain", "torch")
    }
    return {"point": spec, **result, "memory": peaks}


def shown(result: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    spec = result["point"]
    row: dict[str, Any] = {"size": spec["size"], "precision": spec["precision"]}
    if "error" in result:
        return row | {"error": result["error"]}
    ratio, rates = result["ratio"], result["tokens_per_sec"]
    mib = {name: m.get("peak", float("nan")) / 2**20 for name, m in result["memory"].items()}
    return row | {
        "parameters": result["parameters"],
        "jaxtrain tok/s": rates["jaxtrain"]["median"],
        "torch tok/s": rates["torch"]["median"],
        "ratio": f"{ratio['median']:.2f} [{ratio['q1']:.2f} {ratio['q3']:.2f}]",
        "jaxtrain cpu s": result["cpu_seconds_per_step"]["jaxtrain"]["median"],
        "torch cpu s": result["cpu_seconds_per_step"]["torch"]["median"],
        "jaxtrain MiB": round(mib["jaxtrain"]),
        "torch MiB": round(mib["torch"]),
        "losses differ by": f"{result['first_losses_differ']:.1e}",
    }


def main() -> None:
    """Prints the table and, with --out, writes the JSON."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = common.parser(__doc__)
    parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--precision", nargs="+", choices=tuple(TOLERANCE))
    parser.add_argument("--threads", type=int, default=cores, help="of each; also the cores that each may use")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model (needs a C++ compiler)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        spec = json.loads(args.child)
        if hasattr(os, "sched_setaffinity"):  # XLA makes a thread for every core that it may use, when it starts
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["threads"]])
        print(json.dumps(speed(spec) if spec["what"] == "speed" else memory(spec)))
        return
    reason = missing()
    if reason:
        common.report("peer_torch", args, [], common.machine(), reason, skipped=reason)
        return
    on_gpu = args.platform == "gpu"
    if args.quick:
        args.sizes, args.turns, args.block = ["tiny"], 2, 1
    sizes = args.sizes or (["gpu"] if on_gpu else ["small", "medium"])
    precisions = args.precision or (["bf16"] if on_gpu else ["fp32"])
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if on_gpu else {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    results = []
    for size in sizes:
        for precision in precisions:
            spec = {
                "size": size, "shape": SIZES[size], "precision": precision, "platform": args.platform,
                "threads": args.threads, "turns": args.turns, "block": args.block, "compile": args.compile,
            }  # fmt: skip
            results.append(point(spec, env))
            print(shown(results[-1]), file=sys.stderr)
    where = next((r["machine"] for r in results if "machine" in r), common.machine("torch", "transformers"))
    print(common.title(where | {"threads": args.threads}))
    print(common.table([shown(result) for result in results]))
    common.report("peer_torch", args, results, where)
    if all("error" in result for result in results):
        raise SystemExit("nothing was measured: " + results[0]["error"])


if __name__ == "__main__":
    main()
