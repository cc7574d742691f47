"""A jaxpr as a list of operations, of which some can be run: calls are inlined, `scan` and `shard_map` are open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives
from jax.sharding import PartitionSpec

CALLS = {
    primitives.jit_p, primitives.remat_p, primitives.custom_jvp_call_p, primitives.custom_vjp_call_p,
    primitives.closed_call_p, primitives.call_p,
}  # fmt: skip
VARIABLE = object()


@dataclass(eq=False)
class Value:
    """Value that an operation reads or makes; one of a loop's body stands for those of all its iterations.

    times: how many iterations all loops around it have together. constant: what it always is.
    """

    aval: Any
    times: int = 1
    constant: Any = VARIABLE

    @property
    def is_constant(self) -> bool:
        """True if it is the same at any time, a number in the program."""
        return self.constant is not VARIABLE

    @property
    def nbytes(self) -> int:
        """Bytes of all iterations' values."""
        return self.aval.size * self.aval.dtype.itemsize * self.times


@dataclass(eq=False)
class Op:
    """One equation."""

    eqn: Any
    ins: list[Value]
    outs: list[Value]


class LoopValue(NamedTuple):
    """A value as operations outside of a loop know it, and those inside."""

    outer: Value
    inner: Value


class Carry(NamedTuple):
    """A loop's carry: before the loop, at the begin and the end of an iteration, and after the loop."""

    init: Value
    inner: Value
    out: Value
    final: Value


@dataclass(eq=False)
class Loop:
    """A `lax.scan`; or a `jax.shard_map`, whose iterations are its devices, and whose inputs are all `xs`.

    inside: all values that its body and the loops in it make.
    """

    eqn: Any
    length: int
    body: Ops
    consts: list[LoopValue]
    carries: list[Carry]
    xs: list[LoopValue]
    ys: list[LoopValue]
    inside: set[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.inside = {link.inner for link in (*self.consts, *self.carries, *self.xs)}
        for op in self.body:
            self.inside.update(op.outs, op.inside if isinstance(op, Loop) else ())

    @property
    def outs(self) -> list[Value]:
        """Values that it makes outside."""
        return [*(carry.final for carry in self.carries), *(link.outer for link in self.ys)]

    @property
    def stacks(self) -> bool:
        """True if its results are all iterations' values, one after the other, as they are when kept."""
        return self.eqn.primitive is primitives.scan_p


Ops = list[Op | Loop]


def flatten(jaxpr: Any, args: Sequence[Value], times: int = 1) -> tuple[Ops, list[Value]]:
    """Operations that do what a (closed) jaxpr does to `args`, and their results.

    Raises:
        ValueError: an equation that reads or writes a Ref.
    """
    inner, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    values = {var: Value(var.aval, times, constant) for var, constant in zip(inner.constvars, constants, strict=True)}
    values.update(zip(inner.invars, args, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.aval, times, atom.val) if hasattr(atom, "val") else values[atom]

    ops: Ops = []
    for eqn in inner.eqns:
        ins = [read(atom) for atom in eqn.invars]
        if eqn.primitive in CALLS:
            more, outs = flatten(_called(eqn), ins, times)
            ops += more
        else:
            outs = [Value(var.aval, times) for var in eqn.outvars]
            ops.append(_operation(eqn, ins, outs, times))
        values.update(zip(eqn.outvars, outs, strict=True))
    return ops, [read(atom) for atom in inner.outvars]


def _called(eqn: Any) -> Any:
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params)


def _operation(eqn: Any, ins: list[Value], outs: list[Value], times: int) -> Op | Loop:
    if eqn.primitive is primitives.scan_p:
        return _scan(eqn, ins, outs, times)
    if eqn.primitive.name == "shard_map":
        return _map(eqn, ins, outs, times)
    # The class has no public name.
    if any(parent.__name__ == "RefEffect" for effect in eqn.effects for parent in type(effect).__mro__):
        raise ValueError(f"{eqn.primitive}: a pull-back that is to be split must not use Refs")
    return Op(eqn, ins, outs)


def _body(eqn: Any, length: int, times: int) -> tuple[Ops, list[Value], list[Value]]:
    """Operations, inputs and results of one iteration."""
    body = eqn.params["jaxpr"]
    inner = [Value(var.aval, times * length) for var in getattr(body, "jaxpr", body).invars]
    ops, outs = flatten(body, inner, times * length)
    return ops, inner, outs


def _scan(eqn: Any, ins: list[Value], finals: list[Value], times: int) -> Loop:
    """A scan's parts, told apart by their dims: what is stacked has one more outside than inside."""
    length = eqn.params["length"]
    body, inner, outs = _body(eqn, length, times)
    carries = sum(final.aval.ndim == out.aval.ndim for final, out in zip(finals, outs))
    stacked = sum(value.aval.ndim > own.aval.ndim for value, own in zip(ins, inner))
    consts = len(ins) - carries - stacked
    links, results = list(map(LoopValue, ins, inner)), list(map(LoopValue, finals, outs))
    own = [Carry(*before, after.inner, after.outer) for before, after in zip(links[consts:], results[:carries])]
    return Loop(eqn, length, body, links[:consts], own, links[consts + carries :], results[carries:])


def _map(eqn: Any, ins: list[Value], finals: list[Value], times: int) -> Loop:
    length = prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    body, inner, outs = _body(eqn, length, times)
    return Loop(eqn, length, body, [], [], list(map(LoopValue, ins, inner)), list(map(LoopValue, finals, outs)))


def walk(ops: Ops) -> Iterable[Op | Loop]:
    """Yields the operations, also those of loops' bodies."""
    for op in ops:
        yield op
        if isinstance(op, Loop):
            yield from walk(op.body)


def mark(ops: Ops, wanted: set[Value], given: Iterable[Value] = ()) -> set[Value]:
    """Adds to `wanted` all that it is computed from, as far as that is not given. Returns it."""
    given = frozenset(given)

    def is_made(value: Value) -> bool:
        return value in wanted and value not in given

    def of_loop(loop: Loop) -> None:
        wanted.update(link.inner for link in loop.ys if is_made(link.outer))
        before = -1
        while before != len(wanted):
            before = len(wanted)
            for carry in loop.carries:
                if is_made(carry.final) or is_made(carry.inner):
                    wanted.update(carry)
            mark(loop.body, wanted, given)
        wanted.update(link.outer for link in (*loop.consts, *loop.xs) if is_made(link.inner))

    for op in reversed(ops):
        if isinstance(op, Loop):
            of_loop(op)
        elif any(is_made(out) for out in op.outs):
            wanted.update(op.ins)
    return wanted


def spread(ops: Ops, touched: set[Value]) -> set[Value]:
    """Adds to `touched` all that is computed from it. Returns it."""
    for op in ops:
        if not isinstance(op, Loop):
            if not touched.isdisjoint(op.ins):
                touched.update(op.outs)
            continue
        touched.update(link.inner for link in (*op.consts, *op.xs) if link.outer in touched)
        before = -1
        while before != len(touched):
            before = len(touched)
            for carry in op.carries:
                if not touched.isdisjoint(carry[:3]):
                    touched.update(carry[1:])
            spread(op.body, touched)
        touched.update(link.outer for link in op.ys if link.inner in touched)
    return touched


@dataclass(frozen=True, eq=False)
class OpProgram:
    """Operations that make the wanted values.

    Args:
        ops: all of them.
        wanted: what to make, and all that it is made from (`mark`).
        given: what comes in; of a value in a loop, those of all iterations.
        kept: what goes out besides, likewise.
    """

    ops: Ops
    wanted: set[Value]
    given: frozenset[Value]
    kept: list[Value]

    def __call__(self, given: dict[Value, Any], results: Sequence[Value]) -> tuple[list[Any], list[Any]]:
        """(results, kept) from what is given."""
        made = dict(given)
        kept = self._run(self.ops, made, given)
        return [_read(made, value) for value in results], [kept[value] for value in self.kept]

    def _is_made(self, value: Value) -> bool:
        return value in self.wanted and value not in self.given

    def _run(self, ops: Ops, made: dict[Value, Any], given: dict[Value, Any]) -> dict[Value, Any]:
        """Adds to `made` what these operations make. Returns what of it, and of loops in it, is to be kept."""
        kept: dict[Value, Any] = {}
        for op in ops:
            if isinstance(op, Loop):
                kept |= self._loop(op, made, given)
            elif any(self._is_made(out) for out in op.outs):
                made.update(zip(op.outs, _bind(op.eqn, [_read(made, value) for value in op.ins]), strict=True))
        return kept | {value: made[value] for value in self.kept if value in made}

    def _loop(self, loop: Loop, made: dict[Value, Any], given: dict[Value, Any]) -> dict[Value, Any]:
        """The same for a loop: in its place, one with fewer operations."""
        if loop.stacks:
            made.update({link.outer: given[link.inner] for link in loop.ys if link.inner in given})
        carries = [c for c in loop.carries if self._is_made(c.final) or self._is_made(c.inner)]
        ys = [link for link in loop.ys if self._is_made(link.outer) and link.outer not in made]
        kept = [value for value in self.kept if value in loop.inside]
        if not (carries or ys or kept):
            return {}
        held = [value for value in given if value in loop.inside and value in self.wanted]
        xs = [link for link in loop.xs if self._is_made(link.inner)]
        consts = {link.inner: _read(made, link.outer) for link in loop.consts if self._is_made(link.inner)}

        def body(carry: list[Any], own_xs: list[Any], own_held: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            now = dict(zip(held, own_held))
            own = consts | now | dict(zip([link.inner for link in xs], own_xs))
            own |= dict(zip([c.inner for c in carries], carry))
            own |= self._run(loop.body, own, now)
            last = [_read(own, c.out) for c in carries]
            return last, [_read(own, link.inner) for link in ys], [_read(own, value) for value in kept]

        run = _scanned if loop.stacks else _mapped
        inputs = [_read(made, link.outer) for link in xs], [given[value] for value in held]
        with loop.eqn.ctx.manager:
            last, results, keeps = run(loop, body, [_read(made, c.init) for c in carries], (xs, ys), inputs)
        made.update(zip([c.final for c in carries], last))
        made.update(zip([link.outer for link in ys], results))
        return dict(zip(kept, keeps))


Inputs = tuple[list[Any], list[Any]]  # what a body takes besides the carry: slices of `xs`, and of what was kept
Body = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], list[Any], list[Any]]]


def _scanned(
    loop: Loop, body: Body, first: list[Any], links: tuple[list[LoopValue], list[LoopValue]], inputs: Inputs
) -> tuple[list[Any], list[Any], list[Any]]:
    def step(carry: list[Any], slices: Inputs) -> tuple[list[Any], Inputs]:
        carry, results, keeps = body(carry, *slices)
        return carry, (results, keeps)

    params = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}
    last, (results, keeps) = lax.scan(step, first, inputs, **params)
    return last, results, keeps


def _mapped(
    loop: Loop, body: Body, first: list[Any], links: tuple[list[LoopValue], list[LoopValue]], inputs: Inputs
) -> tuple[list[Any], list[Any], list[Any]]:
    """Maps over devices: kept values have a leading dim of devices."""
    params, (xs, ys) = loop.eqn.params, links
    axes = params["newly_manual_axes"]
    of_all = PartitionSpec(tuple(axis for axis in params["mesh"].axis_names if axis in axes))
    takes = [spec for link, spec in zip(loop.xs, params["in_specs"]) if link in xs]
    makes = [spec for link, spec in zip(loop.ys, params["out_specs"]) if link in ys]

    def local(own_xs: list[Any], own_held: list[Any]) -> Inputs:
        _, results, keeps = body(first, own_xs, [x[0] for x in own_held])
        return results, [x[None] for x in keeps]

    specs = {"in_specs": (takes, of_all), "out_specs": (makes, of_all)}
    run = jax.shard_map(local, mesh=params["mesh"], axis_names=axes, check_vma=params["check_vma"], **specs)
    return first, *run(*inputs)


def _read(made: dict[Value, Any], value: Value) -> Any:
    if not value.is_constant:
        return made[value]
    return value.constant if isinstance(value.constant, jax.Array) else jnp.asarray(value.constant, value.aval.dtype)


def _bind(eqn: Any, values: list[Any]) -> list[Any]:
    """An equation on other values, as in JAX's guide to jaxpr interpreters."""
    # The context (mesh, compute_on) and an equation's own functions have no public names.
    with eqn.ctx.manager:
        results = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]
