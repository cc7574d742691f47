"""Sharded sizes of the decoder's parameters: bytes on a device, and bytes that are gathered and reduced.

Applies the rules that shard the train state (`sharding.rules`) to the table of parameters (`models.decoder_params`), so
bytes of parameters and moments are exact. Traffic is the textbook's: a weight sharded over the axes of the tokens is
gathered before each use and its gradient scattered (FSDP, ZeRO 3); replicas reduce gradients, for each microbatch or
once a step (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from jaxtrain.models.decoder_params import decoder_tensors
from jaxtrain.planning.choices import Workload
from jaxtrain.planning.cost.memory import shard_size
from jaxtrain.sharding.axes import AXES
from jaxtrain.sharding.context_parallel import shards
from jaxtrain.sharding.rules import (
    BATCH,
    CONTEXT,
    DATA_AXIS,
    EXPERT,
    LAYERS,
    PIPELINE_AXIS,
    SEQUENCE,
    TABLE,
    Names,
    Rules,
    axes_of,
    compute_dims,
    storage_axes,
    storage_dims,
    with_implied_rules,
)

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]  # mesh axes of each dim
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0}  # optimizer moments of a matrix


def stored_bytes(precision: str) -> int:
    """Bytes of a number of the stored parameters."""
    return 2 if precision == "bf16_pure" else 4


def compute_bytes(precision: str) -> int:
    """Bytes of an element of weights in use and of activations."""
    return 4 if precision == "fp32" else 2


@dataclass
class ParameterSizes:
    """Sharded parameters of one device, in bytes unless stated otherwise.

    Args:
        params, optimizer: the train state.
        gradients: float32 if accumulated; else those of layers keep their communication dtype.
        copies: weights gathered over the replicas for the whole step (ZeRO 1 and 2).
        gathered: one layer's weights, gathered for use.
        elements: parameters in the train state of the device.
        layer_shards: elements of all layers before they are gathered for use.
        layer_elements: elements of one layer's matrices in use.
        table_elements: elements of the embedding tables, as sharded while their gradient is computed.
        gathers: (part, axes) -> size of the weights of all layers that every pass gathers.
        reduces: (part, op, axes) -> size of the gradients that every microbatch reduces.
        once: (op, axes) -> size of what is gathered or reduced once a step.
        table_axes: for each embedding table the axes over which its rows are exchanged.
        width_sharded, vocab_sharded: number of these tables sharded along their width, and along the vocabulary.
    """

    params: float = 0
    optimizer: float = 0
    gradients: float = 0
    copies: float = 0
    gathered: float = 0
    elements: float = 0
    layer_shards: float = 0
    layer_elements: float = 0
    table_elements: float = 0
    gathers: dict[tuple[str, Axes], float] = field(default_factory=lambda: defaultdict(float))
    reduces: dict[tuple[str, str, Axes], float] = field(default_factory=lambda: defaultdict(float))
    once: dict[tuple[str, Axes], float] = field(default_factory=lambda: defaultdict(float))
    table_axes: list[Axes] = field(default_factory=list)
    width_sharded: int = 0
    vocab_sharded: int = 0


@dataclass
class ParameterSharding:
    """Rules of one layout, applied to a decoder's parameters.

    Args:
        workload: model, optimizer, precision and vocabulary.
        axis_sizes: of all mesh axes.
        layout_rules: of the layout.
        zero: ZeRO stage.
        microbatches: of a step.
    """

    workload: Workload
    axis_sizes: Mapping[str, int]
    layout_rules: Rules
    zero: int
    microbatches: int

    def __post_init__(self) -> None:
        self.rules = with_implied_rules(self.layout_rules, self.zero)
        self.compute_bytes = compute_bytes(self.workload.precision)
        self.storage_bytes = stored_bytes(self.workload.precision)
        self.accumulates = self.microbatches > 1 or self.axis_sizes[PIPELINE_AXIS] > 1
        # With microbatches, replicas that keep unsharded gradients reduce them once a step.
        self.reduces_once = self.accumulates and self.zero <= 1 and self.axis_sizes[DATA_AXIS] > 1

    def sizes(self) -> ParameterSizes:
        """Computes the sharded sizes."""
        kv_heads, table = (shards(self.rules, self.axis_sizes, name) or 1 for name in ("kv_heads", TABLE))
        tensors = decoder_tensors(self.workload.model, self.workload.vocab, kv_heads, table)
        self._out = ParameterSizes()
        for path, (shape, names) in tensors.items():
            self._add(path, shape, names)
        return self._out

    def _add(self, path: str, shape: tuple[int, ...], names: Names) -> None:
        out = self._out
        stored = storage_dims(names, shape, self.rules, self.axis_sizes, self.zero)
        placed = compute_dims(names, shape, self.rules, self.axis_sizes)
        # Norms and routers are used in their storage dtype, a selection bias in float32.
        storage_bytes = 4 if path.endswith("moe/bias") else self.storage_bytes
        is_cast = not path.endswith(("scale", "norm/bias", "moe/router", "moe/bias"))
        gather_bytes = self.compute_bytes if is_cast else storage_bytes
        storage = storage_axes(self.rules, names)
        axes = tuple(a for a in AXES if self.axis_sizes[a] > 1 and a in storage and any(a in dim for dim in placed))
        elements, shard = self._elements(shape, stored), self._elements(shape, placed)
        used = shard * self._size(axes)
        self._add_state(elements, storage_bytes, path, shape, names)
        is_layer = names[:1] == (LAYERS,)
        gradient_bytes = gather_bytes if stored == placed and is_layer else storage_bytes
        gradient_elements = shard if self.reduces_once else elements
        out.gradients += (4 if self.accumulates else gradient_bytes) * gradient_elements
        if is_layer:
            layers = max(1, shape[0] // max(1, self._size(axes_of(LAYERS, self.rules))))
            out.layer_shards += shard
            out.layer_elements += used / layers if _is_matrix(names) else 0
            out.gathered += gather_bytes * used / layers if axes else 0
        if stored != placed:
            out.copies += gather_bytes * shard
            out.once["all-gather", (DATA_AXIS,)] += gather_bytes * shard
        is_head = path == ("embed/table" if self.workload.model.tie_embeddings else "head")
        part = "layers" if is_layer else "loss" if is_head else "edges"
        is_table = path.endswith("/table")
        if is_table:
            out.table_elements += shard
            out.table_axes.append(axes)
            out.width_sharded += TABLE in names
            out.vocab_sharded += TABLE not in names
        if axes and (not is_table or is_head):
            out.gathers[part, axes] += gather_bytes * used
        self._add_gradients(part, stored, used * gather_bytes, shard * gather_bytes, names)

    def _add_state(self, elements: int, storage_bytes: int, path: str, shape: tuple[int, ...], names: Names) -> None:
        out, optimizer, is_matrix = self._out, self.workload.optimizer, _is_matrix(names)
        moments: float = MOMENTS.get(optimizer.name, 2)  # of optax's most have two
        if optimizer.name == "muon" and (not is_matrix or "vocab" in names or TABLE in names):
            moments = 2  # AdamW
        if optimizer.name == "adafactor":  # a row and a column of a matrix
            moments = 1 / min(shape[-2:]) + 1 / max(shape[-2:]) if is_matrix else 1
        if path.endswith("moe/bias"):
            moments = 0
        out.elements += elements
        out.params += storage_bytes * elements
        out.optimizer += (storage_bytes * moments + 4 * (optimizer.ema_decay is not None)) * elements

    def _add_gradients(self, part: str, stored: Dims, used: float, shard: float, names: Names) -> None:
        """Gradients are summed over the axes that split tokens, into the shards of the train state."""
        out = self._out
        split = {*axes_of(BATCH, self.rules), *axes_of(CONTEXT, self.rules)}
        if EXPERT in names:
            split -= set(axes_of(EXPERT, self.rules))
        elif used == shard and not any("model" in dim for dim in stored):
            split |= set(axes_of(SEQUENCE, self.rules))  # norms of a sharded sequence
        axes = [a for a in AXES if a in split and self.axis_sizes[a] > 1 and not (self.reduces_once and a == DATA_AXIS)]
        scatter = tuple(a for a in axes if any(a in dim for dim in stored))
        rest = tuple(a for a in axes if a not in scatter)
        if part == "edges" and scatter and any(set(scatter) <= set(others) for others in out.table_axes):
            scatter = ()  # rows of the table are exchanged instead of its gradient
            used = shard
        if scatter:
            out.reduces[part, "reduce-scatter", scatter] += used
        if rest:
            out.reduces[part, "all-reduce", rest] += used / self._size(scatter)
        if self.reduces_once and DATA_AXIS in split:
            out.once["all-reduce" if self.zero == 0 else "reduce-scatter", (DATA_AXIS,)] += shard

    def _size(self, axes: Iterable[str]) -> int:
        return prod(self.axis_sizes[axis] for axis in axes)

    def _elements(self, shape: tuple[int, ...], dims: Dims) -> int:
        return shard_size(shape, [self._size(axes) for axes in dims])


def _is_matrix(names: Names) -> bool:
    """Returns whether the optimizer treats a parameter as a matrix (`optim.param_dims`).

    Heads and head_dim are one side of it, so the bias of heads is a vector.
    """
    return sum(name not in (LAYERS, "head_dim") for name in names) > 1
