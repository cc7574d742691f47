"""What each layout has to send: one function that measures a layout's real step, one table of what theory says.

A new layout: give its mesh in MESHES and its rows in EXPECTED. A row is (op, axes, part of the model) -> (count,
bytes per device); parts are `layers`, `loss` and `edges` (embedding, final norm, what happens once a step).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.hlo import collectives as wire
from jaxtrain.models.decoder_params import head_dim, parameter_count
from jaxtrain.planning import compile, step_program
from jaxtrain.planning.hardware import targets

Key = tuple[str, str, str]  # op, axes, part
Rows = dict[Key, tuple[int, float]]  # count, bytes

# For 16 devices; on fewer an axis is cut to 4.
MESHES = {
    "ddp": {"data": 16},
    "fsdp": {"fsdp": 16},
    "hsdp": {"data": 2, "fsdp": 8},
    "tp": {"data": 2, "model": 8},
    "tp_sp": {"data": 2, "model": 8},
    "fsdp_tp": {"fsdp": 2, "model": 8},
    "cp_ulysses": {"fsdp": 4, "context": 4},
    "cp_ring": {"fsdp": 2, "context": 8},
    "cp_gather": {"fsdp": 4, "context": 4},
    "ep": {"fsdp": 4, "expert": 4},
    "ep_tp": {"fsdp": 2, "expert": 4, "model": 2},
    "zero1": {"data": 16},
    "zero2": {"data": 16},
    "zero3": {"data": 16},
}
LLAMA = {
    "model.embed": 1024, "model.layers": 4, "model.heads": 16, "model.kv_heads": 8, "model.mlp": 2816,
    "model.vocab": 49152, "data.sequence": 2048, "step.remat": "full", "precision": "bf16", "step.attention": "xla",
}  # fmt: skip
ROWS = 2  # sequences per device and microbatch
# XLA weighs every tiling of this attention's softmax, which is six sevenths of compiling and changes no collective.
QUICK = "--xla_disable_hlo_passes=triton-softmax-rewriter"
SCALAR = 300  # bytes: an all-reduce of so little carries loss sums, gradient norms and tokens of experts


def together(layouts: Iterable[str]) -> list:
    """Layouts as parameters: tests of the same one run in the same process, where it is compiled once."""
    return [pytest.param(layout, marks=pytest.mark.xdist_group(f"wire {layout}")) for layout in layouts]


def configured(layout: str, mesh: dict[str, int], changes: dict[str, Any]) -> Config:
    count = prod(mesh.values())
    axes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    rows = ROWS * count * changes.get("step.microbatches", 1)
    keys = {**LLAMA, "data.global_batch": rows, **axes, **changes, "layout": layout}
    return resolve(None, *(f"{key}={value}" for key, value in keys.items()), paths=False)[0]


@functools.cache
def _measured(layout: str, target: str | None, changes: tuple) -> tuple[Config, dict[str, int], list[wire.Collective]]:
    mesh = MESHES[layout]
    if target is None or prod(targets.parse(target).shape) < 16:
        mesh = {axis: min(size, 4) for axis, size in mesh.items()}
    config = configured(layout, mesh, dict(changes))
    if target:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {QUICK}")
            report = compile.compile_report(config, None, target)
        return config, report.sizes, report.collectives
    devices = jax.devices()[: prod(mesh.values())]
    program = build_program(config, config.model.vocab, devices)
    text = step_program.compile_step(program).as_text() or ""
    return config, dict(program.layout.sizes), wire.count_collectives(text, program.layout.sizes)


def measured(
    layout: str, target: str | None = None, **changes: Any
) -> tuple[Config, dict[str, int], list[wire.Collective]]:
    """Config, sizes of the mesh axes and collectives; see `communication`."""
    return _measured(layout, target, _dotted(changes))


def communication(layout: str, target: str | None = None, **changes: Any) -> list[wire.Collective]:
    """Collectives of a layout's real step, on absent devices or (target None) compiled for simulated ones.

    Args:
        changes: of LLAMA, with `__` for a dot: `model__layers=2`.
    """
    return _measured(layout, target, _dotted(changes))[2]


def theory(layout: str, target: str | None = None, **changes: Any) -> Rows:
    """What the layout should send for the same config."""
    config, sizes, _ = _measured(layout, target, _dotted(changes))
    return {key: row for key, row in EXPECTED[layout](Sizes.of(config, sizes)).items() if row[1]}


def _dotted(changes: dict[str, Any]) -> tuple:
    return tuple((key.replace("__", "."), value) for key, value in changes.items())


def part(row: wire.Collective) -> str:
    """Part of the model that a row belongs to, by its scope; the loop over microbatches is none."""
    scope = re.sub(r"^jit\(step\)/(shard_map/)?while(/body)?(/closed_call|/eval_jaxpr)*", "", row.scope)
    # XLA names the gather of the stream in front of the loss by the loss, which reads it; newer XLA by our constraint,
    # as every XLA names ZeRO's gather of the weights, which is over `data`.
    is_constraint = re.fullmatch(r"(jit\(step\))?/jvp\(\)/sharding_constraint", scope)
    is_of_loss = "cross_entropy" in scope or (is_constraint and "model" in row.axes)
    return "loss" if is_of_loss else "layers" if "/while/" in scope else "edges"


def totals(rows: list[wire.Collective]) -> Rows:
    """Rows added up by op, axes and part, less the scalars."""
    out: Rows = {}
    for row in rows:
        if row.op == "all-reduce" and row.bytes <= SCALAR * row.count:
            continue
        key = (row.op, row.axes_text, part(row))
        count, size = out.get(key, (0, 0))
        out[key] = (count + row.count, size + row.bytes)
    return out


@dataclass(frozen=True)
class Sizes:
    """Elements and bytes that the formulas take. `width`: bytes of the compute dtype."""

    axes: dict[str, int]
    layers: int
    embed: int
    heads: int  # elements of a token's queries
    kv_heads: int  # of its keys and values together
    weights: int  # elements of a layer's matrices
    head: int  # elements of the head, and of the embedding table
    tokens: int  # per device
    chunks: int  # of the vocabulary in the loss
    width: int

    @classmethod
    def of(cls, config: Config, axes: dict[str, int]) -> Sizes:
        model, width = config.model, 4 if config.precision == "fp32" else 2
        assert model.vocab is not None
        head = model.vocab * model.embed
        everything = parameter_count(config.model, model.vocab)
        weights = (everything - 2 * head - model.embed) // model.layers - 2 * model.embed
        share = model.vocab // axes["model"]
        chunks = -(-share // min(share, max(512, -(-share // (config.loss.vocab_chunks * 128)) * 128)))
        tokens = config.data.sequence * ROWS
        size = head_dim(model)
        heads, kv_heads = model.heads * size, 2 * (model.kv_heads or model.heads) * size
        return cls(axes, model.layers, model.embed, heads, kv_heads, weights, head, tokens, chunks, width)

    def ring(self, *axes: str) -> float:
        n = prod(self.axes[axis] for axis in axes)
        return (n - 1) / n

    @property
    def stream(self) -> int:
        """Bytes of the residual stream of a tensor-parallel group."""
        return self.tokens * self.axes["model"] * self.embed * self.width

    @property
    def norms(self) -> int:
        """Bytes of a layer's two norms: their gradients are summed in float32."""
        return 2 * self.embed * 4


def ddp(s: Sizes) -> Rows:
    """Each gradient is reduced once."""
    twice = 2 * s.ring("data")
    return {
        ("all-reduce", "data", "layers"): (2 * s.layers, twice * s.layers * (s.weights * s.width + s.norms)),
        ("all-reduce", "data", "loss"): (s.chunks, twice * s.head * s.width),
        ("all-reduce", "data", "edges"): (2, twice * (s.head * s.width + s.embed * 4)),
    }


def fsdp(s: Sizes) -> Rows:
    """A layer is gathered for each pass and its gradient scattered; the table stays, its rows move."""
    return sharded(s, "fsdp") | rows_of_table(s, "fsdp") | {
        ("all-gather", "fsdp", "edges"): (1, s.ring("fsdp") * s.tokens * s.axes["model"] * s.axes["fsdp"] * 4),  # ids
    }  # fmt: skip


def sharded(s: Sizes, *axes: str) -> Rows:
    """Weights in shards over all of these axes together."""
    share, split, over = s.ring(*axes), s.axes["model"], "+".join(axes)
    weights, head = s.layers * s.weights * s.width / split, s.head * s.width / split
    return {
        ("all-gather", over, "layers"): (2 * s.layers, share * 2 * weights),
        ("reduce-scatter", over, "layers"): (s.layers, share * weights),
        ("all-reduce", over, "layers"): (s.layers, 2 * share * s.layers * s.norms),
        ("all-gather", over, "loss"): (2 * s.chunks, share * 2 * head),
        ("reduce-scatter", over, "loss"): (s.chunks, share * head),
        ("all-reduce", over, "edges"): (1, 2 * share * s.embed * 4),
    }


def rows_of_table(s: Sizes, *axes: str) -> Rows:
    """A device's rows of the table there, and their gradients back, over one axis after the other."""
    rows = s.tokens * s.embed * s.width
    return {("all-to-all", axis, "edges"): (2, s.ring(axis) * 2 * rows) for axis in axes}


def hsdp(s: Sizes) -> Rows:
    """FSDP in a group; across groups only the shards of the gradients."""
    twice, shards = 2 * s.ring("data"), s.axes["fsdp"]
    return moved_norms(fsdp(s), "fsdp", "data+fsdp", s) | {
        ("all-reduce", "data", "layers"): (s.layers, twice * s.layers * s.weights * s.width / shards),
        ("all-reduce", "data", "loss"): (s.chunks, twice * s.head * s.width / shards),
        ("all-reduce", "data", "edges"): (1, twice * s.head * s.width / shards),
    }


def moved_norms(rows: Rows, before: str, after: str, s: Sizes) -> Rows:
    """Norms are not sharded: their gradients are summed over every axis that splits tokens."""
    twice = 2 * s.ring(*after.split("+"))
    kept = {key: row for key, row in rows.items() if key[:2] != ("all-reduce", before)}
    return kept | {
        ("all-reduce", after, "layers"): (s.layers, twice * s.layers * s.norms),
        ("all-reduce", after, "edges"): (1, twice * s.embed * 4),
    }


def _statistics(s: Sizes) -> float:
    """Maximum, sum and label's logit of every token, float32, combined over the vocabulary's shards."""
    return 3 * 2 * s.ring("model") * s.tokens * s.axes["model"] * 4


def _replicas(s: Sizes) -> Rows:
    """Gradients of tensor-parallel shards over data."""
    twice, split = 2 * s.ring("data"), s.axes["model"]
    return {
        ("all-reduce", "data", "layers"): (s.layers, twice * s.layers * s.weights * s.width / split),
        ("all-reduce", "data", "loss"): (s.chunks, twice * s.head * s.width / split),
        ("all-reduce", "data", "edges"): (1, twice * s.head * s.width / split),
    }


def tp(s: Sizes) -> Rows:
    """Two sums of the stream in the forward pass, two backward, one recomputed; rows of the table gathered once."""
    stream, own = 2 * s.ring("model") * s.stream, _replicas(s)
    twice, over = 2 * s.ring("data"), ("all-reduce", "data")
    return own | {
        (*over, "layers"): (2 * s.layers, own[*over, "layers"][1] + twice * s.layers * s.norms),
        (*over, "edges"): (2, own[*over, "edges"][1] + twice * s.embed * 4),
        ("all-reduce", "model", "layers"): (5 * s.layers, 5 * s.layers * stream),
        ("all-reduce", "model", "loss"): (3, stream + _statistics(s)),
        ("all-gather", "model", "edges"): (1, s.ring("model") * s.stream),
    }


def tp_sp(s: Sizes) -> Rows:
    """Gathers 2 + 2 + 2 and scatters 2 + 1 + 2 a layer: forward, recomputed, backward; 1 and 1 for the loss."""
    stream = s.ring("model") * s.stream
    return moved_norms({}, "", "data+model" if s.axes["data"] > 1 else "fsdp+model", s) | _replicas(s) | {
        ("all-gather", "model", "layers"): (6 * s.layers, 6 * s.layers * stream),
        ("reduce-scatter", "model", "layers"): (5 * s.layers, 5 * s.layers * stream),
        ("all-gather", "model", "loss"): (1, stream),
        ("reduce-scatter", "model", "loss"): (1, stream),
        ("all-reduce", "model", "loss"): (2, _statistics(s)),
    } | rows_of_table(s, "model")  # fmt: skip


def fsdp_tp(s: Sizes) -> Rows:
    """Tensor and sequence parallel in a node, FSDP of its shards across nodes."""
    sharded = {key: row for key, row in fsdp(s).items() if key[0] != "all-reduce"}
    return tp_sp(s) | sharded


def _context(s: Sizes, arrays: int) -> Rows:
    """Weights as in fsdp, over both axes. Once a step each shard gathers ids of the whole row (for the table),
    documents (for attention), and under the ring positions."""
    ids = s.tokens * s.axes["context"] * 4
    return sharded(s, "fsdp", "context") | rows_of_table(s, "fsdp", "context") | {
        ("all-gather", "context", "edges"): (1, s.ring("context") * arrays * ids),
        ("all-gather", "fsdp", "edges"): (1, s.ring("fsdp") * ids * s.axes["fsdp"]),
    }  # fmt: skip


def cp_ulysses(s: Sizes) -> Rows:
    """All-to-alls of q, k, v and the output: forward, recomputed, backward."""
    moved = s.tokens * (2 * s.heads + s.kv_heads) * s.width
    return _context(s, 2) | {
        ("all-to-all", "context", "layers"): (12 * s.layers, 3 * s.layers * s.ring("context") * moved),
    }


def cp_ring(s: Sizes) -> Rows:
    """Keys and values make n - 1 hops forward, as many recomputed and as many backward, where their float32 gradients
    make n - 1 too; but the first two hops of the backward pass are those recomputed, and the compiler keeps these.
    It joins k and v in a hop; and backward, in n - 3 hops, k, v and their gradients."""
    n, keys = s.axes["context"], s.tokens * s.kv_heads * s.width
    hops = 2 * (n - 1) + (n - 3) + (n - 1) * 4 / s.width
    return _context(s, 3) | {
        ("collective-permute", "context", "layers"): (s.layers * (2 * (n - 1) + n), s.layers * hops * keys),
    }


def cp_gather(s: Sizes) -> Rows:
    """Keys and values are gathered forward and recomputed, their gradients scattered."""
    keys = s.layers * s.ring("context") * s.tokens * s.axes["context"] * s.kv_heads * s.width
    return _context(s, 2) | {
        ("all-gather", "context", "layers"): (4 * s.layers, 2 * keys),
        ("reduce-scatter", "context", "layers"): (s.layers, keys),
    }


EXPECTED: dict[str, Callable[[Sizes], Rows]] = {
    "ddp": ddp, "fsdp": fsdp, "hsdp": hsdp, "tp": tp, "tp_sp": tp_sp, "fsdp_tp": fsdp_tp,
    "cp_ulysses": cp_ulysses, "cp_ring": cp_ring, "cp_gather": cp_gather,
}  # fmt: skip
