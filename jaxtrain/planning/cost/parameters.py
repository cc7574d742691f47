"""Sharded sizes of the decoder's parameters: bytes on a device, gathered and reduced.

The same rules that place the train state (`mesh.rules`), applied to the table of parameters (`models.tensors`), so
bytes of parameters and moments are exact. Traffic is the textbook's: a weight that is stored in shards over the axes
of the tokens is gathered before each use and its gradient scattered (FSDP, ZeRO 3); replicas reduce gradients, of each
microbatch or once a step (Rajbhandari et al. 2020, arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.models.decoder_params import decoder_tensors
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

Over = tuple[str, ...]  # mesh axes
COMPUTE = {"fp32": 4}  # bytes of weights in use and of activations, else 2
STORED = {"bf16_pure": 2}  # bytes of parameters and moments, else 4
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 1, "adafactor": 0}  # of a matrix


@dataclass
class Weights:
    """Weights of one device, in bytes unless stated otherwise.

    Args:
        params, optimizer: the train state.
        gradients: float32 where several are added up; else those of layers as they travelled.
        copies: weights gathered over the replicas for the whole step (ZeRO 1 and 2).
        gathered: one layer's weights, gathered for use.
        elements: parameters that the device stores.
        placed: elements of all its layers before they are gathered for use.
        layer: elements of one layer's matrices in use.
        table: elements of the embedding tables that the device holds when their gradient is made.
        gathers: (part, axes) -> size of the weights, all layers together, that every pass gathers.
        reduces: (part, op, axes) -> size of the gradients that every microbatch reduces.
        once: (op, axes) -> size of what is gathered or reduced once a step.
        rows: of each embedding table the axes over which its rows travel instead of it.
        by_width, by_ids: number of these that are sharded by width alone, and of those that are sharded as a head is.
    """

    params: float = 0
    optimizer: float = 0
    gradients: float = 0
    copies: float = 0
    gathered: float = 0
    elements: float = 0
    placed: float = 0
    layer: float = 0
    table: float = 0
    gathers: dict[tuple[str, Over], float] = field(default_factory=dict)
    reduces: dict[tuple[str, str, Over], float] = field(default_factory=dict)
    once: dict[tuple[str, Over], float] = field(default_factory=dict)
    rows: list[Over] = field(default_factory=list)
    by_width: int = 0
    by_ids: int = 0


def weigh(config: Config, vocab: int) -> Weights:
    """The decoder of a config, whose mesh has all its sizes."""
    return _ShardedSizes(config, vocab).weights()


class _ShardedSizes:
    """One config's rules and sizes."""

    def __init__(self, config: Config, vocab: int) -> None:
        self.config, self.vocab = config, vocab
        self.sizes: dict[str, int] = {axis: getattr(config.mesh, axis) for axis in AXES}
        self.rules: Rules = with_implied_rules(config.rules, config.zero)
        self.wide, self.own = COMPUTE.get(config.precision, 2), STORED.get(config.precision, 4)
        # With microbatches, replicas that keep whole gradients reduce them once a step.
        self.several = config.step.microbatches > 1 or self.sizes[PIPELINE_AXIS] > 1
        self.once = self.several and config.zero <= 1 and self.sizes[DATA_AXIS] > 1

    def size(self, axes: Iterable[str]) -> int:
        return prod(self.sizes[axis] for axis in axes)

    def weights(self) -> Weights:
        sizes: dict[str, int | None] = {**self.sizes}
        kv_heads, table = (shards(self.rules, sizes, name) or 1 for name in ("kv_heads", TABLE))
        tensors = decoder_tensors(self.config.model, self.vocab, kv_heads, table)
        out = Weights()
        for path, (shape, names) in tensors.items():
            self._add(out, path, shape, names)
        return out

    def _add(self, out: Weights, path: str, shape: tuple[int, ...], names: Names) -> None:
        stored = storage_dims(names, shape, self.rules, self.sizes, self.config.zero)
        placed = compute_dims(names, shape, self.rules, self.sizes)
        is_matrix = _is_matrix(names)
        # Norms and routers are used as they are stored, a selection bias in float32.
        own = 4 if path.endswith("moe/bias") else self.own
        travels = own if path.endswith(("scale", "norm/bias", "moe/router", "moe/bias")) else self.wide
        storage = storage_axes(self.rules, names)
        over = tuple(a for a in AXES if self.sizes[a] > 1 and a in storage and any(a in dim for dim in placed))
        elements, before = self._elements(shape, stored), self._elements(shape, placed)
        used = before * self.size(over)
        self._state(out, elements, own, path, shape, names)
        made = travels if stored == placed and names[:1] == (LAYERS,) else own
        out.gradients += (4 if self.several else made) * (before if self.once else elements)
        layers = max(1, shape[0] // max(1, self.size(axes_of(LAYERS, self.rules)))) if names[:1] == (LAYERS,) else 1
        if names[:1] == (LAYERS,):
            out.placed += before
            out.layer += used / layers if is_matrix else 0
            out.gathered += travels * used / layers if over else 0
        if stored != placed:
            out.copies += travels * before
            _sum(out.once, ("all-gather", (DATA_AXIS,)), travels * before)
        part = "layers" if names[:1] == (LAYERS,) else "loss" if self._is_head(path) else "edges"
        is_table = path.endswith("/table")
        if is_table:
            out.table += before
            out.rows.append(over)
            out.by_width, out.by_ids = out.by_width + (TABLE in names), out.by_ids + (TABLE not in names)
        if over and (not is_table or part == "loss"):
            _sum(out.gathers, (part, over), travels * used)
        self._reduced(out, part, stored, used * travels, before * travels, names)

    def _state(self, out: Weights, elements: int, width: int, path: str, shape: tuple[int, ...], names: Names) -> None:
        optimizer, is_matrix = self.config.optimizer, _is_matrix(names)
        moments: float = MOMENTS[optimizer.name]
        if optimizer.name == "muon" and (not is_matrix or "vocab" in names or TABLE in names):
            moments = 2  # AdamW
        if optimizer.name == "adafactor":  # a row and a column of a matrix
            moments = 1 / min(shape[-2:]) + 1 / max(shape[-2:]) if is_matrix else 1
        if path.endswith("moe/bias"):
            moments = 0
        out.elements += elements
        out.params += width * elements
        out.optimizer += (width * moments + 4 * (optimizer.ema_decay is not None)) * elements

    def _is_head(self, path: str) -> bool:
        return path == ("embed/table" if self.config.model.tie_embeddings else "head")

    def _elements(self, shape: tuple[int, ...], dims: tuple[tuple[str, ...], ...]) -> int:
        return shard_size(shape, [self.size(axes) for axes in dims])

    def _reduced(
        self, out: Weights, part: str, stored: tuple[tuple[str, ...], ...], used: float, before: float, names: Names
    ) -> None:
        """Gradients: summed over the axes that split tokens, and left in the shards of the train state."""
        split = {*axes_of(BATCH, self.rules), *axes_of(CONTEXT, self.rules)}
        if EXPERT in names:
            split -= set(axes_of(EXPERT, self.rules))
        elif used == before and not any("model" in dim for dim in stored):
            split |= set(axes_of(SEQUENCE, self.rules))  # norms, of tokens that the sequence shares out
        axes = [a for a in AXES if a in split and self.sizes[a] > 1 and not (self.once and a == DATA_AXIS)]
        scatter = tuple(a for a in axes if any(a in dim for dim in stored))
        rest = tuple(a for a in axes if a not in scatter)
        if part == "edges" and scatter and any(set(scatter) <= set(over) for over in out.rows):
            scatter = ()  # the table's rows travel, not its gradient
            used = before
        if scatter:
            _sum(out.reduces, (part, "reduce-scatter", scatter), used)
        if rest:
            _sum(out.reduces, (part, "all-reduce", rest), used / self.size(scatter))
        if self.once and DATA_AXIS in split:
            op = "all-reduce" if self.config.zero == 0 else "reduce-scatter"
            _sum(out.once, (op, (DATA_AXIS,)), before)


def _is_matrix(names: Names) -> bool:
    """Returns whether the optimizer sees a matrix (`optim.param_dims`): heads and their size are one side, so that
    their bias is a vector.
    """
    return sum(name not in (LAYERS, "head_dim") for name in names) > 1


def _sum(table: dict, key: tuple, value: float) -> None:
    table[key] = table.get(key, 0.0) + value
