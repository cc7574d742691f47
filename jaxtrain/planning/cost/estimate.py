"""Estimate of a layout choice's memory and time from the config and the chip, in a fraction of a millisecond.

It orders thousands of choices; the best are compiled (`planning.search`). Bytes of the train state are exact, traffic
is the textbook's (`cost.communication`); activations, memory traffic of elementwise operations and the overlap of
communication are fitted to compiled steps of Llama layers on H100 targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.models.flops import layer_matmuls, mean_attended
from jaxtrain.models.spec import is_decoder
from jaxtrain.pipeline.schedules.cost import Costs, action_costs, peak_activations, tick_times
from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.planning.choices import LayoutChoice, SearchSpace
from jaxtrain.planning.cost.communication import CollectivePrices, CollectiveRow, DeviceSizes, collective_rows
from jaxtrain.planning.cost.parameters import ParameterSharding, ParameterSizes, compute_bytes
from jaxtrain.planning.hardware import calibration, targets
from jaxtrain.planning.hardware.chips import Chip, Figure, Link, Switch
from jaxtrain.sharding.rules import PIPELINE_AXIS

# Passes of elementwise operations over memory, fitted to compiled steps (h100:1x8 and 8x8, layers of Llama 3 8B): over
# the residual stream, the mlp width, the heads' width, and what tensor parallelism gathers.
STREAM_PASSES, MLP_PASSES, HEAD_PASSES, GATHERED_PASSES = 29, 10, 8, 40
USED_BYTES, CAST_BYTES, COPY_BYTES = 10, 27, 15  # for a weight in use, one that is cast, one of a copy
LOGIT_BYTES = 17
UPDATE_BYTES = 12  # for a parameter, and each of its gradient, itself and its moments
ACCUMULATE_PASSES, REDUCE_PASSES = 4, 3  # over float32 gradients: for each of several microbatches, and once
SCORE_BYTES = 80  # for an attention score in plain XLA
# Workspace of cuDNN's backward kernel (`memory.attention_workspace`): bytes for an element of the queries and each
# document of a packed row, on Hopper and later (`kernels.attention.cudnn`).
DOCUMENT_BYTES, MIN_DOCUMENTS, TOKENS_PER_DOCUMENT, HOPPER = 4, 16, 512, 9
# Pipeline memory, fitted to steps of all schedules on h100:1x4 and 1x8: activations of a chunk that the running F and
# backward hold in addition to the slots; residual streams of a slot (input and gradient); activations that a split
# backward keeps from B to W, relative to those of a microbatch; bytes of a gradient before it is accumulated.
RUNNING_CHUNKS, SLOT_STREAMS, SPLIT_BACKWARD, GRADIENT_BYTES = 2, 2, 1.9, 5
ULYSSES_ATTENTION = 1.2  # of attention's time, if Ulysses exchanges heads
BACKWARD_RECOMPUTE = 0.5  # of attention's forward pass, which its backward kernel recomputes
LAUNCHES = 60  # operations for a layer and microbatch
# Fraction of a collective's time that overlaps with computation, by purpose. TPU: as in steps of v5e:16x16, v5p:4x4x4
# and v6e:8x8 (fsdp, fsdp_tp); kinds that these lack are assumed to be as on CUDA.
OVERLAP = {
    "cuda": {
        "weights": 0.7, "gradients": 0.45, "once": 0.2, "tensor": 0.12, "context": 0.45, "rows": 0.5, "pipeline": 0.3,
    },
    "tpu": {"weights": 0.5, "tensor": 0.35, "context": 0.45, "pipeline": 0.3},
}  # fmt: skip
MAX_OVERLAP = 0.5  # of the compute time
# XLA plans with 80% of a GPU's memory, and recomputes matmuls in steps that come near it.
TIGHT_MEMORY, TIGHT_RECOMPUTE = 0.78, 0.25
LANES, MIN_CHUNK = 128, 512  # chunks of the vocabulary, see `kernels.cross_entropy`

# Simulated devices share a CPU's memory: only the order of choices is meaningful.
_ASSUMED = "an assumption: only the order of choices is meaningful"
_CPU = Chip(
    "cpu", {"bf16": Figure(5e10, _ASSUMED), "fp32": Figure(5e10, _ASSUMED)}, Figure(0, _ASSUMED), Figure(0, _ASSUMED),
    Figure(5e9, _ASSUMED),
    Switch(4096, Figure(2e9, _ASSUMED), Figure(1e-5, _ASSUMED), Figure(2e-5, _ASSUMED), True, "memory"),
    Link("network", Figure(1e9, _ASSUMED), Figure(1e-4, _ASSUMED)),
)  # fmt: skip


@dataclass(frozen=True)
class PricedCollective:
    """A `CollectiveRow` with its time; `hidden` seconds overlap with computation."""

    purpose: str
    op: str
    axes: str
    network: str
    bytes: float
    seconds: float
    hidden: float

    @property
    def exposed(self) -> float:
        return self.seconds - self.hidden


@dataclass(frozen=True)
class Estimate:
    """Estimate for one device and one step, in bytes and seconds, roughly as in a `Plan`.

    Args:
        needs: bytes of memory; usable: bytes that a program may allocate, None if unknown.
        memory: bytes by kind, as in `Plan.memory`.
        parts: compute seconds by `matmul`, `recompute`, `attention`, `elementwise` and `launch`.
        exposed_seconds: of communication that does not overlap with computation.
        bubble_seconds: for which pipeline stages wait for one another.
        traffic: collectives of a step.
    """

    choice: LayoutChoice
    needs: float
    usable: float | None
    memory: Mapping[str, float]
    parts: Mapping[str, float]
    exposed_seconds: float
    bubble_seconds: float
    step_seconds: float
    traffic: tuple[PricedCollective, ...] = ()

    @property
    def devices(self) -> int:
        return self.choice.devices

    @property
    def compute_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def wire_bytes(self) -> float:
        return sum(row.bytes for row in self.traffic)

    def fits(self, slack: float = 1.0) -> bool:
        """Returns whether it needs at most `slack` times the usable memory."""
        return self.usable is None or self.needs <= slack * self.usable

    def as_dict(self) -> dict[str, Any]:
        """Converts the estimate for JSON."""
        return {
            "needs": round(self.needs), "memory": {kind: round(size) for kind, size in self.memory.items()},
            "parts": dict(self.parts), "compute_seconds": self.compute_seconds, "wire_bytes": round(self.wire_bytes),
            "exposed_seconds": self.exposed_seconds, "bubble_seconds": self.bubble_seconds,
            "step_seconds": self.step_seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class ScheduleEffect:
    """Effects of a pipeline schedule on memory and time: exact from its table, or lower bounds without.

    Args:
        ticks: of the table.
        kept: activations between F and W, in microbatches of a full stage.
        running: activations of the running actions, in the same unit.
        unreduced: stages whose gradients exist before they are accumulated.
        between: activations that a split backward keeps from B to W, in the same unit as `kept`.
        table: None for a lower bound, or without stages.
    """

    ticks: int = 0
    kept: float = 1.0
    running: float = 0.0
    unreduced: float = 0.0
    between: float = 0.0
    table: Table | None = None

    @classmethod
    def lower_bound(cls, choice: LayoutChoice) -> ScheduleEffect:
        """Bounds from the formulas in the docstrings of `pipeline.schedules.shipped`."""
        p, m = choice.size(PIPELINE_AXIS), choice.microbatches
        if p == 1:
            return cls()
        v = choice.virtual_stages or (SCHEDULES[choice.schedule].chunks or (2,))[0]
        kept = {
            "gpipe": m, "1f1b": p, "1f1b_aligned": 2 * p - 1, "interleaved_1f1b": p + (p - 1) / v, "zb_h1": p,
            "zb_v": p, "v_half": (p + 2) // 2,
        }  # fmt: skip
        unreduced = 1 / v if v > 1 or choice.schedule == "zb_h1" else 0.0
        return cls(2 * m * v + p - 1, min(m, kept.get(choice.schedule, 1)), RUNNING_CHUNKS / v, unreduced)

    @classmethod
    def from_table(cls, table: Table | None) -> ScheduleEffect:
        """Reads the effects from a table; None: one stage."""
        if table is None:
            return cls()
        change = (table.action == Action.B) * 1 - (table.action == Action.W)
        v, between = table.chunks, float(np.cumsum(change, axis=0).max()) / table.chunks
        unreduced = 1 / v if v > 1 or between else 0.0
        return cls(table.ticks, float(peak_activations(table).max()), RUNNING_CHUNKS / v, unreduced, between, table)

    def bubble_seconds(self, choice: LayoutChoice, costs: Costs) -> float:
        """Seconds for which a stage waits, in lockstep."""
        if self.table is not None:
            work = action_costs(self.table, costs)[self.table.action[:, 0]].sum()
            return float(tick_times(self.table, costs).sum() - work)
        p = choice.size(PIPELINE_AXIS)
        v = choice.virtual_stages or (2 if choice.schedule == "interleaved_1f1b" else 1)
        waits = {"zb_h1": max(costs.forward + costs.backward - costs.weight, 0.0), "zb_v": 0.0, "v_half": 0.0}
        return (p - 1) * waits.get(choice.schedule, sum(costs) / v)


def active_mlp_width(model: ModelConfig) -> int:
    """Feed-forward width that a token uses: that of its experts, in a mixture."""
    moe = model.moe
    return model.mlp if moe is None else (moe.shared_experts + moe.top_k) * model.mlp


def saved_activation_bytes(model: ModelConfig, choice: LayoutChoice, sizes: DeviceSizes) -> float:
    """Bytes of activations that a device's layers keep of a microbatch for the backward pass."""
    stream, split = _kept_width(model, choice)
    elements = sizes.residual_tokens * stream + sizes.tokens * split / choice.size("model")
    return sizes.layers * sizes.activation_bytes * elements


def _kept_width(model: ModelConfig, choice: LayoutChoice) -> tuple[float, float]:
    """Elements that a token keeps of a layer: of the residual stream, and of what tensor parallelism splits."""
    embed, mlp = model.embed, active_mlp_width(model)
    head_dim = model.head_dim or embed // model.heads
    queries, keys = model.heads * head_dim, 2 * (model.kv_heads or model.heads) * head_dim
    inner = (1 if model.activation == "gelu" else 2) * mlp
    if choice.remat == "none":
        exchanged = queries if choice.size("context") > 1 else 0
        return 3.4 * embed, 2.0 * queries + keys + inner + exchanged
    if choice.remat == "dots":
        return 2.0 * embed, queries + keys + inner
    saved = () if isinstance(choice.remat, str) else choice.remat
    return saved_width(model, {"input", *saved} - set(choice.offload))


def saved_width(model: ModelConfig, names: Iterable[str]) -> tuple[float, float]:
    """Elements, as in `_kept_width`, of the values that the decoder marks with these checkpoint names."""
    embed, mlp = model.embed, active_mlp_width(model)
    head_dim = model.head_dim or embed // model.heads
    queries, keys = model.heads * head_dim, (model.kv_heads or model.heads) * head_dim
    split = {"q": queries, "k": keys, "v": keys, "attention": queries, "up": mlp, "gate": mlp}
    stream = {"input": embed, "residual": embed}
    return float(sum(stream.get(name, 0) for name in names)), float(sum(split.get(name, 0) for name in names))


@dataclass(eq=False)
class CostModel:
    """Estimates the choices of one search space on one target.

    Raises:
        UserError: a model that is not the built-in decoder.
    """

    space: SearchSpace
    target: targets.Target
    _parameters: dict[tuple, ParameterSizes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workload = self.space.workload
        self.model, self.data = self.workload.model, self.workload.data
        if not is_decoder(self.model):
            message = f"layouts of {self.model.type} can not be estimated, only those of the built-in decoder"
            raise UserError(f"model.type: {message}; expected decoder, or `plan` without --search")
        self.chip: Chip = self.target.chip or _CPU
        self.calibration = calibration.calibration_of(self.target.kind)
        self.rates = calibration.achieved_rates(self.chip, self.calibration)
        self.is_assumed = self.target.chip is None
        self.prices = CollectivePrices(self.target, self.chip, self.calibration, self.space.devices)
        precision = self.workload.precision
        self.width = compute_bytes(precision)
        self.dtype = {"fp32": "f32", "fp16": "f16"}.get(precision, "bf16")
        self.moments = 1 if self.workload.optimizer.name in ("adafactor", "lion", "sgd") else 2
        self.mlp = active_mlp_width(self.model)
        self.flops = layer_matmuls(self.model, mean_attended(self.model, self.data.sequence))

    def lower_bound(self, choice: LayoutChoice) -> Estimate:
        """Lower bound of `estimate` for a choice with a pipeline, without its table; else the same."""
        return self._estimate(choice, ScheduleEffect.lower_bound(choice))

    def estimate(self, choice: LayoutChoice) -> Estimate | None:
        """Estimate with the schedule's table; None if the stages can not run it."""
        table = self.space.schedule_table(choice)
        if choice.size(PIPELINE_AXIS) > 1 and table is None:
            return None
        return self._estimate(choice, ScheduleEffect.from_table(table))

    def _estimate(self, choice: LayoutChoice, schedule: ScheduleEffect) -> Estimate:
        parameters, sizes = self.sharded_parameters(choice), self.sizes(choice)
        memory = self._memory(choice, parameters, sizes, schedule)
        parts, costs = self._compute(choice, parameters, sizes, memory)
        is_tight = self.target.platform == "cuda" and sum(memory.values()) > TIGHT_MEMORY * self.chip.memory.value
        if is_tight:
            parts["recompute"] += TIGHT_RECOMPUTE * parts["matmul"]
        chunks = self._vocab_chunks(choice)[1]
        rows = collective_rows(choice, parameters, sizes, self.model.moe, schedule.ticks, chunks)
        traffic = self._price(choice, rows, 0.0 if is_tight else sum(parts.values()))
        exposed = sum(row.exposed for row in traffic) + self._exposed_offload(choice, sizes, parts)
        bubble = schedule.bubble_seconds(choice, costs)
        usable = self.chip.usable.value or None
        step = sum(parts.values()) + exposed + bubble
        return Estimate(choice, sum(memory.values()), usable, memory, parts, exposed, bubble, step, tuple(traffic))

    def sizes(self, choice: LayoutChoice) -> DeviceSizes:
        """Sizes of a choice on a device."""
        return DeviceSizes.of(self.model, self.data, self.workload.precision, choice)

    def sharded_parameters(self, choice: LayoutChoice) -> ParameterSizes:
        """Sharded sizes of the parameters for a choice's mesh and ZeRO stage."""
        key = choice.sizes, choice.sequence_parallel, choice.zero, choice.microbatches > 1
        if key not in self._parameters:
            rules = self.space.rules(choice)
            sharding = ParameterSharding(self.workload, choice.axis_sizes, rules, choice.zero, choice.microbatches)
            self._parameters[key] = sharding.sizes()
        return self._parameters[key]

    def _vocab_chunks(self, choice: LayoutChoice) -> tuple[int, int]:
        """Ids of a chunk of the vocabulary in the loss, and number of chunks."""
        part = ceil(self.workload.vocab / choice.size("model", PIPELINE_AXIS))
        size = min(part, max(MIN_CHUNK, ceil(part / (self.workload.vocab_chunks * LANES)) * LANES))
        return size, ceil(part / size)

    def _memory(
        self, choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes, schedule: ScheduleEffect
    ) -> dict[str, float]:
        model, kept, embed = choice.size("model"), saved_activation_bytes(self.model, choice, sizes), sizes.embed
        if choice.size(PIPELINE_AXIS) > 1:
            whole = saved_activation_bytes(self.model, replace(choice, remat="none"), sizes)
            between, slot = SPLIT_BACKWARD * whole - kept, SLOT_STREAMS * sizes.residual_tokens * embed * self.width
            kept = (schedule.kept + schedule.running) * kept + schedule.kept * slot + schedule.between * between
            kept += GRADIENT_BYTES * schedule.unreduced * parameters.layer_shards
        layer = 4 * (sizes.residual_tokens * embed + sizes.tokens * self.mlp / model) * self.width
        layer += parameters.layer_elements * self.width
        if model > 1:
            layer += 7 * sizes.tokens * embed * self.width
        loss = 6 * sizes.tokens * self._vocab_chunks(choice)[0] + 2 * sizes.tokens * embed * self.width
        table = 4 * parameters.table_elements if choice.zero in (1, 2) else 0
        return {
            "params": parameters.params, "optimizer": parameters.optimizer, "gradients": parameters.gradients,
            "gathered": parameters.gathered + parameters.copies, "activations": kept + max(layer, loss) + table,
            "workspace": self.workspace(choice, sizes), "batch": 20 * sizes.tokens * choice.microbatches,
        }  # fmt: skip

    def workspace(self, choice: LayoutChoice, sizes: DeviceSizes) -> float:
        """Bytes of workspace of cuDNN's attention; 0 for other kernels."""
        if self.target.platform != "cuda" or self._stored_scores(choice, sizes):
            return 0.0
        is_packed = self.chip.compiler["major"] >= HOPPER
        documents = max(MIN_DOCUMENTS, self.data.sequence // TOKENS_PER_DOCUMENT) if is_packed else 1
        return DOCUMENT_BYTES * documents * sizes.tokens * sizes.query_width / choice.size("model")

    def _compute(
        self, choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes, memory: Mapping[str, float]
    ) -> tuple[dict[str, float], Costs]:
        """Compute seconds by kind; and those of F, B and W of one microbatch on a stage."""
        m, layers = choice.microbatches, sizes.layers
        dense, recompute, kernel, repeated = self._matmul_seconds(choice, parameters, sizes)
        ids, chunks = self._vocab_chunks(choice)
        vocab = ids * chunks
        head = sizes.tokens * 2 * sizes.embed * vocab / self.rates.compute("matmul", self.dtype)
        elementwise = self._elementwise_bytes(choice, parameters, sizes) / self.rates.memory
        costs = Costs(
            layers * (dense + kernel + elementwise / 3),
            layers * (dense + recompute + (1 + BACKWARD_RECOMPUTE / 2) * kernel + repeated + elementwise / 3),
            layers * (dense + (1 + BACKWARD_RECOMPUTE / 2) * kernel + elementwise / 3),
        )
        step_bytes = m * sizes.tokens * vocab * LOGIT_BYTES + UPDATE_BYTES * (1 + self.moments) * parameters.elements
        if m > 1:
            step_bytes += (ACCUMULATE_PASSES * m + REDUCE_PASSES) * memory["gradients"]
        parts = {
            "matmul": m * (3 * layers * dense + (3 + (chunks > 1)) * head), "recompute": m * layers * recompute,
            "attention": m * layers * ((3 + BACKWARD_RECOMPUTE) * kernel + repeated),
            "elementwise": m * layers * elementwise + step_bytes / self.rates.memory,
            "launch": self.rates.launch * LAUNCHES * m * layers,
        }  # fmt: skip
        return parts, costs

    def _matmul_seconds(
        self, choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes
    ) -> tuple[float, float, float, float]:
        """Seconds of a layer's forward matmuls, of those recomputed, of attention's forward, of that repeated."""
        rates = {kind: self.rates.compute(kind, self.dtype) for kind in ("matmul", "attention")}
        flops, tokens, kernels = self.flops, sizes.tokens / choice.size("model"), {"scores", "attention"}
        dense = tokens * sum(flops[name] for name in flops.keys() - kernels) / rates["matmul"]
        recompute = tokens * sum(flops[name] for name in sizes.recomputed - kernels) / rates["matmul"]
        # A matmul takes at least as long as reading its matrix.
        read = parameters.layer_elements * self.width / self.rates.memory
        dense, recompute = max(dense, read), max(recompute, read) if recompute else 0.0
        kernel = tokens * (flops["scores"] + flops["attention"]) / rates["attention"]
        if self._stored_scores(choice, sizes) and choice.context_parallel in ("ring", "gather"):
            kernel *= 2  # masked keys are multiplied too
        elif choice.size("context") > 1:
            kernel *= ULYSSES_ATTENTION
        repeated = kernel * len(sizes.recomputed & kernels) / 2
        if choice.size("context") > 1 and choice.remat == "none":
            repeated = kernel  # the values that Ulysses exchanges are not kept, even with remat none
        return dense, recompute, kernel, repeated

    def _elementwise_bytes(self, choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes) -> float:
        """Bytes that elementwise operations read and write in a layer for a microbatch."""
        embed, model = sizes.embed, choice.size("model")
        split = HEAD_PASSES * (sizes.query_width + sizes.key_value_width) + MLP_PASSES * self.mlp
        passes = STREAM_PASSES * sizes.residual_tokens * embed + split * sizes.tokens / model
        if model > 1:
            passes += GATHERED_PASSES * sizes.tokens * embed * (model - 1) / model
        shard = parameters.layer_shards / max(1.0, sizes.layers)
        cast = COPY_BYTES * parameters.layer_elements if choice.zero in (1, 2) else CAST_BYTES * shard
        scores = SCORE_BYTES * self._stored_scores(choice, sizes)
        return self.width * passes + USED_BYTES * parameters.layer_elements + cast + scores

    def _stored_scores(self, choice: LayoutChoice, sizes: DeviceSizes) -> float:
        """Attention scores of a layer and microbatch that are stored in memory; 0 for fused kernels."""
        kernel = self.workload.attention
        is_plain = kernel in ("xla", "reference") or self.is_assumed or self.width == 4
        if not is_plain and choice.context_parallel not in ("ring", "gather"):
            return 0.0
        return sizes.tokens * self.data.sequence * self.model.heads / choice.size("model")

    def _price(self, choice: LayoutChoice, rows: list[CollectiveRow], compute: float) -> list[PricedCollective]:
        priced = [(row, *self.prices.seconds(choice, row)) for row in rows]
        fractions = OVERLAP["tpu" if self.target.platform == "tpu" else "cuda"]
        hidden = [seconds * fractions.get(row.purpose, 0.0) for row, seconds, _ in priced]
        scale = min(1.0, MAX_OVERLAP * compute / sum(hidden)) if sum(hidden) else 0.0
        return [
            PricedCollective(row.purpose, row.op, "+".join(row.axes), network, row.bytes, seconds, overlap * scale)
            for (row, seconds, network), overlap in zip(priced, hidden)
        ]

    def _exposed_offload(self, choice: LayoutChoice, sizes: DeviceSizes, parts: Mapping[str, float]) -> float:
        """Seconds of offloading that do not overlap with computation."""
        if not choice.offload or self.chip.host is None:
            return 0.0
        stream, split = saved_width(self.model, choice.offload)
        kept = (sizes.residual_tokens * stream + sizes.tokens * split / choice.size("model")) * self.width
        rate = float(self.chip.host.bandwidth) * self.calibration.host
        return max(0.0, 2 * choice.microbatches * sizes.layers * kept / rate - MAX_OVERLAP * sum(parts.values()))
