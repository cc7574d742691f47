"""What ZeRO stages and microbatches have to send, in the terms of wire_theory.

Parts are `layers`, `loss` and `step`: what happens once a step, to all weights or all gradients together. The compiler
combines that as it likes, so its count is the most there may be. The embedding's own traffic is left out, for
wire_theory has it; its weights count in `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from wire_theory import Rows, Sizes, fsdp, part, totals, tp_sp

from jaxtrain.hlo import collectives as wire

TENSORS = 12  # of the model: nine in the layers, table, head, final norm
SMALL = 100_000  # bytes: float32 of so little is norms and their gradients, which the compiler moves out of loops


def zero_totals(rows: Iterable[wire.Collective]) -> Rows:
    """Rows added up by op, axes and part, less the embedding's and the norms'."""
    kept = [row for row in rows if not is_embedding(row) and not (row.dtype == "f32" and row.bytes < SMALL * row.count)]
    return {(op, where, "step" if name == "edges" else name): row for (op, where, name), row in totals(kept).items()}


def is_embedding(row: wire.Collective) -> bool:
    """Token ids, and rows of the table or of its gradient on their way; not ids combined with weights."""
    named = ("_take" in row.scope or "embed" in row.scope) and "+" not in row.dtype
    own = named or row.dtype == "s32" or row.op == "all-to-all"
    return part(row) == "edges" and own


def zero_differences(measured: Rows, expected: Rows) -> list[str]:
    """One line for every (op, axes, part) whose count differs, or whose bytes by more than 2%."""
    out = []
    for key in sorted(measured.keys() | expected.keys()):
        (count, size), (number, theory) = measured.get(key, (0, 0)), expected.get(key, (0, 0.0))
        wrong = count > number if key[2] == "step" else count != number
        if wrong or abs(size - theory) > 0.02 * theory:
            out.append(f"{' '.join(key)}: {count} x, {size / 1e6:.3f} MB; theory {number} x, {theory / 1e6:.3f} MB")
    return out


def weights(s: Sizes) -> float:
    """Bytes of a device's weights in the compute dtype, norms in float32, as they travel together."""
    split = s.axes["model"] * s.axes["fsdp"]
    return (s.layers * s.weights + 2 * s.head) * s.width / split + s.layers * s.norms + 4 * s.embed


def once(inner: Callable[[Sizes], Rows], stage: int) -> Callable[[Sizes, int], Rows]:
    """Stages 0 and 1 with microbatches: over `data` one reduction of the gradients, in stage 1 also one gather."""

    def rows(s: Sizes, accumulate: int) -> Rows:
        size = s.ring("data") * weights(s)
        reduced: Rows = {("all-reduce", "data", "step"): (TENSORS, 2 * size)}
        if stage == 1:
            reduced = {
                ("reduce-scatter", "data", "step"): (TENSORS, size), ("all-gather", "data", "step"): (TENSORS, size),
            }  # fmt: skip
        return _times(accumulate, inner(replace(s, axes={**s.axes, "data": 1}))) | reduced

    return rows


def each(inner: Callable[[Sizes], Rows], over: str) -> Callable[[Sizes, int], Rows]:
    """Stage 2, and 1 with one microbatch: one gather a step, and every microbatch's gradients scattered `over` axes."""

    def rows(s: Sizes, accumulate: int) -> Rows:
        share, kept = s.ring(*over.split("+")) / s.axes["model"], inner(s)
        kept = {key: row for key, row in kept.items() if key[:2] != ("reduce-scatter", "fsdp")}
        gradients: Rows = {
            ("reduce-scatter", over, "layers"): (s.layers, share * s.layers * s.weights * s.width),
            ("reduce-scatter", over, "loss"): (s.chunks, share * s.head * s.width),
        }
        gathers: Rows = {("all-gather", "data", "step"): (TENSORS, s.ring("data") * weights(s))}
        return _times(accumulate, kept | gradients) | gathers

    return rows


def stage3(s: Sizes, accumulate: int) -> Rows:
    """As fsdp over `data` in every microbatch."""
    other = in_fsdp(replace(s, axes={**s.axes, "fsdp": s.axes["data"], "data": 1}))
    return _times(accumulate, {(op, "data", name): row for (op, _, name), row in other.items()})


def alone(s: Sizes) -> Rows:
    """A replica of one device."""
    return {}


def in_fsdp(s: Sizes) -> Rows:
    """Inside a replica: layers and loss of fsdp."""
    return {key: row for key, row in fsdp(s).items() if key[2] in ("layers", "loss") and key[0] != "all-reduce"}


def in_tensor(s: Sizes) -> Rows:
    """Inside a replica: layers and loss of tp_sp."""
    return {key: row for key, row in tp_sp(s).items() if key[2] in ("layers", "loss") and key[1] == "model"}


def _times(count: int, rows: Rows) -> Rows:
    return {key: (count * number, count * size) for key, (number, size) in rows.items()}


# Name -> layout, changes, theory.
ZERO: dict[str, tuple[str, dict[str, int], Callable[[Sizes, int], Rows]]] = {
    "ddp x4": ("ddp", {"step__microbatches": 4}, once(alone, 0)),
    "zero1": ("zero1", {}, each(alone, "data")),
    "zero1 x4": ("zero1", {"step__microbatches": 4}, once(alone, 1)),
    "zero2 x4": ("zero2", {"step__microbatches": 4}, each(alone, "data")),
    "zero3 x4": ("zero3", {"step__microbatches": 4}, stage3),
    "hsdp x4": ("hsdp", {"step__microbatches": 4}, once(in_fsdp, 0)),
    "zero1 hsdp x4": ("hsdp", {"zero": 1, "step__microbatches": 4}, once(in_fsdp, 1)),
    "zero2 hsdp x4": ("hsdp", {"zero": 2, "step__microbatches": 4}, each(in_fsdp, "data+fsdp")),
    "zero1 tp_sp x4": ("tp_sp", {"zero": 1, "step__microbatches": 4}, once(in_tensor, 1)),
    "zero2 tp_sp x4": ("tp_sp", {"zero": 2, "step__microbatches": 4}, each(in_tensor, "data")),
}
