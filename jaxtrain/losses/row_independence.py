"""Proof by tracing that a loss treats the rows of a batch independently.

The loss and its backward pass are traced at two numbers of rows. Where the size of a dim differs between the traces, it
is the dim of the rows, even if others happen to be as large; a number that differs was computed from the number of
rows. Both traces are followed equation by equation, with the dependence of every array on the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.losses.terms import Terms, are_pairs

Loss = Callable[[Any, Mapping[str, Any], jax.Array], tuple[Terms, Any]]  # (params, batch, key) -> (terms, counts)


class Dependence(Enum):
    """Relation of an array to the rows of the batch.

    Attributes:
        ZERO: all zeros.
        FREE: the same for every batch, however many rows it has.
        SUM: the sum of what it is for the parts of a batch.
        ROWS: one dim is of the rows: as many elements for each row, in order, which depend on that row alone, and in
            the same way for every row. Arrays of the kinds before have no such dim.
        MIXED: anything else.
    """

    ZERO, FREE, SUM, ROWS, MIXED = range(5)


ZERO, FREE, SUM, ROWS, MIXED = Dependence
CONSTANT, ADDITIVE = {ZERO, FREE}, {ZERO, SUM}

# Primitives by what they do with the dim of rows. Those that are listed nowhere mix rows.
CALLS = {
    "jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "checkpoint", "remat2", "custom_jvp_call",
    "custom_vjp_call",
}  # fmt: skip
IDENTITIES = {"sharding_constraint", "optimization_barrier", "device_put", "layout_constraint", "reshard"}
ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2", "logistic", "lt", "max", "min", "mul", "name",
    "ne", "neg", "nextafter", "not", "one_minus_square", "or", "population_count", "pow", "real", "reduce_precision",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
# Primitive -> parameter with the dims along which it combines or moves elements.
DIMS: dict[str, str] = {
    "reduce_sum": "axes", "reduce_max": "axes", "reduce_min": "axes", "reduce_prod": "axes", "reduce_and": "axes",
    "reduce_or": "axes", "argmax": "axes", "argmin": "axes", "cumsum": "axis", "cumprod": "axis", "cummax": "axis",
    "cummin": "axis", "cumlogsumexp": "axis", "split": "axis", "top_k": "axis", "sort": "dimension",
    "concatenate": "dimension", "rev": "dimensions",
}  # fmt: skip
# Linear primitives -> role of every operand, the last one's of all that follow. d: data, f: FREE.
LINEAR: dict[str, str] = {
    "add": "d", "add_any": "d", "broadcast_in_dim": "d", "concatenate": "d", "convert_element_type": "d", "copy": "d",
    "copy_p": "d", "cumsum": "d", "div": "df", "dynamic_slice": "df", "dynamic_update_slice": "ddf", "gather": "df",
    "name": "d", "neg": "d", "pad": "d", "reduce_precision": "d", "reduce_sum": "d", "reduce_window_sum": "d",
    "reshape": "d", "rev": "d", "scatter-add": "dfd", "select_n": "fd", "slice": "d", "split": "d", "squeeze": "d",
    "stop_gradient": "d", "sub": "d", "transpose": "d",
}  # fmt: skip
BILINEAR = {"mul", "dot_general", "conv_general_dilated"}
# Parameters that may differ, since they have sizes of outputs, or are the addition, which is traced anew each time.
UNCOMPARED = {
    "broadcast_in_dim": {"shape"}, "iota": {"shape"}, "reshape": {"new_sizes"}, "dynamic_slice": {"slice_sizes"},
    "gather": {"slice_sizes"}, "slice": {"limit_indices"}, "scatter-add": {"update_jaxpr", "update_consts"},
}  # fmt: skip


class _NotProvenError(Exception):
    """The two traces differ in more than sizes, or there are none."""


def rows_are_proven_independent(loss: Loss, params: Any, batch: Any, factor: int = 2) -> bool:
    """Returns whether the loss of `factor` batches, taken as one, is proven to be the sum of their losses.

    This is for the sum and the weight of every term, the gradients of the sums, and the counts. The sum and the weight
    of a term may also both be constants, such as a penalty on the parameters of weight 1. Whatever the proof does not
    know counts as mixing rows, as do draws from the random key and errors, which the step's own trace reports.

    Args:
        loss: (params, batch, key) -> ({name: (sum, weight)}, counts), a pure function.
        params: tree of ShapeDtypeStruct, to differentiate by.
        batch: tree of ShapeDtypeStruct, each with a leading dim of rows.
        factor: number of batches, 2 or more.
    """
    try:
        terms, pairs, counts, grads = _trace_twice(loss, params, batch, factor)
        kinds_of_pairs = [set(pair) for pair in (*terms.values(), *pairs.values())]
        if not all(kinds <= ADDITIVE or kinds <= CONSTANT for kinds in kinds_of_pairs) or not counts <= ADDITIVE:
            return False
        constant = {name for name, pair in terms.items() if not set(pair) <= ADDITIVE}
        if not constant:
            return grads <= ADDITIVE
        # The gradients of additive and of constant terms together are neither.
        parts = ((terms.keys() - constant, ADDITIVE), (constant, CONSTANT))
        return all(_trace_twice(loss, params, batch, factor, names)[-1] <= kinds for names, kinds in parts)
    except _NotProvenError:
        return False


def _trace_twice(loss: Loss, params: Any, batch: Any, factor: int, names: Collection[str] | None = None) -> tuple:
    """Returns the dependence on the rows of all that the loss computes.

    The backward pass is traced, and not the derivative that it transposes: it may be a function of the user's own.

    Args:
        loss, params, batch, factor: see `rows_are_proven_independent`.
        names: terms to differentiate; default: all.

    Returns:
        (terms, counts that are pairs (sum, weight), set for all other counts, set for all gradients).
    """
    key = jax.eval_shape(lambda: jax.random.key(0))

    def run(params: Any, scale: jax.Array, batch: Any, key: jax.Array) -> Any:
        def total(params: Any) -> tuple[jax.Array, Any]:
            terms, counts = loss(params, batch, key)
            chosen = [jnp.asarray(pair[0]) for name, pair in terms.items() if names is None or name in names]
            split = (counts, None) if are_pairs(counts) else ({}, counts)
            return scale * sum(chosen, jnp.zeros(())), (terms, *split)

        grads, aux = jax.grad(total, has_aux=True)(params)
        return *aux, grads

    def trace(factor: int) -> tuple[Any, Any]:
        grown = jax.tree.map(lambda s: jax.ShapeDtypeStruct((factor * s.shape[0], *s.shape[1:]), s.dtype), batch)
        scale = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.make_jaxpr(run, return_shape=True)(params, scale, grown, key)

    try:
        (small, shapes), (large, large_shapes) = trace(1), trace(factor)
    except Exception as error:
        raise _NotProvenError from error
    structure, leaves = jax.tree.structure(shapes), jax.tree.leaves(batch)
    _require(structure == jax.tree.structure(large_shapes) and not small.effects and not large.effects)
    inputs = [*[FREE] * (len(jax.tree.leaves(params)) + 1), *[ROWS] * len(leaves), MIXED]
    kinds = _Walk(leaves[0].shape[0] if leaves else 1, factor).outputs(small, large, inputs)
    terms, pairs, *others = jax.tree.unflatten(structure, kinds)
    return terms, pairs, *(set(jax.tree.leaves(tree)) for tree in others)


def _require(condition: bool) -> None:
    if not condition:
        raise _NotProvenError


@dataclass(frozen=True)
class _Array:
    """An array of both traces.

    Attributes:
        shape, large_shape: in each trace.
        axis: its dim of rows; -1 without one.
    """

    kind: Dependence
    shape: tuple[int, ...]
    large_shape: tuple[int, ...]
    axis: int


@dataclass(frozen=True)
class _Equation:
    """An equation of both traces.

    Attributes:
        params, large_params: in each trace; equal but for UNCOMPARED ones.
        axis: the dim of rows of its outputs; -1 without one.
    """

    name: str
    params: Mapping[str, Any]
    large_params: Mapping[str, Any]
    inputs: Sequence[_Array]
    axis: int

    def has_kinds(self, *kinds: Dependence) -> bool:
        """Returns whether the operands have these kinds, all that follow the last one; ZERO is FREE, too."""
        expected = [*kinds, *[kinds[-1]] * (len(self.inputs) - len(kinds))]
        return all(a.kind is kind or (a.kind is ZERO and kind is FREE) for a, kind in zip(self.inputs, expected))

    def takes_all_rows(self, name: str) -> bool:
        """Returns whether a parameter has the size of the first operand for the dim of rows, and is equal elsewhere."""
        array, axis = self.inputs[0], self.inputs[0].axis
        a, b = (list(params[name]) for params in (self.params, self.large_params))
        return (a.pop(axis), b.pop(axis)) == (array.shape[axis], array.large_shape[axis]) and a == b


@dataclass(frozen=True)
class _Walk:
    """Follows two traces: of `rows`, and of `factor` times as many."""

    rows: int
    factor: int

    def outputs(self, small: Any, large: Any, kinds: Sequence[Dependence]) -> list[Dependence]:
        """Returns the kinds of the outputs of two (closed) jaxprs, which differ only in sizes."""
        a, b = (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in (small, large))
        constants = list(map(self._constant, getattr(small, "consts", ()), getattr(large, "consts", ())))
        known: dict[Any, tuple[_Array, Any]] = {}

        def define(variables: Sequence[Any], others: Sequence[Any], kinds: Sequence[Dependence]) -> None:
            _require(len(variables) == len(others) == len(kinds))
            known.update({v: (self._array(kind, v.aval, w.aval), w) for v, w, kind in zip(variables, others, kinds)})

        def read(atom: Any, other: Any) -> _Array:
            if hasattr(atom, "val") and hasattr(other, "val"):
                return self._array(self._constant(atom.val, other.val), atom.aval, other.aval)
            _require(not hasattr(atom, "val") and known[atom][1] is other)
            return known[atom][0]

        define(a.constvars, b.constvars, constants)
        define(a.invars, b.invars, kinds)
        _require(len(a.eqns) == len(b.eqns) and len(a.outvars) == len(b.outvars))
        for eqn, other in zip(a.eqns, b.eqns):
            _require(eqn.primitive is other.primitive and len(eqn.invars) == len(other.invars))
            found = self._equation(eqn, other, list(map(read, eqn.invars, other.invars)))
            define(eqn.outvars, other.outvars, found or [MIXED] * len(eqn.outvars))
        return [read(*pair).kind for pair in zip(a.outvars, b.outvars)]

    def _array(self, kind: Dependence, aval: Any, large_aval: Any) -> _Array:
        """Returns an array of this kind, or of MIXED if its shapes do not allow it."""
        _require(all(hasattr(a, "shape") for a in (aval, large_aval)) and aval.dtype == large_aval.dtype)
        _require(len(aval.shape) == len(large_aval.shape))
        shape, large_shape = tuple(aval.shape), tuple(large_aval.shape)
        axes = [axis for axis in range(len(shape)) if shape[axis] != large_shape[axis]]
        if not axes:
            return _Array(MIXED if kind is ROWS else kind, shape, large_shape, -1)
        size, large = shape[axes[0]], large_shape[axes[0]]
        is_of_rows = len(axes) == 1 and size % self.rows == 0 and large == self.factor * size
        return _Array(ROWS if kind is ROWS and is_of_rows else MIXED, shape, large_shape, axes[0])

    def _constant(self, small: Any, large: Any) -> Dependence:
        if small is large and np.size(small) > 1:
            return FREE  # not read: it may be large, on a device, or traced by the caller
        try:
            a, b = np.asarray(small), np.asarray(large)
            if a.shape != b.shape:
                axis = next(axis for axis in range(a.ndim) if a.shape[axis] != b.shape[axis])
                first = a.take([0], axis)
                return ROWS if np.all(first == a) and np.all(first == b) else MIXED
            if a.tobytes() == b.tobytes():
                return FREE if np.any(a) else ZERO
            return SUM if np.array_equal(self.factor * a, b) else MIXED
        except Exception:  # it has no value here, or not all of it is on this machine
            return FREE if small is large else MIXED

    def _equation(self, eqn: Any, other: Any, inputs: list[_Array]) -> list[Dependence] | None:
        """Returns the kinds of the outputs; None if all are MIXED."""
        name, kinds = eqn.primitive.name, [array.kind for array in inputs]
        if name in IDENTITIES:
            return kinds
        try:
            if name in CALLS:
                body = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
                return self.outputs(eqn.params[body], other.params[body], kinds)
            if name in ("scan", "while", "cond"):
                return getattr(self, f"_{name}")(eqn, other, kinds)
            if not eqn.outvars or not _are_equal(eqn.params, other.params, UNCOMPARED.get(name, set())):
                return None
            axis = self._array(ROWS, eqn.outvars[0].aval, other.outvars[0].aval).axis
            return [_combine(_Equation(name, eqn.params, other.params, inputs, axis))] * len(eqn.outvars)
        except (KeyError, AttributeError):  # another version of JAX has other parameters
            return None

    def _scan(self, eqn: Any, other: Any, kinds: list[Dependence]) -> list[Dependence] | None:
        if eqn.params["length"] != other.params["length"] or eqn.params["reverse"] != other.params["reverse"]:
            return None
        # The rank tells the parts apart: xs and ys have one dim more outside.
        body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
        xs = sum(v.aval.ndim > w.aval.ndim for v, w in zip(eqn.invars, body.invars))
        carries = sum(v.aval.ndim == w.aval.ndim for v, w in zip(eqn.outvars, body.outvars))
        first = len(kinds) - xs - carries
        return self._fixpoint(eqn.params["jaxpr"], other.params["jaxpr"], kinds, slice(first, first + carries))

    def _while(self, eqn: Any, other: Any, kinds: list[Dependence]) -> list[Dependence] | None:
        first, carried = eqn.params["cond_nconsts"], slice(eqn.params["body_nconsts"], None)
        carry = self._fixpoint(eqn.params["body_jaxpr"], other.params["body_jaxpr"], kinds[first:], carried)
        inputs = [*kinds[:first], *carry]
        (condition,) = self.outputs(eqn.params["cond_jaxpr"], other.params["cond_jaxpr"], inputs)
        return carry if condition in CONSTANT else None

    def _cond(self, eqn: Any, other: Any, kinds: list[Dependence]) -> list[Dependence] | None:
        if kinds[0] not in CONSTANT:
            return None
        branches, others = eqn.params["branches"], other.params["branches"]
        _require(len(branches) == len(others))
        return list(map(_join, *(self.outputs(a, b, kinds[1:]) for a, b in zip(branches, others))))

    def _fixpoint(self, body: Any, other: Any, kinds: list[Dependence], carried: slice) -> list[Dependence]:
        """Returns the outputs of a loop, of which the first are the inputs `carried` of the next iteration."""
        kinds = list(kinds)
        while True:
            outputs, before = self.outputs(body, other, kinds), kinds[carried]
            kinds[carried] = list(map(_join, before, outputs))
            if kinds[carried] == before:
                return [*before, *outputs[len(before) :]]


def _are_equal(a: Mapping[str, Any], b: Mapping[str, Any], ignored: set[str]) -> bool:
    """Returns whether parameters of two equations are equal; NaN equals itself."""
    try:
        pairs = [(a[name], b[name]) for name in a.keys() - ignored]
        return a.keys() == b.keys() and all(bool(x == y) or (x != x and y != y) for x, y in pairs)
    except ValueError:  # an array has no truth value
        return False


def _join(*kinds: Dependence) -> Dependence:
    """Returns the least kind that includes all of these."""
    return next((kind for kind in (ZERO, FREE, SUM, ROWS) if set(kinds) <= {kind, ZERO}), MIXED)


def _combine(eqn: _Equation) -> Dependence:
    """Returns the kind of the outputs of an equation without a body."""
    kinds = {array.kind for array in eqn.inputs}
    if MIXED in kinds or kinds >= {ROWS, SUM} or eqn.name == "rng_uniform":  # its state is the device's
        return MIXED
    if ROWS in kinds:
        kept = _keep_rows(eqn)
        return kept if isinstance(kept, Dependence) else ROWS if kept else MIXED
    if eqn.axis >= 0:
        is_uniform = eqn.name == "broadcast_in_dim" or (eqn.name == "iota" and eqn.params["dimension"] != eqn.axis)
        return ROWS if is_uniform and SUM not in kinds else MIXED
    linear = _linear(eqn)
    return linear if SUM in kinds or linear is ZERO else FREE


def _linear(eqn: _Equation) -> Dependence:
    """Returns SUM or ZERO if the equation is linear in its operands of these kinds, else MIXED."""
    kinds, roles = [array.kind for array in eqn.inputs], LINEAR.get(eqn.name)
    if eqn.name in BILINEAR:
        return ZERO if ZERO in kinds else SUM if set(kinds) == {FREE, SUM} else MIXED
    rounds = eqn.name == "convert_element_type" and not jnp.issubdtype(eqn.params["new_dtype"], jnp.inexact)
    fill = eqn.params.get("fill_value")  # in place of what is out of bounds
    if roles is None or rounds or (fill and fill == fill):
        return MIXED
    roles = roles.ljust(len(kinds), roles[-1])
    is_linear = all(kind in (ADDITIVE if role == "d" else CONSTANT) for kind, role in zip(kinds, roles))
    return _join(*(kind for kind, role in zip(kinds, roles) if role == "d")) if is_linear else MIXED


def _keep_rows(eqn: _Equation) -> bool | Dependence:
    """Returns whether outputs are ROWS, given operands that are ROWS while all others are constant; SUM if they sum.

    Outputs whose sizes are not those of ROWS are MIXED anyway. Dims that an operation pairs have equal sizes, so that
    they are of the rows in both operands or in neither.
    """
    array, params, axis = eqn.inputs[0], eqn.params, eqn.inputs[0].axis
    if eqn.name in ELEMENTWISE:
        return all(other.axis == eqn.axis for other in eqn.inputs if other.kind is ROWS)  # dims of size 1 are broadcast
    if eqn.name in DIMS:
        dims = params[DIMS[eqn.name]]
        touches = axis in (dims if isinstance(dims, Sequence) else (dims,))
        return SUM if touches and eqn.name == "reduce_sum" else not touches
    if eqn.name.startswith(("reduce_window_", "select_and_")):
        sizes = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
        is_one_row = all(params[name][axis] == 1 for name in sizes if name in params)
        return is_one_row and not any(params["padding"][axis])
    match eqn.name:
        case "transpose" | "squeeze":
            return True
        case "broadcast_in_dim":
            return params["broadcast_dimensions"][axis] == eqn.axis
        case "reshape":  # may split the dim of rows or merge it with those behind it, if it remains the outer one
            return params["dimensions"] is None and prod(array.shape[:axis]) == prod(params["new_sizes"][: eqn.axis])
        case "slice":
            return (params["strides"] is None or params["strides"][axis] == 1) and eqn.takes_all_rows("limit_indices")
        case "dynamic_slice":
            return eqn.takes_all_rows("slice_sizes")
        case "dynamic_update_slice":
            update = eqn.inputs[1]
            return eqn.has_kinds(ROWS, ROWS, FREE) and axis == update.axis and array.shape[axis] == update.shape[axis]
        case "pad":
            return not any(params["padding_config"][axis])
        case "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            return SUM if eqn.has_kinds(ROWS) and axis in contracted else True
        case "conv_general_dilated":
            return _convolution(eqn)
        case "gather":
            return _gather(eqn)
        case "scatter" | "scatter-add":
            return _scatter(eqn)
    return False


def _convolution(eqn: _Equation) -> bool | Dependence:
    (lhs_spec, rhs_spec, _), (lhs, rhs) = eqn.params["dimension_numbers"], eqn.inputs
    if eqn.has_kinds(ROWS, FREE):
        return lhs.axis == lhs_spec[0] and eqn.params["batch_group_count"] == 1
    # The gradient of a kernel contracts the rows as if they were features.
    contracts = eqn.has_kinds(ROWS) and (lhs.axis, rhs.axis) == (lhs_spec[1], rhs_spec[1])
    return SUM if contracts and eqn.params["feature_group_count"] == 1 else False


def _gather(eqn: _Equation) -> bool:
    """Gathers from each row, or with the indices of each row from what all rows share."""
    dims, (array, indices) = eqn.params["dimension_numbers"], eqn.inputs
    if indices.kind is not ROWS:
        return eqn.takes_all_rows("slice_sizes")
    batching = zip(dims.operand_batching_dims, dims.start_indices_batching_dims)
    is_by_row = array.kind is not ROWS or (array.axis, indices.axis) in batching
    return is_by_row and eqn.params["slice_sizes"] == eqn.large_params["slice_sizes"]


def _scatter(eqn: _Equation) -> bool | Dependence:
    """Scatters within each row, or sums all rows."""
    dims, (array, indices, updates) = eqn.params["dimension_numbers"], eqn.inputs
    is_add = eqn.name == "scatter-add"
    if updates.kind is not ROWS or not (is_add or eqn.params["update_jaxpr"] is None):
        return False
    if array.kind is not ROWS:
        return SUM if is_add and array.kind is ZERO and indices.kind is ROWS else False
    if indices.kind is ROWS:
        return (array.axis, indices.axis) in zip(dims.operand_batching_dims, dims.scatter_indices_batching_dims)
    not_in_window = (*dims.inserted_window_dims, *dims.operand_batching_dims)
    window = [dim for dim in range(len(array.shape)) if dim not in not_in_window]
    place = dims.update_window_dims[window.index(array.axis)] if array.axis in window else -1
    return updates.axis == place and array.shape[array.axis] == updates.shape[place]
