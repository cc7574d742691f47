"""Communication of a step: every collective of the compiled program, counted by mesh axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from rich.table import Table

from jaxtrain.errors import UserError
from jaxtrain.hlo import device_groups, parse
from jaxtrain.hlo.call_sites import Site, sites
from jaxtrain.sharding.layout import Layout


def without_divergent_permutes(step: Any) -> Any:
    """The jitted step of a pipeline; its first call raises UserError where the compiled program could hang.

    Stages do different actions in a tick, and a collective-permute waits for all devices: the CPU backend
    for ever, see `divergent_permutes`. The partitioner makes them too, e.g. of a rule for `head_dim`.
    """
    compiled: list[Any] = []

    def run(state: Any, batch: Any) -> Any:
        if not compiled:
            compiled.append(step.lower(state, batch).compile())
            if found := divergent_permutes(compiled[0].as_text() or ""):
                what = f"{len(found)} permutations that not all stages would take part in, the first {found[0]}"
                expected = "expected a layout without (no rule for head_dim, no context: ring)"
                raise UserError(f"mesh.pipeline: the compiled step has {what}; {expected}")
        return compiled[0](state, batch)

    return run


@dataclass(frozen=True)
class Collective:
    """Runs of one kind of collective in one step.

    Args:
        op: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `ragged-all-to-all`, `collective-permute` or
            `collective-broadcast`.
        axes: mesh axes along which the devices that take part differ.
        whole: the groups are the whole product of these axes; a part of an axis is not. A permute is always whole.
        count: runs per step; what the compiler combined into one counts once.
        bytes: that a device sends per step.
        dtype: of what travels, `bf16+f32` where one operation moves both.
        scope: JAX's name scopes, which say what part of the model it is; empty where the compiler lost them.
        note: `at most` in a branch of a conditional, `at least` in a loop of unknown length; else empty.
    """

    op: str
    axes: tuple[str, ...]
    whole: bool
    count: int
    bytes: int
    dtype: str
    scope: str
    note: str = ""

    @property
    def where(self) -> str:
        """`data+fsdp`, or `part of model`."""
        return ("" if self.whole else "part of ") + "+".join(self.axes)


def report(
    text: str, sizes: Mapping[str, int], across: Mapping[str, int] | None = None, pod: Layout | None = None
) -> list[Collective]:
    """Every collective of a compiled step, most bytes first; those of a device with itself are left out.

    Bytes are those of ring algorithms, with n devices in a group: (n - 1) / n of the whole tensor for all-gather,
    reduce-scatter and all-to-all, twice that for all-reduce, the tensor for a permute, and (n - 1) / n of it for a
    broadcast along a ring. A ragged all-to-all counts as if the smaller of its operand and its result were full: over
    all devices, as much is received as sent.

    Args:
        text: `compiled.as_text()`.
        sizes: of all mesh axes in order, such as `Mesh.shape`; their product is the number of devices.
        across: part of each axis that spans TPU slices, as in `mesh.dcn`.
        pod: the smaller mesh that the text was compiled for in place of this one.

    Raises:
        ValueError: the text is no compiled program, has replica groups of an unknown form, or such as `groups.grown`
            cannot tell of a larger mesh.
    """
    rows: dict[Collective, Collective] = {}
    for found in located(parse.parse(text), sizes, across, pod):
        one = found.collective
        kind = replace(one, count=0, bytes=0)
        so_far = rows.get(kind, kind)
        rows[kind] = replace(one, count=so_far.count + one.count, bytes=so_far.bytes + one.bytes)
    return sorted(rows.values(), key=lambda row: (-row.bytes, row.op, row.axes, row.scope))


@dataclass(frozen=True)
class Located:
    """One collective of a program: where it stands, which devices it joins, and all its runs."""

    site: Site
    joined: device_groups.Groups
    collective: Collective


def located(
    module: parse.Module, sizes: Mapping[str, int], across: Mapping[str, int] | None = None, pod: Layout | None = None
) -> list[Located]:
    """Every collective of a program, once for each way to it; those of a device with itself are left out.

    Arguments and errors are those of `report`.
    """
    own, spans = (sizes, across or {}) if pod is None else (pod.sizes, pod.dcn)
    out = []
    for site in sites(module):
        compiled = _joined(site, own, spans)
        joined = compiled if pod is None else _grown(site, compiled, pod, sizes, across or {})
        if (one := _collective(module, site, compiled, joined, sizes)) is not None:
            out.append(Located(site, joined, one))
    return out


def _grown(
    site: Site, joined: device_groups.Groups, pod: Layout, sizes: Mapping[str, int], across: Mapping[str, int]
) -> device_groups.Groups:
    """The groups of a site of a pod's program on the mesh that the pod stands for."""
    if site.instruction.op == "send":
        return _joined(site, sizes, across)
    small, large = device_groups.split(pod.sizes, pod.dcn), device_groups.split(sizes, across)
    larger = [axis for axis in device_groups.axes_of(joined, small)[0] if small[axis] != large[axis]]
    if site.op == "collective-permute" and larger:
        raise ValueError(f"HLO: a permute along {'+'.join(larger)}")
    return device_groups.grown(joined, small, large)


def _joined(site: Site, sizes: Mapping[str, int], across: Mapping[str, int]) -> device_groups.Groups:
    attributes = site.instruction.attributes
    if site.instruction.op == "send":
        joined = device_groups.spanning(sizes, across)
        is_permute = site.op == "collective-permute"
        return tuple(pair for group in joined for pair in pairwise(group)) if is_permute else joined
    if site.op == "collective-permute":
        listed = device_groups.pairs(attributes)
    else:
        listed = device_groups.replica_groups(device_groups.groups_text(attributes), prod(sizes.values()))
    return device_groups.of_slices(listed, sizes, across)


def _collective(
    module: parse.Module,
    site: Site,
    compiled: device_groups.Groups,
    joined: device_groups.Groups,
    sizes: Mapping[str, int],
) -> Collective | None:
    """The runs of one collective in a step; None where it stays within a device. `compiled`: groups of the program."""
    instruction, computation = site.instruction, module.computations[site.computation]
    is_permute = site.op == "collective-permute"
    axes, whole = device_groups.axes_of(joined, sizes)
    if not axes:
        return None
    moved = _moved(site, computation)
    full = _full(site, moved, max(map(len, compiled)))
    return Collective(
        site.op, axes, whole or is_permute, site.times,
        round(site.times * _sent(site.op, full, max(map(len, joined)))),
        "+".join(sorted({leaf.dtype for leaf in moved.leaves})), _scope(instruction, computation) or site.scope,
        "at least" if site.unknown else "at most" if site.conditional or site.op == "ragged-all-to-all" else "",
    )  # fmt: skip


def _moved(site: Site, computation: parse.Computation) -> parse.HloShape:
    """Shape of the result; of a ragged all-to-all the operand where that is smaller, with less room for what moves."""
    result = site.instruction.result
    source = computation.get(site.instruction.operands[0]) if site.op == "ragged-all-to-all" else None
    return result if source is None else min(source.shape, result, key=lambda shape: shape.bytes)


def _full(site: Site, moved: parse.HloShape, members: int) -> int:
    """Bytes of the whole tensor of a group: a reduce-scatter's result is one of its shards.

    So is what a `send` gives to a gather.
    """
    if site.instruction.op == "send":
        return moved.bytes * (members if site.op == "all-gather" else 1)
    return moved.bytes * (members if site.instruction.collective == "reduce-scatter" else 1)


def _sent(op: str, full: int, members: int) -> float:
    """Bytes that a device sends around a ring."""
    share = (members - 1) / members
    return full * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(op, share)


def _scope(instruction: parse.Instruction, computation: parse.Computation, depth: int = 8) -> str:
    """The scope of a collective, or of what it moves: the compiler drops it where it combines several."""
    near = [instruction]
    for _ in range(depth):
        if found := next((one.scope for one in near if one.scope), ""):
            return found
        near = list({name: computation[name] for one in near for name in one.operands if name in computation}.values())
    return ""


def divergent_permutes(text: str) -> list[str]:
    """Collective-permutes that not every device may reach, one line each: in a branch of a conditional, or in a loop of
    unknown length. There must be none on CPU.

    There a permute waits for every device, also for those that took another branch: the program hangs.
    """
    module = parse.parse(text)
    return [
        f"{site.instruction.name} in computation {site.computation}"
        + (f" ({site.instruction.scope})" if site.instruction.scope else "")
        for site in sites(module)
        if (site.conditional or site.unknown) and site.op == "collective-permute"
    ]


def summary(rows: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(axes, op) -> (count, bytes) per step, most bytes first."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        count, size = totals.get((row.where, row.op), (0, 0))
        totals[row.where, row.op] = count + row.count, size + row.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def as_dict(rows: Iterable[Collective]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [{**asdict(row), "axes": list(row.axes)} for row in rows]


def from_dict(rows: Iterable[Mapping[str, Any]]) -> list[Collective]:
    """The inverse of `as_dict`."""
    return [Collective(**{**row, "axes": tuple(row["axes"])}) for row in rows]


def table(rows: Sequence[Collective], scopes: bool = True) -> Table:
    """The report for a screen: by axes and op, or one line for every scope; a total below."""
    out = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_footer=True, footer_style="bold")
    least = {"axes": max((len(row.where) for row in rows), default=5), "operation": 18, "count": 7, "GB sent": 10}
    footers = ("total", "", f"{sum(row.count for row in rows):,}", _gigabytes(sum(row.bytes for row in rows)))
    for (title, width), footer in zip(least.items(), footers):  # numbers are never cut
        right = "right" if title in ("count", "GB sent") else "left"
        out.add_column(title, footer=footer, justify=right, min_width=width, no_wrap=True)
    if not scopes:
        for (where, op), (count, size) in summary(rows).items():
            out.add_row(where, op, f"{count:,}", _gigabytes(size))
        return out
    out.add_column("type", no_wrap=True, min_width=8)
    out.add_column("scope", overflow="ellipsis", no_wrap=True)
    for row in rows:
        scope = " ".join(filter(None, (short(row.scope), f"({row.note})" if row.note else "")))
        out.add_row(row.where, row.op, f"{row.count:,}", _gigabytes(row.bytes), row.dtype, scope)
    return out


def short(scope: str) -> str:
    """A scope without what every scope has: `jit(step)/jvp()/while/body/closed_call/x` is `jvp()/x`."""
    common = ("while", "body", "closed_call", "cond", "branch_1_fun", "sharding_constraint")
    parts = scope.split("/")
    kept = [part for part in parts if part not in common and not part.startswith("jit(step")]
    text = "/".join(kept) or parts[-1]
    return text if len(text) <= 72 else text[:69] + "..."


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.4g}" if size >= 1e5 else f"{size / 1e9:.1e}" if size else "0"
