"""Advice on a plan: what limits the step, and which changes would help most, estimated from the plan alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace

from jaxtrain.config.schema import Config
from jaxtrain.config.show import as_dict
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import ConfigError, Problem
from jaxtrain.models.flops import layer_matmuls, mean_attended, recomputed
from jaxtrain.models.layout_check import check_config
from jaxtrain.models.spec import is_decoder
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.pipeline.schedules.cost import price
from jaxtrain.planning.choices import Choice
from jaxtrain.planning.cost import pipeline_bubble
from jaxtrain.planning.cost.communication import LayoutSizes
from jaxtrain.planning.cost.estimate import Order, kept_bytes
from jaxtrain.planning.hardware import chips, targets
from jaxtrain.planning.report.values import volume
from jaxtrain.planning.result import Advice, Plan, Traffic
from jaxtrain.sharding.rules import DATA_AXIS, PIPELINE_AXIS

COUNT = 2
LEAST = 0.01  # gains below are not worth a line
HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
# Lets a TPU compute during all-gathers and all-reduces, and what part of these hid then (v5p:4x4x4: 0.69 of
# all-reduces, v6e:8x8: 0.52, and 0.87 of all-gathers). With --xla_tpu_overlap_compute_collective_tc besides,
# Ulysses and splash attention went wrong on v6e (jax-ml/jax issue 38741).
CARRYING = " ".join(
    f"--xla_enable_async_{op}=true --xla_tpu_enable_async_collective_fusion_fuse_{op}=true"
    for op in ("all_gather", "all_reduce")
)
CARRIED = {"all-gather": 0.8, "all-reduce": 0.5}
SPLITS = 8  # of tensor parallelism at most, where a target has no nodes


def limit(plan: Plan) -> str:
    """Names what takes most of the step, in a sentence."""
    if not plan.can_run:
        return f"{'does not fit' if plan.compiled else 'not compiled'}: {plan.reason}"
    if plan.step_seconds is None or plan.compute_seconds is None:
        return "no step time is known"
    kinds = plan.seconds_by.get("kind", {})
    memory = sum(seconds for kind, seconds in kinds.items() if kind not in ("matmul", "attention", "copy", "pages"))
    shares = {
        "matrix multiplications": kinds.get("matmul", 0.0),
        "attention kernels": kinds.get("attention", 0.0),
        "reading and writing memory in elementwise operations": memory,
        "memory that the system hands out": kinds.get("pages", 0.0),
        "waiting for communication": plan.exposed_seconds or 0.0,
        "the pipeline bubble": plan.bubble_seconds,
    }
    name = max(shares, key=lambda key: shares[key])
    text = f"{name}: {shares[name] / plan.step_seconds:.0%} of the step"
    if name == "waiting for communication" and (worst := _slowest(plan)):
        text += f", most of it {worst.op} over {worst.axes} ({worst.network})"
    return text


def changes(config: Config, plan: Plan) -> list[Advice]:
    """The changes that would help most, at most two, each with which the config is legal on these devices."""
    if plan.fits is False:
        return [one for one in _smaller(config, plan) if is_legal(config, plan, one.change)][:COUNT]
    if not plan.step_seconds:
        return []
    rules = (_less_remat, _more_rows, _nearer_axis, _more_microbatches)
    found = [one for rule in rules for one in rule(config, plan)]
    found = [one for one in found if one.gain >= LEAST and is_legal(config, plan, one.change)]
    found += [one for rule in (_hide, _carry) for one in rule(plan) if one.gain >= LEAST]
    return sorted(found, key=lambda one: -one.gain)[:COUNT]


def is_legal(config: Config, plan: Plan, change: str) -> bool:
    """Returns whether a run could start with these `key=value` words after its own on the plan's devices."""

    def check(changed: Config) -> list[Problem]:
        return check_config(changed, plan.devices) + check_pipeline(changed, plan.devices)

    try:
        base = {**as_dict(config), "resolved": True, "simulate": None}
        resolve(None, *change.split(), base=base, paths=False, checks=[check])
    except ConfigError:
        return False
    return True


def _first(config: Config, plan: Plan, options: Iterable[str]) -> str | None:
    """The first that is legal."""
    return next((one for one in options if is_legal(config, plan, one)), None)


def _gain(plan: Plan, saved: float) -> float:
    """Rise of tokens/s where a step takes so many seconds less."""
    assert plan.step_seconds is not None
    return saved / max(plan.step_seconds - saved, 1e-9)


def _slowest(plan: Plan) -> Traffic | None:
    return max(plan.traffic, key=lambda row: row.exposed, default=None)


def _left(plan: Plan) -> int:
    """Bytes that are left on a device."""
    return (plan.usable or 0) - plan.needs


def _less_remat(config: Config, plan: Plan) -> Iterator[Advice]:
    """Keep more activations where memory is left."""
    now = config.step.remat_policy
    again = plan.seconds_by.get("phase", {}).get("remat", 0.0)
    if not is_decoder(config.model) or now in ("none", "dots") or not again or plan.usable is None:
        return
    choice = Choice.of(config, plan.sizes)
    order = Order.of(pipeline_bubble.table(config, plan.sizes[PIPELINE_AXIS]))
    terms = layer_matmuls(config.model, mean_attended(config.model, config.data.sequence))
    all_again = sum(terms[name] for name in recomputed(config.model, now)) or 1.0

    def kept(remat: str | tuple[str, ...]) -> float:
        one = kept_bytes(config.model, replace(choice, remat=remat), LayoutSizes.of(config, choice))
        return (order.kept + order.held) * one

    for remat in ("none", "dots"):
        more = kept(remat) - kept(now)
        if 0 < more < 0.95 * _left(plan):
            share = sum(terms[name] for name in recomputed(config.model, remat)) / all_again
            gain = _gain(plan, again * (1 - share))
            why = f"{volume(_left(plan))} are left, and activations computed again are {volume(more)}"
            yield Advice(f"step.remat={remat}", gain, why)
            return


def _hide(plan: Plan) -> Iterator[Advice]:
    """CUDA: let XLA move collectives ahead of what needs them."""
    if targets.parse(plan.target).kind not in chips.GPUS or HIDING in os.environ.get("XLA_FLAGS", ""):
        return
    # Weights and gradients can wait or go ahead; what tensor parallelism sends is needed at once.
    rows = [row for row in plan.traffic if set(row.axes.split("+")) <= {"data", "fsdp", "expert", "replica"}]
    exposed, hidden = (sum(getattr(row, key) or 0.0 for row in rows) for key in ("exposed", "hidden"))
    saved = max(0.0, min(exposed, 0.8 * (plan.compute_seconds or 0.0) - hidden))
    why = f"{exposed:.3g} s a step of sending weights and gradients are exposed, {saved:.3g} s could be hidden"
    yield Advice(f"XLA_FLAGS={HIDING}", _gain(plan, saved), why)


def _carry(plan: Plan) -> Iterator[Advice]:
    """TPU: let XLA carry collectives through the fusions that compute meanwhile."""
    if targets.parse(plan.target).kind not in chips.TPUS or CARRYING in os.environ.get("LIBTPU_INIT_ARGS", ""):
        return
    exposed = {op: sum(row.exposed for row in plan.traffic if row.op == op) for op in CARRIED}
    saved = sum(CARRIED[op] * seconds for op, seconds in exposed.items())
    why = f"{sum(exposed.values()):.3g} s a step of gathers and reductions are exposed, {saved:.3g} s could be hidden"
    yield Advice(f'LIBTPU_INIT_ARGS="{CARRYING}"', _gain(plan, saved), why)


def _more_rows(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the sequences in a microbatch send the same weights for twice the tokens."""
    parts = config.step.microbatches
    if plan.usable is None or plan.sizes[PIPELINE_AXIS] > 1 or (parts > 1 and parts % 2):  # stages would wait longer
        return
    ops, over = ("all-gather", "reduce-scatter", "all-reduce"), {"data", "fsdp", "expert"}
    rows = (row for row in plan.traffic if row.op in ops and set(row.axes.split("+")) <= over)
    weights = sum(row.exposed for row in rows)
    if plan.memory.get("activations", 0) + plan.memory.get("workspace", 0) < 0.95 * _left(plan):
        change = (
            f"data.global_batch={2 * config.data.global_batch}" if parts == 1 else f"step.microbatches={parts // 2}"
        )
        why = f"weights and gradients are sent for more tokens at a time: {weights:.3g} s of them are exposed"
        yield Advice(change, _gain(plan, weights / 2), why)


def _nearer_axis(config: Config, plan: Plan) -> Iterator[Advice]:
    """The axis that sends most belongs inside of a node."""
    chip = targets.parse(plan.target).chip
    if chip is None or not isinstance(chip.inside, chips.Switch) or chip.outside is None:
        return
    for axis in ("model", "context", "expert"):
        exposed = sum(row.exposed for row in plan.traffic if row.axes == axis)
        if plan.crosses.get(axis) and exposed:
            size = min(_node(plan), plan.sizes[axis] // 2)
            others = (f" mesh.{other}={plan.sizes[other] * plan.sizes[axis] // size}" for other in ("fsdp", DATA_AXIS))
            change = _first(config, plan, (f"mesh.{axis}={size}{other}" for other in ("", *others)))
            ratio = float(chip.outside.bandwidth) / float(chip.inside.bandwidth)
            why = f"{axis} {plan.sizes[axis]} leaves the node, and {exposed:.3g} s of its communication are exposed"
            if change:
                yield Advice(change, _gain(plan, exposed * (1 - ratio)), why)


def _node(plan: Plan) -> int:
    """Devices of a node."""
    target = targets.parse(plan.target)
    inside = target.chip.inside if target.chip else None
    return min(plan.devices, inside.domain(target.shape[1]) if isinstance(inside, chips.Switch) else SPLITS)


def _more_microbatches(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the microbatches halve the bubble's share."""
    stages = plan.sizes["pipeline"]
    schedule = pipeline_bubble.table(config, stages)
    change = f"step.microbatches={2 * config.step.microbatches}"
    if schedule is None or not is_legal(config, plan, change):
        return
    step = config.step.model_copy(update={"microbatches": 2 * config.step.microbatches})
    longer = pipeline_bubble.table(config.model_copy(update={"step": step}), stages)
    assert longer is not None
    before, after = (price(one).lockstep_bubble for one in (schedule, longer))
    saved = plan.bubble_seconds * (1 - after / (1 - after) * (1 - before) / before) if before else 0.0
    why = f"the bubble falls from {before:.0%} to {after:.0%} where F, B and W cost the same"
    yield Advice(change, _gain(plan, max(0.0, saved)), why)


def _smaller(config: Config, plan: Plan) -> Iterator[Advice]:
    """Suggests changes that make a step fit."""
    if config.step.remat != "full":
        yield Advice("step.remat=full", 0.0, "activations are computed again instead of kept")
    yield Advice(f"step.microbatches={2 * config.step.microbatches}", 0.0, "a microbatch has half the sequences")
    replicas = plan.sizes.get(DATA_AXIS, 1)
    if replicas > 1 and config.zero < 3:
        yield Advice("zero=3", 0.0, f"the train state is split over {DATA_AXIS} {replicas}")
    if is_decoder(config.model) and _has_host(plan) and "input" not in config.step.remat_save:
        yield Advice("step.remat_save.input=host", 0.0, "what a layer keeps waits in the host's memory")
    if is_decoder(config.model) and plan.sizes.get("model", 1) == 1:
        sizes = [size for size in range(_node(plan), 1, -1) if plan.devices % size == 0]
        if change := _first(config, plan, (_tensor_parallel(plan, size) for size in sizes)):
            yield Advice(change, 0.0, "weights and activations of a layer are split too")


def _has_host(plan: Plan) -> bool:
    """Returns whether activations can wait in a host's memory: the stages of a pipeline keep theirs by themselves."""
    chip = targets.parse(plan.target).chip
    return chip is not None and chip.host is not None and plan.sizes.get(PIPELINE_AXIS, 1) == 1


def _tensor_parallel(plan: Plan, size: int) -> str:
    """Every axis that is in use gets another size, for a config may name them all."""
    wanted = dict.fromkeys(plan.sizes, 1) | {"fsdp": plan.devices // size, "model": size}
    sizes = (f"mesh.{axis}={one}" for axis, one in wanted.items() if one != plan.sizes[axis])
    return " ".join(["layout=fsdp_tp", *sizes])
