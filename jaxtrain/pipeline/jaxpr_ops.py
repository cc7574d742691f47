"""A jaxpr as a list of operations of which a part can be run. Calls are inlined, `scan` and `shard_map` are opened."""

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
    """A value that an operation reads or computes; in a loop body it stands for the values of all iterations.

    Attributes:
        aval: shape and dtype of one iteration.
        iterations: product of the lengths of all loops around it.
        constant: its value if it is a number in the program.
    """

    aval: Any
    iterations: int = 1
    constant: Any = VARIABLE

    @property
    def is_constant(self) -> bool:
        """True if it is a number in the program."""
        return self.constant is not VARIABLE

    @property
    def nbytes(self) -> int:
        """Bytes over all iterations."""
        return self.aval.size * self.aval.dtype.itemsize * self.iterations


@dataclass(eq=False)
class Op:
    """One equation."""

    eqn: Any
    inputs: list[Value]
    outputs: list[Value]


class LoopValue(NamedTuple):
    """A value outside of a loop, and the value that stands for it in the body."""

    outer: Value
    inner: Value


class Carry(NamedTuple):
    """A loop's carry: before the loop, at the start and at the end of an iteration, and after the loop."""

    init: Value
    inner: Value
    out: Value
    final: Value


@dataclass(eq=False)
class Loop:
    """A `lax.scan`, or a `jax.shard_map`: its iterations are its devices, and all its inputs are `xs`.

    Attributes:
        body_values: all values of the body and of the loops in it.
    """

    eqn: Any
    length: int
    body: Ops
    consts: list[LoopValue]
    carries: list[Carry]
    xs: list[LoopValue]
    ys: list[LoopValue]
    body_values: set[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.body_values = {link.inner for link in (*self.consts, *self.carries, *self.xs)}
        for op in self.body:
            self.body_values.update(op.outputs, op.body_values if isinstance(op, Loop) else ())

    @property
    def outputs(self) -> list[Value]:
        """Results of the loop."""
        return [*(carry.final for carry in self.carries), *(link.outer for link in self.ys)]

    @property
    def is_scan(self) -> bool:
        """True for a scan. Its ys stack the values of all iterations, which is the form in which values are saved."""
        return self.eqn.primitive is primitives.scan_p


Ops = list[Op | Loop]


def flatten(jaxpr: Any, args: Sequence[Value], iterations: int = 1) -> tuple[Ops, list[Value]]:
    """Returns the operations that apply a (closed) jaxpr to `args`, and their results.

    Raises:
        ValueError: an equation reads or writes a Ref.
    """
    inner, constants = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    pairs = zip(inner.constvars, constants, strict=True)
    values = {var: Value(var.aval, iterations, constant) for var, constant in pairs}
    values.update(zip(inner.invars, args, strict=True))

    def read(atom: Any) -> Value:
        return Value(atom.aval, iterations, atom.val) if hasattr(atom, "val") else values[atom]

    ops: Ops = []
    for eqn in inner.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive in CALLS:
            called = next(eqn.params[name] for name in ("jaxpr", "call_jaxpr") if name in eqn.params)
            called_ops, outputs = flatten(called, inputs, iterations)
            ops += called_ops
        else:
            outputs = [Value(var.aval, iterations) for var in eqn.outvars]
            ops.append(_operation(eqn, inputs, outputs, iterations))
        values.update(zip(eqn.outvars, outputs, strict=True))
    return ops, [read(atom) for atom in inner.outvars]


def _operation(eqn: Any, inputs: list[Value], outputs: list[Value], iterations: int) -> Op | Loop:
    if eqn.primitive is primitives.scan_p or eqn.primitive.name == "shard_map":
        return _loop(eqn, inputs, outputs, iterations)
    # The class has no public name.
    if any(parent.__name__ == "RefEffect" for effect in eqn.effects for parent in type(effect).__mro__):
        raise ValueError(f"{eqn.primitive}: a pullback that is to be split must not use Refs")
    return Op(eqn, inputs, outputs)


def _loop(eqn: Any, inputs: list[Value], outputs: list[Value], iterations: int) -> Loop:
    jaxpr, is_scan = eqn.params["jaxpr"], eqn.primitive is primitives.scan_p
    length = (
        eqn.params["length"]
        if is_scan
        else prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    )
    body_inputs = [Value(var.aval, iterations * length) for var in getattr(jaxpr, "jaxpr", jaxpr).invars]
    body, body_outputs = flatten(jaxpr, body_inputs, iterations * length)
    links, results = list(map(LoopValue, inputs, body_inputs)), list(map(LoopValue, outputs, body_outputs))
    if not is_scan:
        return Loop(eqn, length, body, [], [], links, results)
    # The rank tells the parts apart: xs and ys have one dim more outside.
    carries = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in results)
    first_x = len(links) - sum(outer.aval.ndim > inner.aval.ndim for outer, inner in links)
    first_carry = first_x - carries
    carried = [Carry(*start, end.inner, end.outer) for start, end in zip(links[first_carry:first_x], results)]
    return Loop(eqn, length, body, links[:first_carry], carried, links[first_x:], results[carries:])


def walk(ops: Ops) -> Iterable[Op | Loop]:
    """Yields all operations, including those of loop bodies."""
    for op in ops:
        yield op
        if isinstance(op, Loop):
            yield from walk(op.body)


def add_dependencies(ops: Ops, needed: set[Value], available: Iterable[Value] = ()) -> set[Value]:
    """Adds to `needed` all values that it is computed from, up to the `available` ones. Returns `needed`."""
    available = frozenset(available)

    def is_computed(value: Value) -> bool:
        return value in needed and value not in available

    def add_loop(loop: Loop) -> None:
        needed.update(link.inner for link in loop.ys if is_computed(link.outer))
        before = -1
        while before != len(needed):
            before = len(needed)
            for carry in loop.carries:
                if is_computed(carry.final) or is_computed(carry.inner):
                    needed.update(carry)
            add_dependencies(loop.body, needed, available)
        needed.update(link.outer for link in (*loop.consts, *loop.xs) if is_computed(link.inner))

    for op in reversed(ops):
        if isinstance(op, Loop):
            add_loop(op)
        elif any(is_computed(output) for output in op.outputs):
            needed.update(op.inputs)
    return needed


def add_dependents(ops: Ops, values: set[Value]) -> set[Value]:
    """Adds to `values` all values that are computed from it. Returns `values`."""
    for op in ops:
        if not isinstance(op, Loop):
            if not values.isdisjoint(op.inputs):
                values.update(op.outputs)
            continue
        values.update(link.inner for link in (*op.consts, *op.xs) if link.outer in values)
        before = -1
        while before != len(values):
            before = len(values)
            for carry in op.carries:
                if not values.isdisjoint(carry[:3]):
                    values.update(carry[1:])
            add_dependents(op.body, values)
        values.update(link.outer for link in op.ys if link.inner in values)
    return values


Bindings = dict[Value, Any]


@dataclass(frozen=True, eq=False)
class OpProgram:
    """Runs those operations that compute the needed values.

    Attributes:
        ops: all operations.
        needed: the values to compute and all that they are computed from (`add_dependencies`).
        inputs: values that are passed in; a value of a loop body with those of all iterations.
        saved: values to return in addition to the results, likewise.
    """

    ops: Ops
    needed: set[Value]
    inputs: frozenset[Value]
    saved: list[Value]

    def __call__(self, inputs: Bindings, results: Sequence[Value]) -> tuple[list[Any], list[Any]]:
        """Returns (results, saved)."""
        env = dict(inputs)
        saved = self._run(self.ops, env, inputs)
        return [_read(env, value) for value in results], [saved[value] for value in self.saved]

    def _is_computed(self, value: Value) -> bool:
        return value in self.needed and value not in self.inputs

    def _run(self, ops: Ops, env: Bindings, inputs: Bindings) -> Bindings:
        """Adds the results of the operations to `env`. Returns the saved values of these operations and loops."""
        saved: Bindings = {}
        for op in ops:
            if isinstance(op, Loop):
                saved |= self._run_loop(op, env, inputs)
            elif any(self._is_computed(output) for output in op.outputs):
                env.update(zip(op.outputs, _evaluate(op.eqn, [_read(env, value) for value in op.inputs]), strict=True))
        return saved | {value: env[value] for value in self.saved if value in env}

    def _run_loop(self, loop: Loop, env: Bindings, inputs: Bindings) -> Bindings:
        """Runs a loop whose body has only the needed operations."""
        if loop.is_scan:
            env.update({link.outer: inputs[link.inner] for link in loop.ys if link.inner in inputs})
        carries = [c for c in loop.carries if self._is_computed(c.final) or self._is_computed(c.inner)]
        ys = [link for link in loop.ys if self._is_computed(link.outer) and link.outer not in env]
        saved = [value for value in self.saved if value in loop.body_values]
        if not (carries or ys or saved):
            return {}
        body_inputs = [value for value in inputs if value in loop.body_values and value in self.needed]
        xs = [link for link in loop.xs if self._is_computed(link.inner)]
        consts = {link.inner: _read(env, link.outer) for link in loop.consts if self._is_computed(link.inner)}

        def body(carry: list[Any], x_slices: list[Any], input_slices: list[Any]) -> tuple[list[Any], ...]:
            local_inputs = dict(zip(body_inputs, input_slices))
            local = consts | local_inputs | dict(zip([link.inner for link in xs], x_slices))
            local |= dict(zip([c.inner for c in carries], carry))
            local |= self._run(loop.body, local, local_inputs)
            return tuple(
                [_read(local, value) for value in values]
                for values in ([c.out for c in carries], [link.inner for link in ys], saved)
            )

        run = _run_scan if loop.is_scan else _run_shard_map
        arrays = [_read(env, link.outer) for link in xs], [inputs[value] for value in body_inputs]
        with loop.eqn.ctx.manager:
            final, stacked, saved_arrays = run(loop, body, [_read(env, c.init) for c in carries], (xs, ys), arrays)
        env.update(zip([c.final for c in carries], final))
        env.update(zip([link.outer for link in ys], stacked))
        return dict(zip(saved, saved_arrays))


LoopInputs = tuple[list[Any], list[Any]]  # inputs of a body in addition to the carry: xs, and values passed in
Body = Callable[[list[Any], list[Any], list[Any]], tuple[list[Any], ...]]  # -> carry, ys, saved values
Links = tuple[list[LoopValue], list[LoopValue]]  # xs and ys of the loop to run


def _run_scan(loop: Loop, body: Body, init: list[Any], links: Links, inputs: LoopInputs) -> tuple[list[Any], ...]:
    def step(carry: list[Any], slices: LoopInputs) -> tuple[list[Any], Any]:
        carry, *outputs = body(carry, *slices)
        return carry, tuple(outputs)

    params = {name: loop.eqn.params[name] for name in ("length", "reverse", "unroll")}
    final, outputs = lax.scan(step, init, inputs, **params)
    return final, *outputs


def _run_shard_map(loop: Loop, body: Body, init: list[Any], links: Links, inputs: LoopInputs) -> tuple[list[Any], ...]:
    """Runs the body on every device. Saved values have a leading dim of devices."""
    params, (xs, ys) = loop.eqn.params, links
    axes = params["newly_manual_axes"]
    saved_spec = PartitionSpec(tuple(axis for axis in params["mesh"].axis_names if axis in axes))
    x_specs = [spec for link, spec in zip(loop.xs, params["in_specs"]) if link in xs]
    y_specs = [spec for link, spec in zip(loop.ys, params["out_specs"]) if link in ys]

    def local(xs: list[Any], saved: list[Any]) -> LoopInputs:
        _, results, saved = body(init, xs, [x[0] for x in saved])
        return results, [x[None] for x in saved]

    specs = {"in_specs": (x_specs, saved_spec), "out_specs": (y_specs, saved_spec)}
    run = jax.shard_map(local, mesh=params["mesh"], axis_names=axes, check_vma=params["check_vma"], **specs)
    return init, *run(*inputs)


def _read(env: Bindings, value: Value) -> Any:
    if not value.is_constant:
        return env[value]
    return value.constant if isinstance(value.constant, jax.Array) else jnp.asarray(value.constant, value.aval.dtype)


def _evaluate(eqn: Any, inputs: list[Any]) -> list[Any]:
    """Evaluates an equation on arrays, as in JAX's guide to jaxpr interpreters."""
    # The context (mesh, compute_on) and an equation's parameters for `bind` have no public names.
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return outputs if eqn.primitive.multiple_results else [outputs]
