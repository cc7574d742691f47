"""Time of a train step by part: from a profile read with JAX alone, or from parts timed separately."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("attention", "matmul", "loss", "optimizer", "rest")
_OP = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = ")
_CALL = re.compile(r'custom_call_target="([^"]+)"')
_MATMUL_KERNEL = re.compile(r"gemm|nvjet|cutlass|matmul|\bdot\b|^dot", re.IGNORECASE)
_ATTENTION_KERNEL = re.compile(r"fmha|flash|sdpa|cudnn.*attn", re.IGNORECASE)
_CONTROL = re.compile(r"^(while|call|conditional|tuple|get-tuple-element|parameter)\b")


def custom_calls(hlo: str) -> dict[str, int]:
    """Number of custom calls in a compiled program, by target."""
    return dict(Counter(_CALL.findall(hlo)))


def scopes(hlo: str) -> dict[str, tuple[str, bool]]:
    """HLO operation -> (its scope, whether it is a matrix multiplication)."""
    out = {}
    matmuls = fused_matmuls(hlo)
    for line in hlo.splitlines():
        found = _OP.match(line)
        if not found:
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        called = re.search(r"calls=%?([\w.\-]+)", line)
        is_matmul = " dot(" in line or "gemm" in line or bool(called and called.group(1) in matmuls)
        out[found.group(1)] = (name.group(1) if name else "", is_matmul)
    return out


def fused_matmuls(hlo: str) -> set[str]:
    """Computations that hold a matrix multiplication."""
    found, inside = set(), ""
    for line in hlo.splitlines():
        if line and not line.startswith((" ", "}")):
            begins = re.match(r"(?:ENTRY )?%?([\w.\-]+)", line)
            inside = begins.group(1) if begins else ""
        elif " dot(" in line:
            found.add(inside)
    return found


def kind(kernel: str, scope: str, is_matmul: bool) -> str:
    """Part of the step that a kernel belongs to; `scope` is its path of JAX transformations and scopes, or empty."""
    if "attention_" in scope or _ATTENTION_KERNEL.search(kernel):
        return "attention"
    if "cross_entropy" in scope:
        return "loss"
    if scope and "jvp" not in scope and "transpose" not in scope:
        return "optimizer"
    return "matmul" if is_matmul or _MATMUL_KERNEL.search(kernel) else "rest"


def kernels(folder: Path) -> Iterator[tuple[str, str, float]]:
    """(kernel, HLO operation or empty, seconds) of every kernel in a trace that `jax.profiler` wrote."""
    from jax.profiler import ProfileData

    for path in folder.rglob("*.xplane.pb"):
        for plane in ProfileData.from_file(str(path)).planes:
            on_gpu = plane.name.startswith("/device:GPU")
            if not on_gpu and not plane.name.startswith("/host:CPU"):
                continue
            for line in plane.lines:
                if on_gpu and "Stream" not in line.name:
                    continue  # other lines group the kernels of the streams again
                for event in line.events:
                    op = str(dict(event.stats).get("hlo_op", ""))
                    if on_gpu or (op and not _CONTROL.match(op)):
                        yield event.name, op, event.duration_ns / 1e9


def of_steps(compiled: Callable, state: Any, batch: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Shares of the wall time of a step, from a trace of some steps; `idle` is time without kernels.

    On CPU kernels run in parallel, so shares are of the busy time.
    """
    import jax

    known = scopes(compiled.as_text())
    # In a CUDA graph a kernel does not say which operation it is, but fusions lend it their name.
    by_kernel = {op.replace(".", "_").replace("-", "_"): op for op in known}
    with jax.profiler.trace(str(folder)):
        begin = time.perf_counter()
        for _ in range(steps):
            state, metrics = compiled(state, batch)
        jax.block_until_ready(metrics)
        wall = (time.perf_counter() - begin) / steps
    seconds, unknown = dict.fromkeys(KINDS, 0.0), 0.0
    names: Counter = Counter()
    for kernel, op, took in kernels(folder):
        op = op if op in known else by_kernel.get(kernel, "")
        scope, is_matmul = known.get(op, ("", False))
        seconds[kind(kernel, scope, is_matmul)] += took / steps
        names[kernel] += took / steps
        unknown += took / steps if op not in known else 0.0
    busy = sum(seconds.values())
    on_gpu = jax.default_backend() == "gpu"
    if not busy:
        return {"error": "the profile holds no kernels", "wall": wall}
    whole = max(wall, busy) if on_gpu else busy
    shares = {name: took / whole for name, took in seconds.items()} | ({"idle": 1 - busy / whole} if on_gpu else {})
    top = {name[:80]: took for name, took in names.most_common(15)}
    return {"shares": shares, "wall": wall, "busy": busy, "without_scope": unknown / busy, "kernels": top}


def median_seconds(run: Callable, *inputs: Any, repeats: int = 5) -> float:
    """Median seconds of a compiled function."""
    import jax

    jax.block_until_ready(run(*inputs))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]


def ablation(program: Any, state: Any, batch: Any) -> dict[str, float]:
    """Seconds of parts run separately; they share nothing, so they need not add up."""
    import jax
    import jax.numpy as jnp

    from jaxtrain.kernels.cross_entropy import cross_entropy
    from jaxtrain.optim.optimizers import clip_by_global_norm, make_optimizer
    from jaxtrain.optim.schedules import make_schedule
    from jaxtrain.precision.policy import POLICIES

    model_def, config = program.model_def, program.config
    key, params = jax.random.key(0), state["params"]

    def loss(params: Any, batch: Any) -> Any:
        total, weight = model_def.bind(params).loss(batch, key)["cross_entropy"]
        return total / weight

    def head_loss(x: Any, head: Any, batch: Any) -> Any:
        total, weight = cross_entropy(x, head, batch["targets"], batch["weights"])["cross_entropy"]
        return total / weight

    rate = make_schedule(config.optimizer.lr, config.schedule, config.steps)
    tx = make_optimizer(config.optimizer, rate, model_def.names, model_def.params)

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        return tx.update(clip_by_global_norm(grads, config.optimizer.grad_clip_norm)[0], opt_state, params)

    forward = jax.jit(loss)
    both = jax.jit(jax.grad(loss))
    head = params["embed"]["table"].T if config.model.tie_embeddings else params["head"]
    x = jnp.ones((*batch["tokens"].shape, config.model.embed), POLICIES[config.precision].compute)
    grads = jax.tree.map(jnp.ones_like, params)
    return {
        "forward": median_seconds(forward, params, batch),
        "forward_backward": median_seconds(both, params, batch),
        "loss": median_seconds(jax.jit(jax.grad(head_loss, argnums=(0, 1))), x, head, batch),
        "optimizer": median_seconds(jax.jit(update), grads, state["opt_state"], params),
    }
