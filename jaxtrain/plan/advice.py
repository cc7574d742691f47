"""What limits a planned step, and which changes would help most, each estimated from the plan alone. No JAX."""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod

from jaxtrain.config.schema import Config, Model
from jaxtrain.observe.flops import attended, layer_matmuls, recomputed
from jaxtrain.pipeline.cost import price
from jaxtrain.plan import bubble, chips, targets
from jaxtrain.plan.result import Advice, Plan, Traffic

COUNT = 2
LEAST = 0.01  # gains below are not worth a line
HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
WIDTHS = {"fp32": 4}  # bytes of an activation, else 2


def limit(plan: Plan) -> str:
    """What takes most of the step, in a sentence."""
    if plan.fits is False:
        return f"does not fit: {plan.reason}"
    if plan.step_seconds is None or plan.compute_seconds is None:
        return "no step time is known"
    kinds = plan.seconds_by.get("kind", {})
    memory = sum(seconds for kind, seconds in kinds.items() if kind not in ("matmul", "attention", "copy"))
    shares = {
        "matrix multiplications": kinds.get("matmul", 0.0),
        "attention kernels": kinds.get("attention", 0.0),
        "reading and writing memory in elementwise operations": memory,
        "waiting for communication": plan.exposed_seconds or 0.0,
        "the pipeline bubble": plan.bubble_seconds,
    }
    name = max(shares, key=lambda key: shares[key])
    text = f"{name}: {shares[name] / plan.step_seconds:.0%} of the step"
    if name == "waiting for communication" and (worst := _slowest(plan)):
        text += f", most of it {worst.op} over {worst.axes} ({worst.network})"
    return text


def changes(config: Config, plan: Plan) -> list[Advice]:
    """The changes that would help most, at most two."""
    if plan.fits is False:
        return list(_smaller(config, plan))[:COUNT]
    if not plan.step_seconds:
        return []
    found = [
        one
        for rule in (_less_remat, _hide, _more_rows, _nearer_axis, _more_microbatches)
        for one in rule(config, plan)
        if one.gain >= LEAST
    ]
    return sorted(found, key=lambda one: -one.gain)[:COUNT]


def _gain(plan: Plan, saved: float) -> float:
    """Rise of tokens/s where a step takes so many seconds less."""
    assert plan.step_seconds is not None
    return saved / max(plan.step_seconds - saved, 1e-9)


def _slowest(plan: Plan) -> Traffic | None:
    return max(plan.traffic, key=lambda row: row.exposed, default=None)


def _left(plan: Plan) -> int:
    """Bytes that are left on a device."""
    return (plan.usable or 0) - plan.needs


def activation_bytes(config: Config, plan: Plan, remat: str) -> float:
    """Bytes of the activations that all layers of a device keep for a microbatch, about.

    The inputs of every matrix multiplication and of what lies between under `none`; their results under `dots`; the
    residual stream alone under `full`.
    """
    model = config.model
    width = WIDTHS.get(config.precision, 2)
    split = prod(plan.sizes[axis] for axis in ("data", "fsdp", "expert", "context"))
    tokens = config.data.global_batch / config.step.accumulate * config.data.sequence / split
    head = model.head_dim or model.embed // model.heads
    heads = (model.heads + 2 * (model.kv_heads or model.heads)) * head
    inner = (2 if model.activation == "gelu" else 3) * _mlp(model)
    stream = {"full": 1, "dots": 2, "none": 6}[remat] * model.embed
    wide = {"full": 0, "dots": heads + inner, "none": 2 * heads + model.heads * head + 1.5 * inner}[remat]
    layers = model.layers / plan.sizes["pipeline"]
    return tokens * layers * width * (stream + wide) / plan.sizes["model"]


def _mlp(model: Model) -> float:
    """Feed-forward width that a token meets."""
    moe = model.moe
    return model.mlp if moe is None else (moe.shared + moe.top_k * (moe.capacity or 1.0)) * (moe.mlp or model.mlp)


def _less_remat(config: Config, plan: Plan) -> Iterator[Advice]:
    """Keep more activations where memory is left."""
    now = config.step.remat
    again = plan.seconds_by.get("phase", {}).get("remat", 0.0)
    if config.model.type != "decoder" or now in ("none", "dots") or not again or plan.usable is None:
        return
    before = activation_bytes(config, plan, "full")
    terms = layer_matmuls(config.model, attended(config.data.sequence, config.model.window))
    all_again = sum(terms[name] for name in recomputed(config.model, now)) or 1.0
    for remat in ("none", "dots"):
        more = activation_bytes(config, plan, remat) - before
        if 0 < more < 0.95 * _left(plan):
            share = sum(terms[name] for name in recomputed(config.model, remat)) / all_again
            gain = _gain(plan, again * (1 - share))
            why = f"{_left(plan) / 1e9:.0f} GB are left, and activations computed again are {more / 1e9:.0f} GB"
            yield Advice(f"step.remat={remat}", gain, why)
            return


def _hide(config: Config, plan: Plan) -> Iterator[Advice]:
    """CUDA: let XLA move collectives ahead of what needs them."""
    if targets.parse(plan.target).kind not in chips.GPUS or HIDING in os.environ.get("XLA_FLAGS", ""):
        return
    # Weights and gradients can wait or go ahead; what tensor parallelism sends is needed at once.
    rows = [row for row in plan.traffic if set(row.axes.split("+")) <= {"data", "fsdp", "expert", "replica"}]
    exposed, hidden = (sum(getattr(row, key) or 0.0 for row in rows) for key in ("exposed", "hidden"))
    saved = max(0.0, min(exposed, 0.8 * (plan.compute_seconds or 0.0) - hidden))
    why = f"{exposed:.3g} s a step of sending weights and gradients are exposed, {saved:.3g} s could be hidden"
    yield Advice(f"XLA_FLAGS={HIDING}", _gain(plan, saved), why)


def _more_rows(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the sequences in a microbatch send the same weights for twice the tokens."""
    if plan.usable is None:
        return
    ops, over = ("all-gather", "reduce-scatter", "all-reduce"), {"data", "fsdp", "expert"}
    rows = (row for row in plan.traffic if row.op in ops and set(row.axes.split("+")) <= over)
    weights = sum(row.exposed for row in rows)
    room = plan.memory.get("activations", 0)
    if room < 0.95 * _left(plan):
        key = "data.global_batch" if config.step.accumulate == 1 else "step.accumulate"
        new = 2 * config.data.global_batch if config.step.accumulate == 1 else config.step.accumulate // 2
        why = f"weights and gradients are sent for more tokens at a time: {weights:.3g} s of them are exposed"
        yield Advice(f"{key}={new}", _gain(plan, weights / 2), why)


def _nearer_axis(config: Config, plan: Plan) -> Iterator[Advice]:
    """The axis that sends most belongs inside of a node."""
    chip = targets.parse(plan.target).chip
    if chip is None or not isinstance(chip.inside, chips.Switch) or chip.outside is None:
        return
    for axis in ("model", "context", "expert"):
        exposed = sum(row.exposed for row in plan.traffic if row.axes == axis)
        if plan.crosses.get(axis) and exposed:
            size = chip.inside.domain(targets.parse(plan.target).shape[1])
            ratio = float(chip.outside.bandwidth) / float(chip.inside.bandwidth)
            saved = exposed * (1 - ratio)
            why = f"{axis} {plan.sizes[axis]} leaves the node, and {exposed:.3g} s of its communication are exposed"
            yield Advice(f"mesh.{axis}={min(size, plan.sizes[axis] // 2)}", _gain(plan, saved), why)


def _more_microbatches(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the microbatches halve the bubble's share."""
    stages = plan.sizes["pipeline"]
    schedule = bubble.table(config, stages)
    if schedule is None or not plan.step_seconds or config.pipeline.schedule.endswith((".csv", ".yaml", ".yml")):
        return
    step = config.step.model_copy(update={"accumulate": 2 * config.step.accumulate})
    longer = bubble.table(config.model_copy(update={"step": step}), stages)
    assert longer is not None
    before, after = (price(one).lockstep_bubble for one in (schedule, longer))
    saved = plan.bubble_seconds * (1 - after / (1 - after) * (1 - before) / before) if before else 0.0
    why = f"the bubble falls from {before:.0%} to {after:.0%} where F, B and W cost the same"
    yield Advice(f"step.accumulate={2 * config.step.accumulate}", _gain(plan, max(0.0, saved)), why)


def _smaller(config: Config, plan: Plan) -> Iterator[Advice]:
    """What makes a step fit."""
    if config.step.remat != "full":
        yield Advice("step.remat=full", 0.0, "activations are computed again instead of kept")
    rows = config.data.global_batch // config.step.accumulate
    split = prod(plan.sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))
    if rows >= 2 * split:
        yield Advice(f"step.accumulate={2 * config.step.accumulate}", 0.0, "a microbatch has half the sequences")
    if plan.sizes.get("data", 1) > 1 and config.zero < 3:
        yield Advice("zero=3", 0.0, f"the train state is split over data {plan.sizes['data']}")
    elif plan.sizes.get("model", 1) == 1:
        yield Advice("layout=fsdp_tp mesh.model=8", 0.0, "weights and activations of a layer are split too")
