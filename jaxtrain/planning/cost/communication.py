"""Communication of a choice in a step by textbook formulas, and its time on the networks.

Bytes are those that a device sends around a ring, as in `plan.communication`. What each layout sends:

- FSDP and ZeRO: `plan.weights`; a layer's weights are gathered twice, whatever is computed again.
- tensor and sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): the residual stream is gathered twice and
  scattered twice a layer in each direction, gathered twice more for weight gradients, and scattered once more where the
  attention's output projection is computed again.
- context: all-to-alls of q, k, v and the output (Ulysses, arXiv 2309.14509), or keys and values gathered or passed
  round a ring, in each direction and once more where attention is computed again.
- experts: tokens travel to their experts and back, in each direction.
- pipeline: an activation and a gradient in every tick, and what the loss at the last stage needs of the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.models.flops import recomputed
from jaxtrain.planning.choices import Choice
from jaxtrain.planning.cost.parameters import COMPUTE, Over, Weights
from jaxtrain.planning.hardware.calibration import Calibration
from jaxtrain.planning.hardware.chips import Chip, Switch, Torus
from jaxtrain.planning.hardware.network import DevicePosition, Fabric
from jaxtrain.planning.hardware.targets import Target
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.rules import PIPELINE_AXIS

GIGA = 1e9


@dataclass(frozen=True)
class CollectiveRow:
    """Collectives of one kind in a step.

    Args:
        what: `weights`, `gradients`, `once`, `tensor`, `context`, `experts`, `rows`, `loss` or `pipeline`.
        runs: of the collective.
        bytes: that a device sends in all of them.
    """

    what: str
    op: str
    axes: Over
    runs: float
    bytes: float


@dataclass(frozen=True)
class LayoutSizes:
    """A choice's sizes on one device.

    Args:
        layers: that it holds.
        tokens: of a microbatch, of its tensor-parallel group.
        stream: of these, whose residual stream it holds.
        width: bytes of an activation.
        queries, keys: elements of a token's queries, and of its keys and values together.
        again: matrix multiplications computed again.
    """

    layers: float
    tokens: float
    stream: float
    width: int
    embed: int
    queries: int
    keys: int
    again: frozenset[str]

    @classmethod
    def of(cls, config: Config, choice: Choice) -> LayoutSizes:
        model, data = config.model, config.data
        rows = data.global_batch / choice.accumulate / choice.size("data", "fsdp", "expert")
        tokens = rows * data.sequence / choice.size("context")
        head = model.head_dim or model.embed // model.heads
        split = choice.size("model") if choice.sequence else 1
        again = recomputed(model, choice.remat) - set(choice.offload)
        if "attention" in choice.offload:
            again -= {"scores"}
        return cls(
            model.layers / choice.size(PIPELINE_AXIS), tokens, tokens / split, COMPUTE.get(config.precision, 2),
            model.embed, model.heads * head, 2 * (model.kv_heads or model.heads) * head, frozenset(again),
        )  # fmt: skip


def share(choice: Choice, axes: Over) -> float:
    """Returns the share of a tensor that a device sends around the ring of these axes."""
    n = choice.size(*axes)
    return (n - 1) / n


def rows(
    config: Config, choice: Choice, weights: Weights, shape: LayoutSizes, ticks: int, chunks: int
) -> list[CollectiveRow]:
    """Returns the collectives of a step. `ticks`: of the schedule; `chunks`: of the vocabulary."""
    out = _weights(choice, weights, shape, chunks)
    out += _tensor(choice, shape, weights)
    out += _context(choice, shape)
    out += _experts(config, choice, shape)
    out += _pipeline(choice, shape, ticks)
    return [row for row in out if row.bytes and choice.size(*row.axes) > 1]


def _weights(choice: Choice, weights: Weights, shape: LayoutSizes, chunks: int) -> list[CollectiveRow]:
    m, out = choice.accumulate, []
    runs = {"layers": shape.layers * m, "loss": chunks * m, "edges": m}
    for (part, axes), size in weights.gathers.items():
        if part != "edges":
            out.append(CollectiveRow("weights", "all-gather", axes, 2 * runs[part], 2 * m * share(choice, axes) * size))
    for (part, op, axes), size in weights.reduces.items():
        passes = 2 if op == "all-reduce" else 1
        out.append(CollectiveRow("gradients", op, axes, runs[part], passes * m * share(choice, axes) * size))
    for (op, axes), size in weights.once.items():
        passes = 2 if op == "all-reduce" else 1
        out.append(CollectiveRow("once", op, axes, 8, passes * share(choice, axes) * size))
    for over, tables in Counter(weights.rows).items():
        runs_of_rows = m * (tables + 1)  # the gradient of tables that lie alike goes its way once
        moved = runs_of_rows * shape.stream * shape.embed * shape.width
        out += [
            CollectiveRow("rows", "all-to-all", (axis,), runs_of_rows, share(choice, (axis,)) * moved) for axis in over
        ]
    return out


def _tensor(choice: Choice, shape: LayoutSizes, weights: Weights) -> list[CollectiveRow]:
    if choice.size("model") == 1:
        return []
    m, axes = choice.accumulate, ("model",)
    one = share(choice, axes) * shape.tokens * shape.embed * shape.width
    scatters = 4 + ("o" in shape.again)
    statistics = CollectiveRow("loss", "all-reduce", axes, 2 * m, 6 * m * share(choice, axes) * shape.tokens * 4)
    ends, by_width = 1 + weights.by_ids, weights.by_width  # the loss, and a table that is sharded as the head is
    if not choice.sequence:
        runs = m * (scatters * shape.layers + ends)
        rows = CollectiveRow("rows", "all-gather", axes, m * by_width, m * by_width * one)
        return [CollectiveRow("tensor", "all-reduce", axes, runs, 2 * runs * one), rows, statistics]
    gathers, scatters = m * (6 * shape.layers + ends), m * (scatters * shape.layers + ends)
    moved = 2 * m * by_width
    return [
        CollectiveRow("tensor", "all-gather", axes, gathers, gathers * one),
        CollectiveRow("tensor", "reduce-scatter", axes, scatters, scatters * one),
        CollectiveRow("rows", "all-to-all", axes, moved, moved * one / choice.size("model")), statistics,
    ]  # fmt: skip


def _context(choice: Choice, shape: LayoutSizes) -> list[CollectiveRow]:
    n, axes = choice.size("context"), ("context",)
    if n == 1:
        return []
    runs, again = choice.accumulate * shape.layers, "scores" in shape.again
    split = choice.size("model")
    keys = shape.tokens * shape.keys * shape.width / split
    if choice.context == "ring":
        hops = (1 + again) * (n - 1) + max(0, n - 3) + (n - 1) * 4 / shape.width
        return [
            CollectiveRow("context", "collective-permute", axes, runs * ((1 + again) * (n - 1) + n), runs * hops * keys)
        ]
    if choice.context == "gather":
        size = share(choice, axes) * keys * n
        return [
            CollectiveRow("context", "all-gather", axes, 2 * runs * (1 + again), runs * (1 + again) * size),
            CollectiveRow("context", "reduce-scatter", axes, runs, runs * size),
        ]
    moved = shape.tokens * (2 * shape.queries + shape.keys) * shape.width / split
    passes = runs * (2 + again)
    return [CollectiveRow("context", "all-to-all", axes, 4 * passes, passes * share(choice, axes) * moved)]


def _experts(config: Config, choice: Choice, shape: LayoutSizes) -> list[CollectiveRow]:
    moe, axes = config.model.moe, ("expert",)
    if moe is None or choice.size("expert") == 1:
        return []
    passes = 2 + ("experts_down" in shape.again)
    runs = 2 * passes * choice.accumulate * shape.layers
    moved = moe.top_k * max(1.0, moe.capacity_factor or 1.0) * shape.stream * shape.embed * shape.width
    return [CollectiveRow("experts", "all-to-all", axes, runs, runs * share(choice, axes) * moved)]


def _pipeline(choice: Choice, shape: LayoutSizes, ticks: int) -> list[CollectiveRow]:
    axes = (PIPELINE_AXIS,)
    if choice.size(PIPELINE_AXIS) == 1:
        return []
    stream = shape.stream * shape.embed * shape.width
    around = 4 * choice.accumulate
    return [
        CollectiveRow("pipeline", "collective-permute", axes, 2 * ticks, 2 * ticks * stream),
        CollectiveRow("pipeline", "all-reduce", axes, around, 2 * around * share(choice, axes) * stream),
    ]


@dataclass(eq=False)
class Links:
    """Prices of collectives over mesh axes, alpha + beta x bytes.

    Devices are taken in the order of the target; of a torus the last dims are the fastest axes'. The first group of
    each axis is priced: all are alike.
    """

    target: Target
    chip: Chip
    shares: Calibration
    devices: int
    _known: dict[tuple, tuple[float, float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torus = self.target.shape if isinstance(self.chip.inside, Torus) else ()
        self.fabric = Fabric(self.chip, self.shares, torus, [self._place(at) for at in range(self.devices)])

    def _place(self, at: int) -> DevicePosition:
        inside = self.chip.inside
        if isinstance(inside, Switch):
            return DevicePosition(
                at // inside.domain(self.target.shape[1] if len(self.target.shape) > 1 else self.devices)
            )
        core, at = at % self.chip.devices, at // self.chip.devices
        coords = []
        for size in reversed(self.target.shape):
            coords.append(at % size)
            at //= size
        return DevicePosition(at, tuple(reversed(coords)), core)

    def seconds(self, choice: Choice, row: CollectiveRow) -> tuple[float, str]:
        """Returns the seconds of all runs, and the name of the network."""
        key = choice.sizes, row.axes, row.op
        if key not in self._known:
            groups = _groups(choice.sizes, row.axes, row.op)
            least, most = (self.fabric.price(row.op, groups, sent) for sent in (0.0, GIGA))
            alpha = least.seconds or 0.0
            self._known[key] = alpha, ((most.seconds or 0.0) - alpha) / GIGA, most.network
        alpha, beta, network = self._known[key]
        return row.runs * alpha + row.bytes * beta, network


def _groups(sizes: tuple[int, ...], axes: Over, op: str) -> list[list[int]]:
    """The first group of devices along some axes; of a permute all pairs of neighbours in it."""
    strides = {axis: prod(sizes[at + 1 :]) for at, axis in enumerate(AXES)}
    group = [0]
    for axis in AXES:
        if axis in axes:
            size = sizes[AXES.index(axis)]
            group = [start + step * strides[axis] for start in group for step in range(size)]
    if op != "collective-permute":
        return [group]
    return [[a, b] for a, b in zip(group, [*group[1:], group[0]])]
