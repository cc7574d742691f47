"""Communication of a layout choice in a step by textbook formulas, and its time on the target's networks.

Bytes are those that a device sends around a ring, as in `hlo.collectives`. Traffic by axis:

- FSDP and ZeRO: see `cost.parameters`; a layer's weights are gathered twice, whatever is recomputed.
- tensor and sequence parallelism (Korthikanti et al. 2022, arXiv 2205.05198): the residual stream is gathered twice and
  scattered twice a layer in each direction, gathered twice more for weight gradients, and scattered once more if the
  attention's output projection is recomputed.
- context: all-to-alls of q, k, v and the output (Ulysses, arXiv 2309.14509), or keys and values gathered or passed
  around a ring, in each direction and once more if attention is recomputed.
- experts: tokens are sent to their experts and back, in each direction.
- pipeline: an activation and a gradient in every tick, and what the last stage's loss needs from the others.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from jaxtrain.config.schema import DataConfig
from jaxtrain.config.sections.model import ModelConfig, MoeConfig
from jaxtrain.models.flops import recomputed
from jaxtrain.planning.choices import LayoutChoice
from jaxtrain.planning.cost.parameters import ParameterSizes, compute_bytes
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
        purpose: `weights`, `gradients`, `once` (a step), `tensor`, `context`, `experts`, `rows` (of embedding tables),
            `loss` or `pipeline`.
        runs: number of runs.
        bytes: bytes that a device sends in all of them.
    """

    purpose: str
    op: str
    axes: tuple[str, ...]
    runs: float
    bytes: float


@dataclass(frozen=True)
class DeviceSizes:
    """Sizes of a layout choice on one device.

    Args:
        layers: number of layers.
        tokens: tokens of a microbatch in the device's tensor-parallel group.
        residual_tokens: tokens whose residual stream the device holds.
        activation_bytes: bytes of an activation element.
        embed: width of the residual stream.
        query_width: elements of a token's queries.
        key_value_width: elements of a token's keys and values together.
        recomputed: matrix multiplications that the backward pass recomputes.
    """

    layers: float
    tokens: float
    residual_tokens: float
    activation_bytes: int
    embed: int
    query_width: int
    key_value_width: int
    recomputed: frozenset[str]

    @classmethod
    def of(cls, model: ModelConfig, data: DataConfig, precision: str, choice: LayoutChoice) -> DeviceSizes:
        """Computes the sizes of a choice for a model, its data and its precision policy."""
        rows = data.global_batch / choice.microbatches / choice.size("data", "fsdp", "expert")
        tokens = rows * data.sequence / choice.size("context")
        head_dim = model.head_dim or model.embed // model.heads
        names = recomputed(model, choice.remat) - set(choice.offload)
        if "attention" in choice.offload:
            names -= {"scores"}
        return cls(
            model.layers / choice.size(PIPELINE_AXIS), tokens,
            tokens / (choice.size("model") if choice.sequence_parallel else 1), compute_bytes(precision), model.embed,
            model.heads * head_dim, 2 * (model.kv_heads or model.heads) * head_dim, frozenset(names),
        )  # fmt: skip


def ring_fraction(choice: LayoutChoice, axes: tuple[str, ...]) -> float:
    """Fraction of a tensor that a device sends around the ring of these axes."""
    n = choice.size(*axes)
    return (n - 1) / n


def collective_rows(
    choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes, moe: MoeConfig | None, ticks: int,
    vocab_chunks: int,
) -> list[CollectiveRow]:  # fmt: skip
    """Lists the collectives of a step.

    Args:
        choice: the layout.
        parameters: sharded sizes of its parameters.
        sizes: its sizes on a device.
        moe: of the model.
        ticks: of the pipeline schedule.
        vocab_chunks: chunks of the vocabulary in the loss.
    """
    rows = [
        *_weights(choice, parameters, sizes, vocab_chunks), *_tensor(choice, sizes, parameters),
        *_context(choice, sizes), *_experts(choice, sizes, moe), *_pipeline(choice, sizes, ticks),
    ]  # fmt: skip
    return [row for row in rows if row.bytes and choice.size(*row.axes) > 1]


def _weights(
    choice: LayoutChoice, parameters: ParameterSizes, sizes: DeviceSizes, vocab_chunks: int
) -> list[CollectiveRow]:
    m, out = choice.microbatches, []
    runs = {"layers": sizes.layers * m, "loss": vocab_chunks * m, "edges": m}
    for (part, axes), size in parameters.gathers.items():
        if part != "edges":
            sent = 2 * m * ring_fraction(choice, axes) * size
            out.append(CollectiveRow("weights", "all-gather", axes, 2 * runs[part], sent))
    for (part, op, axes), size in parameters.reduces.items():
        passes = 2 if op == "all-reduce" else 1
        sent = passes * m * ring_fraction(choice, axes) * size
        out.append(CollectiveRow("gradients", op, axes, runs[part], sent))
    for (op, axes), size in parameters.once.items():
        passes = 2 if op == "all-reduce" else 1
        out.append(CollectiveRow("once", op, axes, 8, passes * ring_fraction(choice, axes) * size))
    for axes, tables in Counter(parameters.table_axes).items():
        row_runs = m * (tables + 1)  # tables with the same sharding share one exchange of gradients
        moved = row_runs * sizes.residual_tokens * sizes.embed * sizes.activation_bytes
        for axis in axes:
            sent = ring_fraction(choice, (axis,)) * moved
            out.append(CollectiveRow("rows", "all-to-all", (axis,), row_runs, sent))
    return out


def _tensor(choice: LayoutChoice, sizes: DeviceSizes, parameters: ParameterSizes) -> list[CollectiveRow]:
    if choice.size("model") == 1:
        return []
    m, axes = choice.microbatches, ("model",)
    fraction = ring_fraction(choice, axes)
    one = fraction * sizes.tokens * sizes.embed * sizes.activation_bytes
    scatters = 4 + ("o" in sizes.recomputed)
    statistics = CollectiveRow("loss", "all-reduce", axes, 2 * m, 6 * m * fraction * sizes.tokens * 4)
    ends = 1 + parameters.vocab_sharded  # the loss, and a table that is sharded as the head is
    by_width = parameters.width_sharded
    if not choice.sequence_parallel:
        runs = m * (scatters * sizes.layers + ends)
        rows = CollectiveRow("rows", "all-gather", axes, m * by_width, m * by_width * one)
        return [CollectiveRow("tensor", "all-reduce", axes, runs, 2 * runs * one), rows, statistics]
    gathers, scatters = m * (6 * sizes.layers + ends), m * (scatters * sizes.layers + ends)
    moved = 2 * m * by_width
    return [
        CollectiveRow("tensor", "all-gather", axes, gathers, gathers * one),
        CollectiveRow("tensor", "reduce-scatter", axes, scatters, scatters * one),
        CollectiveRow("rows", "all-to-all", axes, moved, moved * one / choice.size("model")), statistics,
    ]  # fmt: skip


def _context(choice: LayoutChoice, sizes: DeviceSizes) -> list[CollectiveRow]:
    n, axes = choice.size("context"), ("context",)
    if n == 1:
        return []
    runs, again = choice.microbatches * sizes.layers, "scores" in sizes.recomputed
    split = choice.size("model")
    keys = sizes.tokens * sizes.key_value_width * sizes.activation_bytes / split
    if choice.context_parallel == "ring":
        hops = (1 + again) * (n - 1) + max(0, n - 3) + (n - 1) * 4 / sizes.activation_bytes
        permutes = runs * ((1 + again) * (n - 1) + n)
        return [CollectiveRow("context", "collective-permute", axes, permutes, runs * hops * keys)]
    if choice.context_parallel == "gather":
        size = ring_fraction(choice, axes) * keys * n
        return [
            CollectiveRow("context", "all-gather", axes, 2 * runs * (1 + again), runs * (1 + again) * size),
            CollectiveRow("context", "reduce-scatter", axes, runs, runs * size),
        ]
    moved = sizes.tokens * (2 * sizes.query_width + sizes.key_value_width) * sizes.activation_bytes / split
    passes = runs * (2 + again)
    return [CollectiveRow("context", "all-to-all", axes, 4 * passes, passes * ring_fraction(choice, axes) * moved)]


def _experts(choice: LayoutChoice, sizes: DeviceSizes, moe: MoeConfig | None) -> list[CollectiveRow]:
    axes = ("expert",)
    if moe is None or choice.size("expert") == 1:
        return []
    passes = 2 + ("experts_down" in sizes.recomputed)
    runs = 2 * passes * choice.microbatches * sizes.layers
    copies = moe.top_k * max(1.0, moe.capacity_factor or 1.0)
    moved = copies * sizes.residual_tokens * sizes.embed * sizes.activation_bytes
    return [CollectiveRow("experts", "all-to-all", axes, runs, runs * ring_fraction(choice, axes) * moved)]


def _pipeline(choice: LayoutChoice, sizes: DeviceSizes, ticks: int) -> list[CollectiveRow]:
    axes = (PIPELINE_AXIS,)
    if choice.size(PIPELINE_AXIS) == 1:
        return []
    stream = sizes.residual_tokens * sizes.embed * sizes.activation_bytes
    reduces = 4 * choice.microbatches
    return [
        CollectiveRow("pipeline", "collective-permute", axes, 2 * ticks, 2 * ticks * stream),
        CollectiveRow("pipeline", "all-reduce", axes, reduces, 2 * reduces * ring_fraction(choice, axes) * stream),
    ]


@dataclass(eq=False)
class CollectivePrices:
    """Time of collectives over mesh axes, as alpha + beta x bytes.

    Devices are in the order of the target; the last dims of a torus belong to the fastest axes. Only the first group
    of each axis is priced, since all are alike.
    """

    target: Target
    chip: Chip
    calibration: Calibration
    devices: int
    _prices: dict[tuple, tuple[float, float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torus = self.target.shape if isinstance(self.chip.inside, Torus) else ()
        positions = [self._position(device) for device in range(self.devices)]
        self.fabric = Fabric(self.chip, self.calibration, torus, positions)

    def _position(self, device: int) -> DevicePosition:
        inside, shape = self.chip.inside, self.target.shape
        if isinstance(inside, Switch):
            return DevicePosition(device // inside.domain_size(shape[1] if len(shape) > 1 else self.devices))
        index, core = divmod(device, self.chip.devices)
        coords = []
        for size in reversed(shape):
            index, coord = divmod(index, size)
            coords.append(coord)
        return DevicePosition(index, tuple(reversed(coords)), core)

    def seconds(self, choice: LayoutChoice, row: CollectiveRow) -> tuple[float, str]:
        """Returns the seconds of all runs, and the name of the network."""
        key = choice.sizes, row.axes, row.op
        if key not in self._prices:
            groups = _groups(choice.sizes, row.axes, row.op)
            empty, full = (self.fabric.collective_time(row.op, groups, sent) for sent in (0.0, GIGA))
            alpha = empty.seconds or 0.0
            self._prices[key] = alpha, ((full.seconds or 0.0) - alpha) / GIGA, full.network
        alpha, beta, network = self._prices[key]
        return row.runs * alpha + row.bytes * beta, network


def _groups(sizes: tuple[int, ...], axes: tuple[str, ...], op: str) -> list[list[int]]:
    """First group of devices along some axes; for a permute all pairs of neighbours in it."""
    group = [0]
    for index, (axis, size) in enumerate(zip(AXES, sizes)):
        if axis in axes:
            stride = prod(sizes[index + 1 :])
            group = [start + step * stride for start in group for step in range(size)]
    if op != "collective-permute":
        return [group]
    return [[a, b] for a, b in zip(group, [*group[1:], group[0]])]
