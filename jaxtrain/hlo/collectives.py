"""Collectives of a compiled step: runs and bytes by operation and mesh axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.hlo import device_groups, parse
from jaxtrain.hlo.call_sites import CallSite, call_sites
from jaxtrain.hlo.device_groups import Groups
from jaxtrain.sharding.layout import Layout


def check_permutes_on_first_call(step: Any) -> Any:
    """Wraps the jitted step of a pipeline: its first call raises UserError if the compiled program could hang.

    Stages run different actions in a tick, but a collective-permute waits for all devices; the CPU backend then hangs
    (see `divergent_permutes`). The partitioner inserts such permutes too, for example for a rule for `head_dim`.
    """
    compiled: list[Any] = []

    def run(state: Any, batch: Any) -> Any:
        if not compiled:
            compiled.append(step.lower(state, batch).compile())
            if permutes := divergent_permutes(compiled[0].as_text() or ""):
                problem = f"{len(permutes)} collective-permutes that only some stages reach, the first {permutes[0]}"
                expected = "expected a layout without them (no rule for head_dim, no context_parallel: ring)"
                raise UserError(f"mesh.pipeline: the compiled step has {problem}; {expected}")
        return compiled[0](state, batch)

    return run


@dataclass(frozen=True)
class Collective:
    """Runs of one kind of collective in a step.

    Args:
        op: `all-gather`, `reduce-scatter`, `all-reduce`, `all-to-all`, `ragged-all-to-all`, `collective-permute` or
            `collective-broadcast`.
        axes: mesh axes along which the devices of a group differ.
        spans_axes: groups are the full product of these axes, not a part of it; always True for a permute.
        count: runs per step; collectives that the compiler combined count as one.
        bytes: bytes that a device sends per step.
        dtype: element type, `bf16+f32` if one operation moves both.
        scope: JAX's name scopes, which name the part of the model; empty if the compiler lost them.
        note: `at most` in a branch of a conditional, `at least` in a loop of unknown trip count; else empty.
    """

    op: str
    axes: tuple[str, ...]
    spans_axes: bool
    count: int
    bytes: int
    dtype: str
    scope: str
    note: str = ""

    @property
    def axes_text(self) -> str:
        """`data+fsdp`, or `part of model`."""
        return ("" if self.spans_axes else "part of ") + "+".join(self.axes)


@dataclass(frozen=True)
class LocatedCollective:
    """One collective of a program: its call site, its device groups, and all its runs."""

    site: CallSite
    groups: Groups
    collective: Collective


def count_collectives(
    text: str, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None, pod: Layout | None = None
) -> list[Collective]:
    """Counts the collectives of a compiled step, most bytes first; those within one device are left out.

    Bytes are those of ring algorithms with n devices in a group: (n - 1) / n of the full tensor for all-gather,
    reduce-scatter and all-to-all, twice that for all-reduce, the tensor for a permute, and (n - 1) / n of it for a
    broadcast along a ring. A ragged all-to-all counts as if the smaller of its operand and its result were full: over
    all devices, as much is received as sent.

    Args:
        text: `compiled.as_text()`.
        sizes: size of every mesh axis, in order, such as `Mesh.shape`; their product is the number of devices.
        dcn: factor of each axis that spans TPU slices, as in `mesh.dcn`.
        pod: layout of the smaller mesh for which the text was compiled instead of this one.

    Raises:
        ValueError: the text is no compiled program, has replica groups of an unknown form, or has groups that
            `device_groups.expand_groups` can not expand to the larger mesh.
    """
    rows: dict[Collective, Collective] = {}
    for located in locate_collectives(parse.parse(text), sizes, dcn, pod):
        one = located.collective
        key = replace(one, count=0, bytes=0)
        total = rows.get(key, key)
        rows[key] = replace(one, count=total.count + one.count, bytes=total.bytes + one.bytes)
    return sorted(rows.values(), key=lambda row: (-row.bytes, row.op, row.axes, row.scope))


def locate_collectives(
    module: parse.Module, sizes: Mapping[str, int], dcn: Mapping[str, int] | None = None, pod: Layout | None = None
) -> list[LocatedCollective]:
    """Every collective of a program, once for each path to it; those within one device are left out.

    Arguments and errors are those of `count_collectives`.
    """
    dcn = dcn or {}
    compiled_sizes, compiled_dcn = (sizes, dcn) if pod is None else (pod.sizes, pod.dcn)
    out = []
    for site in call_sites(module):
        compiled = _groups(site, compiled_sizes, compiled_dcn)
        groups = compiled if pod is None else _expanded_groups(site, compiled, pod, sizes, dcn)
        axes, spans_axes = device_groups.group_axes(groups, sizes)
        if axes:
            size, dtype = _tensor(site, module.computations[site.computation], max(map(len, compiled)))
            out.append(LocatedCollective(site, groups, Collective(
                site.op, axes, spans_axes or site.op == "collective-permute", site.runs,
                round(site.runs * _sent_bytes(site.op, size, max(map(len, groups)))), dtype,
                _scope(site.instruction, module.computations[site.computation]) or site.scope, _note(site),
            )))  # fmt: skip
    return out


def _groups(site: CallSite, sizes: Mapping[str, int], dcn: Mapping[str, int]) -> Groups:
    """Device groups of a call site, of the program that was compiled for a mesh."""
    attributes, is_permute = site.instruction.attributes, site.op == "collective-permute"
    if site.instruction.op == "send":
        groups = device_groups.dcn_groups(sizes, dcn)
        return tuple(pair for group in groups for pair in pairwise(group)) if is_permute else groups
    if is_permute:
        groups = device_groups.source_target_pairs(attributes)
    else:
        groups = device_groups.replica_groups(device_groups.replica_groups_text(attributes), prod(sizes.values()))
    return device_groups.expand_slice_groups(groups, sizes, dcn)


def _expanded_groups(
    site: CallSite, groups: Groups, pod: Layout, sizes: Mapping[str, int], dcn: Mapping[str, int]
) -> Groups:
    """Device groups of a call site of a pod's program, on the larger mesh."""
    if site.instruction.op == "send":
        return _groups(site, sizes, dcn)
    small, large = device_groups.split_dcn_axes(pod.sizes, pod.dcn), device_groups.split_dcn_axes(sizes, dcn)
    enlarged = [axis for axis in device_groups.group_axes(groups, small)[0] if small[axis] != large[axis]]
    if site.op == "collective-permute" and enlarged:
        raise ValueError(f"HLO: a permute along {'+'.join(enlarged)}")
    return device_groups.expand_groups(groups, small, large)


def _tensor(site: CallSite, computation: parse.Computation, members: int) -> tuple[int, str]:
    """Bytes of a group's full tensor, and its element types.

    The result of a reduce-scatter is one of its shards, and so is the operand of a gather's `send`. Of a ragged
    all-to-all the smaller of operand and result counts, which has less unused room.
    """
    instruction = site.instruction
    shape = instruction.result
    if site.op == "ragged-all-to-all" and (source := computation.get(instruction.operands[0])):
        shape = min(source.shape, shape, key=lambda one: one.bytes)
    sharded_op = "all-gather" if instruction.op == "send" else "reduce-scatter"
    is_shard = instruction.collective == sharded_op
    return shape.bytes * (members if is_shard else 1), "+".join(sorted({leaf.dtype for leaf in shape.leaves}))


def _sent_bytes(op: str, size: int, members: int) -> float:
    """Bytes that a device sends around a ring."""
    fraction = (members - 1) / members
    return size * {"all-reduce": 2 * fraction, "collective-permute": 1.0}.get(op, fraction)


def _note(site: CallSite) -> str:
    if site.is_unbounded:
        return "at least"
    return "at most" if site.is_conditional or site.op == "ragged-all-to-all" else ""


def _scope(instruction: parse.Instruction, computation: parse.Computation, depth: int = 8) -> str:
    """Scope of a collective, or of its operands: the compiler drops it from combined collectives."""
    level = [instruction]
    for _ in range(depth):
        if scope := next((one.scope for one in level if one.scope), ""):
            return scope
        names = dict.fromkeys(name for one in level for name in one.operands if name in computation)
        level = [computation[name] for name in names]
    return ""


def divergent_permutes(text: str) -> list[str]:
    """Collective-permutes that only some devices may reach, one line each: in a branch or a loop of unknown length.

    On CPU a permute waits for every device, also for those that took another branch: the program hangs.
    """
    return [
        f"{site.instruction.name} in computation {site.computation}"
        + (f" ({site.instruction.scope})" if site.instruction.scope else "")
        for site in call_sites(parse.parse(text))
        if (site.is_conditional or site.is_unbounded) and site.op == "collective-permute"
    ]


def totals_by_axes(rows: Iterable[Collective]) -> dict[tuple[str, str], tuple[int, int]]:
    """(axes, op) -> (count, bytes) per step, most bytes first."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for row in rows:
        count, size = totals.get((row.axes_text, row.op), (0, 0))
        totals[row.axes_text, row.op] = count + row.count, size + row.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def shorten_scope(scope: str) -> str:
    """Drops the parts that every scope has: `jit(step)/jvp()/while/body/closed_call/x` becomes `jvp()/x`."""
    common = ("while", "body", "closed_call", "eval_jaxpr", "cond", "branch_1_fun", "sharding_constraint")
    parts = scope.split("/")
    text = "/".join(part for part in parts if part not in common and not part.startswith("jit(step")) or parts[-1]
    return text if len(text) <= 72 else text[:69] + "..."
