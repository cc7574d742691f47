"""Splits a stage's backward pass in two: B, the gradient of its input, and W, the gradients of its weights.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) run W later than B. Two calls of `jax.vjp`, one for each, would
compute twice what both need: everything rematerialised, and the cotangents of all layers. Instead the jaxpr of the
pullback is cut in two, and nothing is computed twice. B has all that the input's gradient needs, and all that is
rematerialised. W has the matmuls that only weight gradients need. Values that cross the cut are saved from B to W; the
minimum cut (`pipeline.min_cut`) saves the fewest bytes, where

* W may repeat cheap operations of B, so that casts and gathers of weights are never saved;
* B may do cheap operations and sums that only W needs: the gradient of a norm's scale instead of its cotangent.

The body of a `lax.scan` is cut once for all iterations: the scan of B stacks what the scan of W reads. So is the body
of a `jax.shard_map`: values that its devices save have a leading dim of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from jaxtrain.nn.stack import CHEAP
from jaxtrain.pipeline.jaxpr_ops import Loop, Op, OpProgram, Ops, Value, add_dependencies, add_dependents, flatten, walk
from jaxtrain.pipeline.min_cut import SINK, SOURCE, UNCUTTABLE, Graph

# Operations that both parts may compute: no sums, so that they fuse into their readers.
RECOMPUTABLE = CHEAP | {
    "abs", "add", "add_any", "bitcast_convert_type", "cbrt", "ceil", "clamp", "copy", "copy_p", "cos", "device_put",
    "dynamic_slice", "erf", "exp2", "expand_dims", "expm1", "floor", "is_finite", "le", "log", "log1p", "max", "min",
    "name", "not", "one_minus_square", "or", "pad", "pow", "pvary", "reduce_precision", "rem", "reshape", "rev",
    "round", "sign", "sin", "slice", "sqrt", "squeeze", "tan", "tanh", "transpose", "xor",
}  # fmt: skip
# Operations of W that B may do, if the result is smaller than the inputs.
MOVABLE = RECOMPUTABLE | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
# Cost of a saved byte. The differences only break ties: a residual of F rather than a new value, and a new value before
# it is gathered rather than after.
RESIDUAL_COST, SAVED_COST, GATHERED_COST = 1000, 1001, 1002
GATHERS = {"sharding_constraint", "all_gather"}


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two parts of a pullback. Holds no arrays, so any trace under the same mesh can use it.

    Attributes:
        w_residuals: indices of the residuals that W reads; B is the last reader of the others.
        w_cotangents: indices of the leaves of the output's cotangent that W reads.
        saved: shapes of the values that B saves for W.
        b_grads: indices of the weight gradients that B computes: those of norms, and those from a `while`.
    """

    w_residuals: tuple[int, ...]
    w_cotangents: tuple[int, ...]
    saved: list[jax.ShapeDtypeStruct]
    b_grads: tuple[int, ...]
    _inputs: tuple[list[Value], list[Value], list[Value]]  # residuals, constants, cotangents
    _grads: tuple[list[Value], list[Value]]  # gradients of the weights, of the input
    _trees: tuple[Any, Any]
    _programs: tuple[OpProgram, OpProgram]

    def backward_input(self, residuals: Sequence[Array], constants: Any, dy: Any) -> tuple[Any, list[Array], Any]:
        """Runs B.

        Args:
            residuals: all residuals of the forward pass.
            constants: parameters and batch, as in `split_backward`.
            dy: cotangent of the output.

        Returns:
            Gradient of the input; values to save for W; weight gradients in `b_grads`, the tree has None for others.
        """
        arrays = (residuals, jax.tree.leaves(constants), jax.tree.leaves(dy))
        dw, dx = self._grads
        outputs = [*dx, *(dw[i] for i in self.b_grads)]
        results, saved = self._programs[0](_bindings(self._inputs, arrays), outputs)
        grads = dict(zip(self.b_grads, results[len(dx) :]))
        return jax.tree.unflatten(self._trees[1], results[: len(dx)]), saved, self._weight_tree(grads)

    def backward_weight(
        self, residuals: Sequence[Array], constants: Any, saved: Sequence[Array], dy: Sequence[Array] = ()
    ) -> Any:
        """Runs W.

        Args:
            residuals: those in `w_residuals`.
            constants: parameters and batch, as in `split_backward`.
            saved: values that B saved.
            dy: those leaves of the output's cotangent that are in `w_cotangents`.

        Returns:
            The weight gradients that are not in `b_grads`; the tree has None for those.
        """
        b, w = self._programs
        read = [self._inputs[0][i] for i in self.w_residuals], [self._inputs[2][i] for i in self.w_cotangents]
        bindings = _bindings((*read, self._inputs[1], b.saved), (residuals, dy, jax.tree.leaves(constants), saved))
        outputs = {i: value for i, value in enumerate(self._grads[0]) if i not in self.b_grads}
        results, _ = w(bindings, list(outputs.values()))
        return self._weight_tree(dict(zip(outputs, results)))

    def _weight_tree(self, grads: dict[int, Array]) -> Any:
        return jax.tree.unflatten(self._trees[0], [grads.get(i) for i in range(len(self._grads[0]))])


def split_backward(
    pullback: Callable[..., tuple[Any, Any]], residuals: Sequence[Any], constants: Any, dy: Any
) -> SplitBackward:
    """Splits a pullback into B and W.

    `cond`, `while` and kernels are not cut: if the input's gradient needs one, all of it is in B. Operations with no
    result but an effect (a print) are dropped.

    Args:
        pullback: (residuals, constants, dy) -> (gradients of weights, gradient of the input), pytrees. Traced once.
        residuals: arrays that the forward pass saves for the backward pass, or their shapes.
        constants: pytree of arrays that are available at any time: parameters, the batch.
        dy: pytree, cotangent of the output.

    Raises:
        ValueError: `pullback` uses Refs, or traced values that are not among its arguments.
    """
    jaxpr, shapes = jax.make_jaxpr(pullback, return_shape=True)(list(residuals), constants, dy)
    if any(isinstance(constant, Tracer) for constant in jaxpr.consts):
        raise ValueError("the pullback closes over a traced value; expected it in `residuals` or `constants`")
    arguments = [Value(var.aval) for var in getattr(jaxpr, "jaxpr", jaxpr).invars]
    ops, outputs = flatten(jaxpr, arguments)
    first_constant = len(jax.tree.leaves(list(residuals)))
    first_cotangent = first_constant + len(jax.tree.leaves(constants))
    inputs = arguments[:first_constant], arguments[first_constant:first_cotangent], arguments[first_cotangent:]
    trees = jax.tree.structure(shapes[0]), jax.tree.structure(shapes[1])
    dw, dx = outputs[: trees[0].num_leaves], outputs[trees[0].num_leaves :]

    saved = _CutGraph(ops, dw, dx, residuals=inputs[0], dy=inputs[2]).saved()
    w_inputs = frozenset((*arguments, *saved))
    b_grads = _cheap_gradients(ops, dw, w_inputs, frozenset(saved))
    needed = add_dependencies(ops, {value for i, value in enumerate(dw) if i not in b_grads}, w_inputs)
    saved = [value for value in saved if value in needed]
    b_needed = add_dependencies(ops, {*dx, *saved, *(dw[i] for i in b_grads)})
    programs = OpProgram(ops, b_needed, frozenset(arguments), saved), OpProgram(ops, needed, w_inputs, [])
    w_residuals, w_cotangents = (tuple(i for i, v in enumerate(vs) if v in needed) for vs in (inputs[0], inputs[2]))
    shapes_saved = [jax.ShapeDtypeStruct((*_loop_lengths(ops, v), *v.aval.shape), v.aval.dtype) for v in saved]
    return SplitBackward(w_residuals, w_cotangents, shapes_saved, b_grads, inputs, (dw, dx), trees, programs)


def _cheap_gradients(ops: Ops, dw: list[Value], w_inputs: frozenset[Value], saved: frozenset[Value]) -> tuple[int, ...]:
    """Returns the weight gradients that are cheap to compute from values which B would save for them alone."""
    dependencies = [add_dependencies(ops, {value}, w_inputs) for value in dw]

    def is_cheap(needed: set[Value]) -> bool:
        computed = needed - w_inputs
        return all(
            computed.isdisjoint(carry.final for carry in op.carries)
            if isinstance(op, Loop)
            else op.eqn.primitive.name in RECOMPUTABLE or computed.isdisjoint(op.outputs)
            for op in walk(ops)
        )

    cheap = [is_cheap(needed) for needed in dependencies]
    others = set().union(*(needed for needed, is_one in zip(dependencies, cheap) if not is_one))
    saved_for = [needed & saved for needed in dependencies]
    return tuple(i for i, values in enumerate(saved_for) if cheap[i] and values and not values & others)


def _bindings(values: Iterable[Sequence[Value]], arrays: Iterable[Sequence[Array]]) -> dict[Value, Array]:
    return {v: x for vs, xs in zip(values, arrays, strict=True) for v, x in zip(vs, xs, strict=True)}


def _loop_lengths(ops: Ops, value: Value) -> tuple[int, ...]:
    """Returns the lengths of the loops around a value, outermost first."""
    loop = next((op for op in ops if isinstance(op, Loop) and value in op.body_values), None)
    return () if loop is None else (loop.length, *_loop_lengths(loop.body, value))


class _CutGraph:
    """The graph whose minimum cut gives the values to save.

    Each operation and each value is a node. On the source's side are operations that only B does and values that W does
    not have; on the sink's side operations that W does and values that it has. A value is saved if the operation that
    computes it is on the source's side and the value on the sink's side.
    """

    def __init__(self, ops: Ops, dw: list[Value], dx: list[Value], residuals: list[Value], dy: list[Value]) -> None:
        self.graph, self.nodes, self.producer = Graph(), {}, {}
        self.needed = add_dependencies(ops, {*dw, *dx})
        rematerialised = _rematerialised(ops, self.needed, add_dependents(ops, set(dy)))
        self.in_b = add_dependencies(ops, {*dx, *rematerialised})
        for value in (*residuals, *dy):
            self.graph.add_edge(SOURCE, self._node(value), RESIDUAL_COST * max(1, value.nbytes))
        self._add(ops)
        for value in dw:
            self.graph.add_edge(self._node(value), SINK)

    def saved(self) -> list[Value]:
        """Returns the values that B saves for W, in the order in which they are computed."""
        sinks = self.graph.sink_side()
        return [v for v, producer in self.producer.items() if producer not in sinks and self.nodes.get(v) in sinks]

    def _node(self, value: Value) -> int:
        if value not in self.nodes:
            self.nodes[value] = self.graph.add_node()
        return self.nodes[value]

    def _add(self, ops: Ops) -> None:
        for op in ops:
            if isinstance(op, Loop):
                self._add_loop(op)
            elif not self.needed.isdisjoint(op.outputs):
                node, name = self.graph.add_node(), op.eqn.primitive.name
                is_b = not self.in_b.isdisjoint(op.outputs)
                if is_b and name not in RECOMPUTABLE:
                    self.graph.add_edge(SOURCE, node)
                elif not is_b and name not in MOVABLE:
                    self.graph.add_edge(node, SINK)
                self._connect(node, op.inputs, op.outputs, is_b, GATHERED_COST if name in GATHERS else SAVED_COST)

    def _connect(
        self, node: int, inputs: Iterable[Value], outputs: Iterable[Value], is_b: bool, cost: int | None
    ) -> None:
        """Connects an operation to its inputs and outputs. cost: of a byte of the outputs; None to save none."""
        for value in inputs:
            if not value.is_constant:
                self.graph.add_edge(self._node(value), node)  # W can only do it if it has the inputs
                if not is_b and value in self.producer and value not in self.in_b:
                    self.graph.add_edge(node, self.producer[value])  # B likewise
        for value in outputs:
            self.producer[value] = node
            capacity = UNCUTTABLE if cost is None else cost * max(1, value.nbytes)
            self.graph.add_edge(node, self._node(value), capacity)

    def _add_loop(self, loop: Loop) -> None:
        """Adds a loop. Values that enter or leave its body are saved outside."""
        for link in (*loop.consts, *loop.xs):
            if link.inner in self.needed:
                self._connect(self.graph.add_node(), [link.outer], [link.inner], link.inner in self.in_b, None)
        carries = [carry for carry in loop.carries if carry.final in self.needed]
        for carry in carries:
            node, is_b = self.graph.add_node(), carry.final in self.in_b
            self.graph.add_edge(*((SOURCE, node) if is_b else (node, SINK)))
            self._connect(node, [] if is_b else [carry.init], [carry.inner, carry.final], is_b, SAVED_COST)
        self._add(loop.body)
        for carry in carries:
            if carry.final not in self.in_b and not carry.out.is_constant:
                self.graph.add_edge(self._node(carry.out), SINK)
        for link in loop.ys:
            if link.outer in self.needed:
                is_b, cost = link.outer in self.in_b, None if loop.is_scan else SAVED_COST
                self._connect(self.graph.add_node(), [link.inner], [link.outer], is_b, cost)


def _rematerialised(ops: Ops, needed: set[Value], of_dy: set[Value]) -> list[Value]:
    """Returns results of costly operations of the forward pass that the backward pass repeats."""
    values: list[Value] = []
    for op in walk(ops):
        if isinstance(op, Op) and op.eqn.primitive.name not in RECOMPUTABLE:
            values += op.outputs
        elif isinstance(op, Loop):
            values += (carry.final for carry in op.carries)
    return [value for value in values if value in needed and value not in of_dy]
