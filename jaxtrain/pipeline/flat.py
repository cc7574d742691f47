"""A jaxpr as a flat list of operations, of which some can be run: calls are inlined, loops are open."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import primitives

CALLS = {primitives.jit_p, primitives.remat_p, primitives.custom_jvp_call_p, primitives.custom_vjp_call_p}
VARIABLE = object()


@dataclass(eq=False)
class Value:
    """What an operation reads or makes; one of a loop's body stands for those of all its iterations.

    times: how many iterations all loops around it have together. constant: what it always is.
    """

    aval: Any
    times: int = 1
    constant: Any = VARIABLE

    @property
    def is_constant(self) -> bool:
        """Whether it is the same at any time, a number in the program."""
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


class Link(NamedTuple):
    """A value as an operation outside of a loop and one inside know it."""

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
    """A `lax.scan`. inside: all values that its body and the loops in it make."""

    eqn: Any
    length: int
    consts: list[Link] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    xs: list[Link] = field(default_factory=list)
    ys: list[Link] = field(default_factory=list)
    body: Ops = field(default_factory=list)
    inside: set[Value] = field(default_factory=set)


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
        elif eqn.primitive is primitives.scan_p:
            loop, outs = _loop(eqn, ins, times)
            ops.append(loop)
        else:
            _refuse_refs(eqn)
            outs = [Value(var.aval, times) for var in eqn.outvars]
            ops.append(Op(eqn, ins, outs))
        values.update(zip(eqn.outvars, outs, strict=True))
    return ops, [read(atom) for atom in inner.outvars]


def _called(eqn: Any) -> Any:
    return next(eqn.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in eqn.params)


def _refuse_refs(eqn: Any) -> None:
    # The class has no public name.
    if any(parent.__name__ == "RefEffect" for effect in eqn.effects for parent in type(effect).__mro__):
        raise ValueError(f"{eqn.primitive}: a pull-back that is to be split must not use Refs")


def _loop(eqn: Any, ins: list[Value], times: int) -> tuple[Loop, list[Value]]:
    """A scan's parts, told apart by their dims: what is stacked has one more outside than inside."""
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    inner = [Value(var.aval, times * length) for var in getattr(body, "jaxpr", body).invars]
    loop = Loop(eqn, length)
    loop.body, outs = flatten(body, inner, times * length)
    finals = [Value(var.aval, times) for var in eqn.outvars]
    carries = sum(final.aval.ndim == out.aval.ndim for final, out in zip(finals, outs))
    stacked = sum(value.aval.ndim > own.aval.ndim for value, own in zip(ins, inner))
    consts = len(ins) - carries - stacked
    links = [Link(*pair) for pair in zip(ins, inner)]
    loop.consts, loop.xs = links[:consts], links[consts + carries :]
    loop.carries = [
        Carry(link.outer, link.inner, out, final) for link, out, final in zip(links[consts:], outs, finals[:carries])
    ]
    loop.ys = [Link(final, out) for final, out in zip(finals[carries:], outs[carries:])]
    loop.inside = {*inner}.union(*(op.inside if isinstance(op, Loop) else op.outs for op in loop.body))
    loop.inside.update(link.outer for op in loop.body if isinstance(op, Loop) for link in op.ys)
    loop.inside.update(carry.final for op in loop.body if isinstance(op, Loop) for carry in op.carries)
    return loop, finals


def walk(ops: Ops) -> Iterable[Op | Loop]:
    """All operations, also those of loops' bodies."""
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
class Program:
    """Those of some operations that make what is wanted.

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
                kept |= self._scan(op, made, given)
            elif any(self._is_made(out) for out in op.outs):
                made.update(zip(op.outs, _bind(op.eqn, [_read(made, value) for value in op.ins]), strict=True))
        return kept | {value: made[value] for value in self.kept if value in made}

    def _scan(self, loop: Loop, made: dict[Value, Any], given: dict[Value, Any]) -> dict[Value, Any]:
        """The same for a loop: in its place, one with fewer operations."""
        made.update({link.outer: given[link.inner] for link in loop.ys if link.inner in given})
        carries = [c for c in loop.carries if self._is_made(c.final) or self._is_made(c.inner)]
        ys = [link for link in loop.ys if self._is_made(link.outer) and link.inner not in given]
        kept = [value for value in self.kept if value in loop.inside]
        if not (carries or ys or kept):
            return {}
        held = [value for value in given if value in loop.inside and value in self.wanted]
        xs = [link for link in loop.xs if self._is_made(link.inner)]
        consts = {link.inner: _read(made, link.outer) for link in loop.consts if self._is_made(link.inner)}
        stacked = list(dict.fromkeys([*(link.inner for link in ys), *kept]))

        def body(carry: list[Any], slices: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            own = consts | dict(zip((link.inner for link in xs), slices[0]))
            own |= dict(zip((c.inner for c in carries), carry))
            now = dict(zip(held, slices[1]))
            own |= now
            own |= self._run(loop.body, own, now)
            return [_read(own, c.out) for c in carries], [_read(own, value) for value in stacked]

        first = [_read(made, c.init) for c in carries]
        inputs = [_read(made, link.outer) for link in xs], [given[value] for value in held]
        params = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}
        with loop.eqn.ctx.manager:
            last, all_of = lax.scan(body, first, inputs, **params)
        results = dict(zip(stacked, all_of))
        made.update(zip((c.final for c in carries), last))
        made.update({link.outer: results[link.inner] for link in ys})
        return {value: results[value] for value in kept}


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

