"""Estimate of a choice's memory and time from the config and the chip alone, in a fraction of a millisecond.

It is for ordering thousands of choices, not for trusting: the best are compiled (`plan.search`). Bytes of the train
state are exact, traffic is the textbook's (`plan.wires`); activations, memory traffic of elementwise operations and
how much communication hides are fitted to compiled steps of Llama layers on H100 targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

import numpy as np

from jaxtrain.config.schema import Config, ModelConfig
from jaxtrain.errors import UserError
from jaxtrain.models.flops import layer_matmuls, mean_attended
from jaxtrain.models.spec import is_decoder
from jaxtrain.pipeline.schedules.cost import Costs, action_costs, peak, tick_times
from jaxtrain.pipeline.schedules.shipped import SCHEDULES
from jaxtrain.pipeline.schedules.table import Action, Table
from jaxtrain.planning.choices import Choice, Space
from jaxtrain.planning.cost.communication import CollectiveRow, LayoutSizes, Links, rows
from jaxtrain.planning.cost.parameters import COMPUTE, Weights, weigh
from jaxtrain.planning.hardware import calibration, targets
from jaxtrain.planning.hardware.calibration import Calibration
from jaxtrain.planning.hardware.chips import Chip, Figure, Link, Switch
from jaxtrain.sharding.rules import PIPELINE_AXIS

# Fitted to compiled steps (h100:1x8 and 8x8, layers of Llama 3 8B): passes over memory of elementwise operations.
STREAM, WIDE, HEADS, ENTERED = 29, 10, 8, 40  # in widths of embed, mlp, heads; of what tensor parallelism gathers
USED, CAST, COPIED = 10, 27, 15  # bytes for a weight in use, one to be cast, one of a copy
LOGIT, UPDATE = 17, 12  # bytes for a logit; for a parameter and each of its gradient, itself and its moments
ADDED, SUMMED = 4, 3  # passes over float32 gradients: for each of several microbatches, and once
SCORE = 80  # bytes for a score of attention in plain XLA
# Of cuDNN's backward kernel (`plan.memory.workspace`): bytes for an element of the queries and each document that a
# packed row has a place for, on Hopper and later (`kernels.attention.cudnn`).
PLACE, PLACES, TOKENS_PER_PLACE, HOPPER = 4, 16, 512, 9
# Of a pipeline, fitted to steps of all schedules on h100:1x4 and 1x8: of a chunk, what F and the backward hold beside
# the slots; in widths of the residual stream, what a slot holds besides (what arrived, and its gradient); what lies
# between B and W, kept slots included, of all that a microbatch's layers can keep; bytes of a gradient before it is
# added, where the backward of a whole stage does not add it at once.
HELD, ARRIVED, SPLIT, MADE = 2, 2, 1.9, 5
MOVED = 1.2  # of attention's time, where Ulysses hands it heads
INSIDE = 0.5  # of attention's forward pass, that its backward kernel computes again
OPERATIONS = 60  # launched for a layer and microbatch
# Of a program's collectives, how much runs beside computing, and of the computing at most. TPU: as in steps of
# v5e:16x16, v5p:4x4x4 and v6e:8x8 (fsdp, fsdp_tp); what these have none of is taken to be as on CUDA.
HIDDEN = {
    "cuda": {
        "weights": 0.7, "gradients": 0.45, "once": 0.2, "tensor": 0.12, "context": 0.45, "rows": 0.5, "pipeline": 0.3,
    },
    "tpu": {"weights": 0.5, "tensor": 0.35, "context": 0.45, "pipeline": 0.3},
}  # fmt: skip
BESIDE = 0.5
# Of a GPU's memory: XLA plans with 80% of it, and a step that comes near computes matrices again to stay below.
TIGHT, TIGHT_AGAIN = 0.78, 0.25
LANES, SMALLEST = 128, 512  # chunks of the vocabulary: `kernels.cross_entropy`

# A CPU's simulated devices share one memory: only the order of choices means anything.
_ASSUMED = "an assumption: only the order of choices means anything"
_CPU = Chip(
    "cpu", {"bf16": Figure(5e10, _ASSUMED), "fp32": Figure(5e10, _ASSUMED)}, Figure(0, _ASSUMED), Figure(0, _ASSUMED),
    Figure(5e9, _ASSUMED),
    Switch(4096, Figure(2e9, _ASSUMED), Figure(1e-5, _ASSUMED), Figure(2e-5, _ASSUMED), True, "memory"),
    Link("network", Figure(1e9, _ASSUMED), Figure(1e-4, _ASSUMED)),
)  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A row of traffic with its price; `hidden` are seconds that pass while the device computes."""

    what: str
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
        needs: bytes; usable: None where the memory is not known.
        memory: bytes by kind, as in `Plan.memory`.
        traffic: of a bound, empty.
        parts: compute seconds by `matmul`, `again` (recomputation), `attention`, `elementwise` and `launch`.
        bubble_seconds: that stages wait for one another.
        exact: priced with the real table of its schedule, and with its traffic listed.
    """

    choice: Choice
    needs: float
    usable: float | None
    memory: Mapping[str, float]
    parts: Mapping[str, float]
    exposed_seconds: float
    bubble_seconds: float
    step_seconds: float
    traffic: tuple[Sent, ...] = ()
    exact: bool = False

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
        """Returns whether it needs at most so many times what is there."""
        return self.usable is None or self.needs <= slack * self.usable

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate for JSON."""
        return {
            "needs": round(self.needs), "memory": {kind: round(size) for kind, size in self.memory.items()},
            "parts": dict(self.parts), "compute_seconds": self.compute_seconds, "wire_bytes": round(self.wire_bytes),
            "exposed_seconds": self.exposed_seconds, "bubble_seconds": self.bubble_seconds,
            "step_seconds": self.step_seconds,
        }  # fmt: skip


@dataclass(frozen=True)
class Order:
    """Effects of a schedule on a step: exactly, or at the least where there is no table.

    Args:
        kept: activations of microbatches on a whole stage, from F to W.
        held: likewise, by what runs.
        made: stages whose gradients are made before they are added.
        between: what a backward pass in two parts keeps from B to W, likewise.
    """

    ticks: int = 0
    kept: float = 1.0
    held: float = 0.0
    made: float = 0.0
    between: float = 0.0
    table: Table | None = None

    @classmethod
    def least(cls, choice: Choice) -> Order:
        """Without the table: no schedule keeps less. See the docstrings of `pipeline.schedule`."""
        p, m = choice.size(PIPELINE_AXIS), choice.accumulate
        if p == 1:
            return cls()
        v = choice.chunks or (SCHEDULES[choice.schedule].chunks or (2,))[0]
        most = {
            "gpipe": m, "1f1b": p, "1f1b_aligned": 2 * p - 1, "interleaved_1f1b": p + (p - 1) / v, "zb_h1": p,
            "zb_v": p, "v_half": (p + 2) // 2,
        }  # fmt: skip
        made = 1 / v if v > 1 or choice.schedule == "zb_h1" else 0.0
        return cls(2 * m * v + p - 1, min(m, most.get(choice.schedule, 1)), HELD / v, made)

    @classmethod
    def of(cls, table: Table | None) -> Order:
        if table is None:
            return cls()
        change = (table.action == Action.B) * 1 - (table.action == Action.W)
        v, between = table.chunks, float(np.cumsum(change, axis=0).max()) / table.chunks
        made = 1 / v if v > 1 or between else 0.0
        return cls(table.ticks, float(peak(table).max()), HELD / v, made, between, table)

    def bubble(self, choice: Choice, costs: Costs) -> float:
        """Seconds that a stage waits, in lockstep."""
        if self.table is not None:
            work = action_costs(self.table, costs)[self.table.action[:, 0]].sum()
            return float(tick_times(self.table, costs).sum() - work)
        p = choice.size(PIPELINE_AXIS)
        v = choice.chunks or (2 if choice.schedule == "interleaved_1f1b" else 1)
        waits = {"zb_h1": max(costs.forward + costs.backward - costs.weight, 0.0), "zb_v": 0.0, "v_half": 0.0}
        return (p - 1) * waits.get(choice.schedule, sum(costs) / v)


def feed_forward(model: ModelConfig) -> int:
    """Feed-forward width that a token meets."""
    moe = model.moe
    return model.mlp if moe is None else (moe.shared_experts + moe.top_k) * model.mlp


def kept_bytes(model: ModelConfig, choice: Choice, shape: LayoutSizes) -> float:
    """Returns the bytes of activations that the layers of a device keep of a microbatch for the backward pass."""
    stream, wide = _kept_width(model, choice)
    return shape.layers * shape.width * (shape.stream * stream + shape.tokens * wide / choice.size("model"))


def _kept_width(model: ModelConfig, choice: Choice) -> tuple[float, float]:
    """Elements that a token keeps of a layer: of the residual stream, and of what tensor parallelism splits."""
    embed, mlp = model.embed, feed_forward(model)
    head = model.head_dim or embed // model.heads
    queries, keys = model.heads * head, 2 * (model.kv_heads or model.heads) * head
    inner = (1 if model.activation == "gelu" else 2) * mlp
    if choice.remat == "none":
        moved = queries if choice.size("context") > 1 else 0
        return 3.4 * embed, 2.0 * queries + keys + inner + moved
    if choice.remat == "dots":
        return 2.0 * embed, queries + keys + inner
    saved = () if isinstance(choice.remat, str) else choice.remat
    return named_width(model, {"input", *saved} - set(choice.offload))


def named_width(model: ModelConfig, names: Iterable[str]) -> tuple[float, float]:
    """Returns the width, as `_kept_width`, of the values that the decoder marks with these names."""
    embed, mlp = model.embed, feed_forward(model)
    head = model.head_dim or embed // model.heads
    queries, keys = model.heads * head, (model.kv_heads or model.heads) * head
    split = {"q": queries, "k": keys, "v": keys, "attention": queries, "up": mlp, "gate": mlp}
    stream = {"input": embed, "residual": embed}
    return float(sum(stream.get(name, 0) for name in names)), float(sum(split.get(name, 0) for name in names))


@dataclass(eq=False)
class Formula:
    """Estimates of one config's choices on one target.

    Raises:
        UserError: a model that is not the built-in decoder.
    """

    space: Space
    target: targets.Target
    _weights: dict[tuple, Weights] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.space.config
        if not is_decoder(config.model):
            message = f"the formulas of a search know the built-in decoder, not {config.model.type}"
            raise UserError(f"model.type: {message}; expected decoder, or `plan` without a search")
        self.config: Config = config
        self.chip: Chip = self.target.chip or _CPU
        self.shares: Calibration = calibration.of_kind(self.target.kind)
        self.is_assumed = self.target.chip is None
        self.links = Links(self.target, self.chip, self.shares, self.space.devices)
        self.width = COMPUTE.get(config.precision, 2)
        self.dtype = {"fp32": "f32", "fp16": "f16"}.get(config.precision, "bf16")
        self.moments = 2 if config.optimizer.name in ("adamw", "muon") else 1
        model = config.model
        self.mlp = feed_forward(model)
        self.terms = layer_matmuls(model, mean_attended(model, config.data.sequence))

    def bound(self, choice: Choice) -> Estimate:
        """Returns a lower bound of `exact` for a choice with a pipeline, without its table; else the same."""
        return self._estimate(choice, Order.least(choice))

    def exact(self, choice: Choice) -> Estimate | None:
        """Returns the estimate with the schedule's real table; None if the stages can not run it."""
        table = self.space.table(choice)
        if choice.size(PIPELINE_AXIS) > 1 and table is None:
            return None
        return replace(self._estimate(choice, Order.of(table)), exact=True)

    def _estimate(self, choice: Choice, order: Order) -> Estimate:
        weights, shape = self.weights(choice), LayoutSizes.of(self.config, choice)
        memory = self._memory(choice, weights, shape, order)
        parts, costs = self._compute(choice, weights, shape, order, memory)
        chunks = self._chunks(choice)[1]
        tight = self.target.platform == "cuda" and sum(memory.values()) > TIGHT * self.chip.memory.value
        if tight:
            parts["again"] += TIGHT_AGAIN * parts["matmul"]
        found = rows(self.config, choice, weights, shape, order.ticks, chunks)
        sent = self._sent(choice, found, 0.0 if tight else sum(parts.values()))
        exposed = sum(row.exposed for row in sent) + self._host(choice, shape, parts)
        bubble = order.bubble(choice, costs)
        usable = self.chip.usable.value or None
        step = sum(parts.values()) + exposed + bubble
        return Estimate(choice, sum(memory.values()), usable, memory, parts, exposed, bubble, step, tuple(sent))

    def weights(self, choice: Choice) -> Weights:
        """Returns the bytes of weights for a choice's mesh and ZeRO stage."""
        several = choice.accumulate > 1
        key = choice.sizes, choice.sequence, choice.zero, several
        if key not in self._weights:
            self._weights[key] = weigh(self.space.configured(choice), self.space.vocab)
        return self._weights[key]

    def _chunks(self, choice: Choice) -> tuple[int, int]:
        """Ids of a chunk of the vocabulary, and number of chunks."""
        part = ceil(self.space.vocab / choice.size("model", PIPELINE_AXIS))
        size = min(part, max(SMALLEST, ceil(part / (self.config.loss.vocab_chunks * LANES)) * LANES))
        return size, ceil(part / size)

    def _memory(self, choice: Choice, weights: Weights, shape: LayoutSizes, order: Order) -> dict[str, float]:
        model, kept = choice.size("model"), kept_bytes(self.config.model, choice, shape)
        embed = self.config.model.embed
        if choice.size(PIPELINE_AXIS) > 1:
            whole = kept_bytes(self.config.model, replace(choice, remat="none"), shape)
            between, arrived = SPLIT * whole - kept, ARRIVED * shape.stream * embed * self.width
            kept = (order.kept + order.held) * kept + order.kept * arrived + order.between * between
            kept += MADE * order.made * weights.placed
        one = 4 * (shape.stream * embed + shape.tokens * self.mlp / model) * self.width + weights.layer * self.width
        if model > 1:
            one += 7 * shape.tokens * embed * self.width
        loss = 6 * shape.tokens * self._chunks(choice)[0] + 2 * shape.tokens * embed * self.width
        table = 4 * weights.table if choice.zero in (1, 2) else 0
        return {
            "params": weights.params, "optimizer": weights.optimizer, "gradients": weights.gradients,
            "gathered": weights.gathered + weights.copies, "activations": kept + max(one, loss) + table,
            "workspace": self.workspace(choice, shape), "batch": 20 * shape.tokens * choice.accumulate,
        }  # fmt: skip

    def workspace(self, choice: Choice, shape: LayoutSizes) -> float:
        """Bytes that cuDNN's attention wants besides; 0 where another kernel runs."""
        if self.target.platform != "cuda" or self._scores(choice, shape):
            return 0.0
        is_packed = self.chip.compiler["major"] >= HOPPER
        places = max(PLACES, self.config.data.sequence // TOKENS_PER_PLACE) if is_packed else 1
        return PLACE * places * shape.tokens * shape.queries / choice.size("model")

    def _compute(
        self, choice: Choice, weights: Weights, shape: LayoutSizes, order: Order, memory: Mapping[str, float]
    ) -> tuple[dict[str, float], Costs]:
        """Seconds of computing by kind; and of F, B and W of one microbatch on a stage."""
        m, model = choice.accumulate, choice.size("model")
        rates = {kind: self._rate(kind) for kind in ("matmul", "attention")}
        bandwidth = float(self.chip.bandwidth) * self.shares.memory
        terms = self.terms
        tokens = shape.tokens / model
        kernels = {"scores", "attention"}
        dense = tokens * sum(terms[name] for name in terms.keys() - kernels) / rates["matmul"]
        again = tokens * sum(terms[name] for name in shape.again - kernels) / rates["matmul"]
        # A matrix takes at least as long as it takes to read.
        least = weights.layer * self.width / bandwidth
        dense, again = max(dense, least), max(again, least) if again else 0.0
        kernel = tokens * (terms["scores"] + terms["attention"]) / rates["attention"]
        if self._scores(choice, shape) and choice.context in ("ring", "gather"):
            kernel *= 2  # keys that are masked are met all the same
        elif choice.size("context") > 1:
            kernel *= MOVED
        repeated = kernel * len(shape.again & kernels) / 2
        if choice.size("context") > 1 and choice.remat == "none":
            repeated = kernel  # what Ulysses moves is not kept whatever `none` says
        vocab = self._chunks(choice)[0] * self._chunks(choice)[1]
        head = shape.tokens * 2 * self.config.model.embed * vocab / rates["matmul"]
        elementwise = self._elementwise(choice, weights, shape) / bandwidth
        per = shape.layers
        costs = Costs(
            per * (dense + kernel + elementwise / 3),
            per * (dense + again + (1 + INSIDE / 2) * kernel + repeated + elementwise / 3),
            per * (dense + (1 + INSIDE / 2) * kernel + elementwise / 3),
        )
        edges = m * shape.tokens * vocab * LOGIT + UPDATE * (1 + self.moments) * weights.elements
        if m > 1:
            edges += (ADDED * m + SUMMED) * memory["gradients"]
        parts = {
            "matmul": m * (3 * per * dense + (3 + (self._chunks(choice)[1] > 1)) * head), "again": m * per * again,
            "attention": m * per * ((3 + INSIDE) * kernel + repeated),
            "elementwise": m * per * elementwise + edges / bandwidth,
            "launch": self.shares.launch * OPERATIONS * m * per,
        }  # fmt: skip
        return parts, costs

    def _rate(self, kind: str) -> float:
        return self.chip.flops(self.dtype) * (self.shares.attention if kind == "attention" else self.shares.matmul)

    def _elementwise(self, choice: Choice, weights: Weights, shape: LayoutSizes) -> float:
        """Bytes that elementwise operations read and write in a layer for a microbatch."""
        embed, model = self.config.model.embed, choice.size("model")
        wide = HEADS * (shape.queries + shape.keys) + WIDE * self.mlp
        passes = STREAM * shape.stream * embed + wide * shape.tokens / model
        if model > 1:
            passes += ENTERED * shape.tokens * embed * (model - 1) / model
        placed = weights.placed / max(1.0, shape.layers)
        cast = COPIED * weights.layer if choice.zero in (1, 2) else CAST * placed
        return self.width * passes + USED * weights.layer + cast + SCORE * self._scores(choice, shape)

    def _scores(self, choice: Choice, shape: LayoutSizes) -> float:
        """Scores of a layer's attention for a microbatch that meet memory: none where a fused kernel computes them."""
        kernel = self.config.step.attention
        is_plain = kernel in ("xla", "reference") or self.is_assumed or self.width == 4
        if not is_plain and choice.context not in ("ring", "gather"):
            return 0.0
        return shape.tokens * self.config.data.sequence * self.config.model.heads / choice.size("model")

    def _sent(self, choice: Choice, found: list[CollectiveRow], computing: float) -> list[Sent]:
        priced = [(row, *self.links.seconds(choice, row)) for row in found]
        shares = HIDDEN["tpu" if self.target.platform == "tpu" else "cuda"]
        hides = [seconds * shares.get(row.what, 0.0) for row, seconds, _ in priced]
        scale = min(1.0, BESIDE * computing / sum(hides)) if sum(hides) else 0.0
        return [
            Sent(row.what, row.op, "+".join(row.axes), network, row.bytes, seconds, hidden * scale)
            for (row, seconds, network), hidden in zip(priced, hides)
        ]

    def _host(self, choice: Choice, shape: LayoutSizes, parts: Mapping[str, float]) -> float:
        """Seconds of offloading that computing does not cover."""
        if not choice.offload or self.chip.host is None:
            return 0.0
        stream, wide = named_width(self.config.model, choice.offload)
        kept = (shape.stream * stream + shape.tokens * wide / choice.size("model")) * self.width
        moving = 2 * choice.accumulate * shape.layers * kept / (float(self.chip.host.bandwidth) * self.shares.host)
        return max(0.0, moving - BESIDE * sum(parts.values()))
