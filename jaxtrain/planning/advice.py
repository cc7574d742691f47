"""Advice on a plan: its bottleneck and the changes that would help most, estimated from the plan alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import inf

from jaxtrain.config.schema import Config
from jaxtrain.config.show import as_dict
from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import ConfigError, Problem
from jaxtrain.models.flops import layer_matmuls, mean_attended, recomputed
from jaxtrain.models.spec import is_decoder
from jaxtrain.pipeline.schedules.cost import schedule_cost
from jaxtrain.planning.choices import LayoutChoice
from jaxtrain.planning.cost.communication import DeviceSizes
from jaxtrain.planning.cost.estimate import ScheduleEffect, saved_activation_bytes
from jaxtrain.planning.cost.exchange_price import ROUNDS, SMALL_WAIT, choose, price, rounds_keys
from jaxtrain.planning.cost.parameters import stored_bytes
from jaxtrain.planning.cost.pipeline_bubble import schedule_table
from jaxtrain.planning.cost.transfers import EXCHANGE
from jaxtrain.planning.hardware import calibration, chips, targets
from jaxtrain.planning.report import values
from jaxtrain.planning.report.values import format_bytes
from jaxtrain.planning.result import Advice, Plan, PricedStrategy
from jaxtrain.sharding.rules import DATA_AXIS, PIPELINE_AXIS, REPLICA_AXIS

MAX_ADVICE = 2
MIN_GAIN = 0.01  # smaller gains are left out
LATENCY_HIDING = "--xla_gpu_enable_latency_hiding_scheduler=true"
# Lets a TPU compute during all-gathers and all-reduces; OVERLAPPED is the fraction of their time that then overlapped
# (v5p:4x4x4: 0.69 of all-reduces, v6e:8x8: 0.52, and 0.87 of all-gathers). With
# --xla_tpu_overlap_compute_collective_tc in addition, Ulysses and splash attention were wrong on v6e (jax issue 38741).
ASYNC_COLLECTIVES = " ".join(
    f"--xla_enable_async_{op}=true --xla_tpu_enable_async_collective_fusion_fuse_{op}=true"
    for op in ("all_gather", "all_reduce")
)
OVERLAPPED = {"all-gather": 0.8, "all-reduce": 0.5}
MAX_TENSOR_PARALLEL = 8  # on a target without nodes


def with_advice(config: Config, plan: Plan) -> Plan:
    """Adds the bottleneck and the advice to a plan."""
    return replace(plan, bottleneck=bottleneck(plan), advice=tuple(suggest(config, plan)))


def bottleneck(plan: Plan) -> str:
    """Names the largest part of the step time, in a sentence."""
    if not plan.can_run:
        return f"{'does not fit' if plan.compiled else 'not compiled'}: {plan.reason}"
    if plan.step_seconds is None or plan.compute_seconds is None:
        return "the step time is unknown"
    kinds = plan.seconds_by.get("kind", {})
    memory = sum(seconds for kind, seconds in kinds.items() if kind not in ("matmul", "attention", "copy", "pages"))
    shares = {
        "matrix multiplications": kinds.get("matmul", 0.0),
        "attention kernels": kinds.get("attention", 0.0),
        "reading and writing memory in elementwise operations": memory,
        "allocation of memory by the system": kinds.get("pages", 0.0),
        "waiting for communication": plan.exposed_seconds or 0.0,
        "the pipeline bubble": plan.bubble_seconds,
    }
    name = max(shares, key=lambda key: shares[key])
    text = f"{name}: {shares[name] / plan.step_seconds:.0%} of the step"
    if name == "waiting for communication" and (row := max(plan.traffic, key=lambda row: row.exposed, default=None)):
        text += f", most of it {row.op} over {row.axes} ({row.network})"
    return text


def suggest(config: Config, plan: Plan) -> list[Advice]:
    """Returns the changes that would help most, at most two; the config stays legal with each."""
    if plan.fits is False:
        return [one for one in _to_fit(config, plan) if is_legal(config, plan, one.change)][:MAX_ADVICE]
    if not plan.step_seconds:
        return []
    rules = (_less_remat, _more_rows, _smaller_axis, _more_microbatches, _rarer_exchanges)
    advice = [one for rule in rules for one in rule(config, plan) if one.gain >= MIN_GAIN]
    advice = [one for one in advice if is_legal(config, plan, one.change)]
    advice += [one for rule in (_latency_hiding, _async_collectives) for one in rule(plan) if one.gain >= MIN_GAIN]
    return sorted(advice, key=lambda one: -one.gain)[:MAX_ADVICE]


def is_legal(config: Config, plan: Plan, change: str) -> bool:
    """Returns whether a run could start on the plan's devices with these `key=value` words added."""

    def check(changed: Config) -> list[Problem]:
        return check_layout(changed, plan.devices)

    try:
        base = {**as_dict(config), "resolved": True, "simulate": None}
        resolve(None, *change.split(), base=base, paths=False, checks=[check])
    except ConfigError:
        return False
    return True


def _first_legal(config: Config, plan: Plan, changes: Iterable[str]) -> str | None:
    return next((change for change in changes if is_legal(config, plan, change)), None)


def _gain(plan: Plan, saved: float) -> float:
    """Relative rise of tokens/s if a step takes `saved` seconds less."""
    assert plan.step_seconds is not None
    return saved / max(plan.step_seconds - saved, 1e-9)


def _free_bytes(plan: Plan) -> int:
    return (plan.usable or 0) - plan.needs


def _exposed_seconds(plan: Plan, axes: set[str], ops: tuple[str, ...] = ()) -> float:
    """Seconds of exposed collectives over these axes alone; `ops`: only these operations."""
    rows = (row for row in plan.traffic if set(row.axes.split("+")) <= axes and (not ops or row.op in ops))
    return sum(row.exposed for row in rows)


def _less_remat(config: Config, plan: Plan) -> Iterator[Advice]:
    """Keep more activations in free memory."""
    policy = config.step.remat_policy
    seconds = plan.seconds_by.get("phase", {}).get("remat", 0.0)
    if not is_decoder(config.model) or policy in ("none", "dots") or not seconds or plan.usable is None:
        return
    choice = LayoutChoice.from_config(config, plan.sizes)
    sizes = DeviceSizes.of(config.model, config.data, config.precision, choice)
    table = schedule_table(config.pipeline, plan.sizes[PIPELINE_AXIS], config.step.microbatches)
    schedule = ScheduleEffect.from_table(table)
    flops = layer_matmuls(config.model, mean_attended(config.model, config.data.sequence))

    def kept(remat: str | tuple[str, ...]) -> float:
        return (schedule.kept + schedule.running) * saved_activation_bytes(
            config.model, replace(choice, remat=remat), sizes
        )

    def recomputed_flops(remat: str | tuple[str, ...]) -> float:
        return sum(flops[name] for name in recomputed(config.model, remat))

    for remat in ("none", "dots"):
        more = kept(remat) - kept(policy)
        if 0 < more < 0.95 * _free_bytes(plan):
            share = recomputed_flops(remat) / (recomputed_flops(policy) or 1.0)
            why = f"{format_bytes(_free_bytes(plan))} are free; recomputed activations are {format_bytes(more)}"
            yield Advice(f"step.remat={remat}", _gain(plan, seconds * (1 - share)), why)
            return


def _latency_hiding(plan: Plan) -> Iterator[Advice]:
    """CUDA: let XLA schedule collectives earlier."""
    if targets.parse(plan.target).kind not in chips.GPUS or LATENCY_HIDING in os.environ.get("XLA_FLAGS", ""):
        return
    # Weights and gradients can be sent earlier or later; activations of tensor parallelism are needed at once.
    axes = {"data", "fsdp", "expert", "replica"}
    rows = [row for row in plan.traffic if row.op != EXCHANGE and set(row.axes.split("+")) <= axes]
    exposed, hidden = sum(row.exposed for row in rows), sum(row.hidden or 0.0 for row in rows)
    saved = max(0.0, min(exposed, 0.8 * (plan.compute_seconds or 0.0) - hidden))
    why = f"{exposed:.3g} s a step of sending weights and gradients are exposed, {saved:.3g} s could be hidden"
    yield Advice(f"XLA_FLAGS={LATENCY_HIDING}", _gain(plan, saved), why)


def _async_collectives(plan: Plan) -> Iterator[Advice]:
    """TPU: let XLA overlap collectives with fusions that compute."""
    is_set = ASYNC_COLLECTIVES in os.environ.get("LIBTPU_INIT_ARGS", "")
    if targets.parse(plan.target).kind not in chips.TPUS or is_set:
        return
    exposed = {op: sum(row.exposed for row in plan.traffic if row.op == op) for op in OVERLAPPED}
    saved = sum(OVERLAPPED[op] * seconds for op, seconds in exposed.items())
    why = f"{sum(exposed.values()):.3g} s a step of gathers and reductions are exposed, {saved:.3g} s could be hidden"
    yield Advice(f'LIBTPU_INIT_ARGS="{ASYNC_COLLECTIVES}"', _gain(plan, saved), why)


def _more_rows(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the sequences in a microbatch, for the same traffic of weights."""
    count = config.step.microbatches
    if plan.usable is None or plan.sizes[PIPELINE_AXIS] > 1 or (count > 1 and count % 2):  # the bubble would grow
        return
    exposed = _exposed_seconds(plan, {"data", "fsdp", "expert"}, ("all-gather", "reduce-scatter", "all-reduce"))
    if plan.memory.get("activations", 0) + plan.memory.get("workspace", 0) < 0.95 * _free_bytes(plan):
        batch = f"data.global_batch={2 * config.data.global_batch}"
        change = batch if count == 1 else f"step.microbatches={count // 2}"
        why = f"weights and gradients are sent for more tokens at a time: {exposed:.3g} s of them are exposed"
        yield Advice(change, _gain(plan, exposed / 2), why)


def _smaller_axis(config: Config, plan: Plan) -> Iterator[Advice]:
    """Keep an axis with much traffic inside a node."""
    chip = targets.parse(plan.target).chip
    if chip is None or not isinstance(chip.inside, chips.Switch) or chip.outside is None:
        return
    for axis in ("model", "context", "expert"):
        exposed = sum(row.exposed for row in plan.traffic if row.axes == axis)
        if plan.crosses.get(axis) and exposed:
            size = min(_node_devices(plan), plan.sizes[axis] // 2)
            others = (f" mesh.{other}={plan.sizes[other] * plan.sizes[axis] // size}" for other in ("fsdp", DATA_AXIS))
            change = _first_legal(config, plan, (f"mesh.{axis}={size}{other}" for other in ("", *others)))
            ratio = float(chip.outside.bandwidth) / float(chip.inside.bandwidth)
            why = f"{axis} {plan.sizes[axis]} leaves the node, and {exposed:.3g} s of its communication are exposed"
            if change:
                yield Advice(change, _gain(plan, exposed * (1 - ratio)), why)


def _rarer_exchanges(config: Config, plan: Plan) -> Iterator[Advice]:
    """Let replicas that wait long for one another agree less often."""
    sync, waits = config.sync, _replica_wait(config, plan)
    if not plan.step_seconds or waits < SMALL_WAIT * plan.step_seconds:
        return
    choices = _looser_strategies(config, plan, waits)
    keys = choose(choices)[0] if choices else ""
    own = f"{sync.strategy}, every {sync.every}" if sync.is_loose else sync.strategy
    for one in choices:
        if one.keys == keys and one.wait_seconds is not None:
            why = f"{waits:.3g} s of a step wait for other replicas, then {one.wait_seconds:.3g} s; they agree less"
            yield Advice(keys, _gain(plan, waits - one.wait_seconds), f"{why} often, so the loss is not that of {own}")


def _replica_wait(config: Config, plan: Plan) -> float:
    """Seconds of a step that wait for other replicas: for exchanges, or of bsp for what each step sends.

    A collective over the axis and others would still take the time of the others.
    """
    seconds = 0.0
    for row in plan.traffic:
        axes = row.axes.split("+")
        if REPLICA_AXIS in axes and config.sync.is_loose == (row.op == EXCHANGE):
            others = [axis for axis in axes if axis != REPLICA_AXIS]
            seconds += max(0.0, row.exposed - _inner_seconds(plan, others, row.bytes)) if others else row.exposed
    return seconds


def _inner_seconds(plan: Plan, axes: list[str], size: int) -> float:
    """Seconds in which a device sends bytes along axes, on the slower network that they use; inf if unknown."""
    chip = values.chip_of(plan)
    if chip is None or chip.outside is None or not isinstance(chip.inside, chips.Switch | chips.Torus):
        return inf
    shares = calibration.calibration_of(chips.chip_kind(chip))
    if any(plan.crosses.get(axis) for axis in axes):
        return size / (float(chip.outside.bandwidth) * shares.outside)
    inside = chip.inside.bandwidth if isinstance(chip.inside, chips.Switch) else chip.inside.link
    return size / (float(inside) * shares.inside)


def _looser_strategies(config: Config, plan: Plan, waits: float) -> list[PricedStrategy]:
    """Prices strategies whose replicas exchange less often and that fit in the memory, the least loose one first."""
    sync, replicas = config.sync, plan.sizes[REPLICA_AXIS]
    if sync.is_builtin and "every" not in sync.unread():
        strategy, every, prefix = sync.strategy, sync.every, ""
        sent = every * plan.devices // replicas * sum(row.bytes for row in plan.traffic if row.op == EXCHANGE)
        rate = sent / (every * waits)  # at which an exchange is as long as replicas wait for it
    elif sync.strategy == "bsp" and plan.tree_bytes:
        copies = 4 // stored_bytes(config.precision)  # of the parameters in float32: diloco keeps two
        if plan.usable is not None and 2 * copies * plan.memory.get("params", 0) > 0.95 * _free_bytes(plan):
            return []
        strategy, every, prefix, rate = "diloco", 1, "sync.strategy=diloco ", plan.replica_rate
        size = copies * plan.tree_bytes["params"] + plan.tree_bytes["mutable"]
        sent = round(2 * size * (replicas - 1) / replicas)  # around a ring
    else:
        return []
    seconds, tokens = (plan.step_seconds or 0.0) - waits, plan.tokens // replicas
    return [
        price(
            strategy, prefix + rounds_keys(strategy, rounds, config.steps), sent, 0, rounds, replicas, replicas,
            rate=rate, seconds=seconds, tokens=tokens,
        )
        for rounds in ROUNDS if rounds > every
    ]  # fmt: skip


def _node_devices(plan: Plan) -> int:
    target = targets.parse(plan.target)
    inside = target.chip.inside if target.chip else None
    is_switch = isinstance(inside, chips.Switch)
    return min(plan.devices, inside.domain_size(target.shape[1]) if is_switch else MAX_TENSOR_PARALLEL)


def _more_microbatches(config: Config, plan: Plan) -> Iterator[Advice]:
    """Twice the microbatches, for about half the bubble."""
    count = config.step.microbatches
    change = f"step.microbatches={2 * count}"
    if plan.sizes[PIPELINE_AXIS] == 1 or not is_legal(config, plan, change):
        return
    tables = (schedule_table(config.pipeline, plan.sizes[PIPELINE_AXIS], n) for n in (count, 2 * count))
    before, after = (schedule_cost(table).lockstep_bubble for table in tables if table)
    saved = plan.bubble_seconds * (1 - after / (1 - after) * (1 - before) / before) if before else 0.0
    why = f"the bubble falls from {before:.0%} to {after:.0%} if F, B and W cost the same"
    yield Advice(change, _gain(plan, max(0.0, saved)), why)


def _to_fit(config: Config, plan: Plan) -> Iterator[Advice]:
    """Changes that reduce the memory of a step."""
    if config.step.remat != "full":
        yield Advice("step.remat=full", 0.0, "activations are recomputed instead of kept")
    yield Advice(f"step.microbatches={2 * config.step.microbatches}", 0.0, "a microbatch has half the sequences")
    replicas = plan.sizes.get(DATA_AXIS, 1)
    if replicas > 1 and config.zero < 3:
        yield Advice("zero=3", 0.0, f"the train state is sharded over {DATA_AXIS} {replicas}")
    if is_decoder(config.model) and _can_offload(plan) and "input" not in config.step.remat_save:
        yield Advice("step.remat_save.input=host", 0.0, "kept activations are offloaded to the host's memory")
    if is_decoder(config.model) and plan.sizes.get("model", 1) == 1:
        sizes = [size for size in range(_node_devices(plan), 1, -1) if plan.devices % size == 0]
        if change := _first_legal(config, plan, (_tensor_parallel(plan, size) for size in sizes)):
            yield Advice(change, 0.0, "weights and activations of a layer are sharded too")


def _can_offload(plan: Plan) -> bool:
    """Returns whether activations can be offloaded; pipeline stages keep theirs in buffers."""
    chip = targets.parse(plan.target).chip
    return chip is not None and chip.host is not None and plan.sizes.get(PIPELINE_AXIS, 1) == 1


def _tensor_parallel(plan: Plan, size: int) -> str:
    """Words that select tensor parallelism, with a size for every axis of the mesh that changes."""
    wanted = dict.fromkeys(plan.sizes, 1) | {"fsdp": plan.devices // size, "model": size}
    sizes = (f"mesh.{axis}={one}" for axis, one in wanted.items() if one != plan.sizes[axis])
    return " ".join(["layout=fsdp_tp", *sizes])
