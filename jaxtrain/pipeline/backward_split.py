"""A stage's backward pass in two: B, the gradient of its input, and W, those of its weights; nothing is computed twice.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) do W later than B. Asking `jax.vjp` twice, once for each, would
compute twice what both need: all that is rematerialised, and the cotangents of all layers. Instead the pull-back's
jaxpr is cut in two. What the input's gradient needs is B; so is what is rematerialised. Matmuls that only weights'
gradients need are W. What crosses the cut has to be kept from B to W; of all cuts the one that keeps the fewest bytes
is taken (`pipeline.cut`), where

* cheap operations that B needs may be done again in W, so that casts and gathers of weights are never kept;
* cheap operations and sums that only W needs may be done in B already: a norm's gradient instead of its cotangent.

A `lax.scan` is cut like the rest, its body once for all iterations: B's scan stacks what W's scan reads. So is a
`jax.shard_map`: what its devices keep has a leading dim of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from jaxtrain.nn.stack import CHEAP
from jaxtrain.pipeline.jaxpr_ops import Loop, Op, OpProgram, Ops, Value, flatten, mark, spread, walk
from jaxtrain.pipeline.min_cut import NEVER, SINK, SOURCE, Graph

# What may be computed twice: nothing with a sum in it, so that it fuses into its readers.
AGAIN = CHEAP | {
    "abs", "add", "add_any", "bitcast_convert_type", "cbrt", "ceil", "clamp", "copy", "copy_p", "cos", "device_put",
    "dynamic_slice", "erf", "exp2", "expand_dims", "expm1", "floor", "is_finite", "le", "log", "log1p", "max", "min",
    "name", "not", "one_minus_square", "or", "pad", "pow", "pvary", "reduce_precision", "rem", "reshape", "rev",
    "round", "sign", "sin", "slice", "sqrt", "squeeze", "tan", "tanh", "transpose", "xor",
}  # fmt: skip
# What may be moved from W to B where its result is smaller than what it is computed from.
EARLY = AGAIN | {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax", "argmin"}
# Prices of a byte, for ties: what F keeps anyway is kept longer before anything is written that need not be, and that
# before it is gathered, not after.
HELD, WRITTEN, GATHERED = 1000, 1001, 1002
GATHERS = {"sharding_constraint", "all_gather"}


@dataclass(frozen=True, eq=False)
class SplitBackward:
    """The two parts of a pull-back. Holds no arrays and can be used in any trace under the same mesh.

    Args:
        kept: which of the residuals W reads; the others are free after B.
        dy: which leaves of the output's cotangent W reads.
        between: shapes of what B hands to W.
        early: which leaves of the weights' gradients B makes: those of norms, and what only a `while` computes.
    """

    kept: tuple[int, ...]
    dy: tuple[int, ...]
    between: list[jax.ShapeDtypeStruct]
    early: tuple[int, ...]
    _inputs: tuple[list[Value], list[Value], list[Value]]  # residuals, what is given, cotangent
    _results: tuple[list[Value], list[Value]]  # gradients of weights, of the input
    _trees: tuple[Any, Any]
    _programs: tuple[OpProgram, OpProgram]

    def b(self, kept: Sequence[Array], given: Any, dy: Any) -> tuple[Any, list[Array], Any]:
        """(dx, between, gradients of weights) from all residuals, what is given, and the output's cotangent.

        The gradients are those that are `early`, the tree has None for the others: to be added up at once.
        """
        arrays = (kept, jax.tree.leaves(given), jax.tree.leaves(dy))
        dw, dx = self._results
        results, between = self._programs[0](_paired(self._inputs, arrays), [*dx, *(dw[i] for i in self.early)])
        early = dict(zip(self.early, results[len(dx) :]))
        return jax.tree.unflatten(self._trees[1], results[: len(dx)]), between, self._gradients(early)

    def w(self, kept: Sequence[Array], given: Any, between: Sequence[Array], dy: Sequence[Array] = ()) -> Any:
        """The other gradients of weights, the tree has None for those that are `early`.

        Args:
            kept: only those residuals that it reads (`self.kept`).
            given, between: as for, and from, B.
            dy: only those leaves of the cotangent that it reads (`self.dy`).
        """
        residuals, known, cotangent = self._inputs
        first, second = self._programs
        inputs = ([residuals[i] for i in self.kept], known, [cotangent[i] for i in self.dy], first.kept)
        late = {i: value for i, value in enumerate(self._results[0]) if i not in self.early}
        results, _ = second(_paired(inputs, (kept, jax.tree.leaves(given), dy, between)), list(late.values()))
        return self._gradients(dict(zip(late, results)))

    def _gradients(self, some: dict[int, Array]) -> Any:
        return jax.tree.unflatten(self._trees[0], [some.get(i) for i in range(len(self._results[0]))])


def split(pull: Callable[..., tuple[Any, Any]], kept: Sequence[Any], given: Any, dy: Any) -> SplitBackward:
    """Cuts a pull-back in two.

    `cond`, `while` and kernels are not cut: where the input's gradient needs one, all of it is B. What has no result
    but an effect (a print) is left out.

    Args:
        pull: (kept, given, dy) -> (gradients of weights, gradient of the input), pytrees. Traced once.
        kept: arrays, or their shapes: what the forward pass keeps for the backward pass.
        given: pytree of what is at hand at any time: parameters, the batch.
        dy: pytree, cotangent of the output.

    Raises:
        ValueError: `pull` uses Refs, or traced values that are not among its arguments.
    """
    jaxpr, shapes = jax.make_jaxpr(pull, return_shape=True)(list(kept), given, dy)
    if any(isinstance(constant, Tracer) for constant in jaxpr.consts):
        raise ValueError("a pull-back that is to be split closes over a traced value: it must be in `kept` or `given`")
    arguments = [Value(var.aval) for var in getattr(jaxpr, "jaxpr", jaxpr).invars]
    ops, outs = flatten(jaxpr, arguments)
    sizes = [len(jax.tree.leaves(part)) for part in (list(kept), given, dy)]
    residuals, known, cotangent = (_take(arguments, sizes, i) for i in range(3))
    trees = jax.tree.structure(shapes[0]), jax.tree.structure(shapes[1])
    dw, dx = outs[: trees[0].num_leaves], outs[trees[0].num_leaves :]

    between = _CutGraph(ops, dw, dx, residuals, cotangent).between()
    given_to_w = frozenset((*arguments, *between))
    early = _early(ops, dw, given_to_w, frozenset(between))
    wanted = mark(ops, {value for i, value in enumerate(dw) if i not in early}, given_to_w)
    between = [value for value in between if value in wanted]
    first = OpProgram(ops, mark(ops, {*dx, *between, *(dw[i] for i in early)}), frozenset(arguments), between)
    return SplitBackward(
        tuple(i for i, value in enumerate(residuals) if value in wanted),
        tuple(i for i, value in enumerate(cotangent) if value in wanted),
        [jax.ShapeDtypeStruct((*_stack(ops, value), *value.aval.shape), value.aval.dtype) for value in between],
        early, (residuals, known, cotangent), (dw, dx), trees, (first, OpProgram(ops, wanted, given_to_w, [])),
    )  # fmt: skip


def _early(ops: Ops, dw: list[Value], given: frozenset[Value], between: frozenset[Value]) -> tuple[int, ...]:
    """Returns the results of W that are cheap to make from what B would hand to W for them alone."""
    reads = [mark(ops, {value}, given) for value in dw]

    def is_cheap(wanted: set[Value]) -> bool:
        made = wanted - given
        return all(
            made.isdisjoint(carry.final for carry in op.carries)
            if isinstance(op, Loop)
            else op.eqn.primitive.name in AGAIN or made.isdisjoint(op.outs)
            for op in walk(ops)
        )

    cheap = [is_cheap(wanted) for wanted in reads]
    others = set().union(*(wanted for wanted, own in zip(reads, cheap) if not own))
    return tuple(i for i, wanted in enumerate(reads) if cheap[i] and wanted & between and not wanted & between & others)


def _take(values: list[Value], sizes: list[int], part: int) -> list[Value]:
    return values[sum(sizes[:part]) : sum(sizes[: part + 1])]


def _paired(inputs: Iterable[Sequence[Value]], arrays: Iterable[Sequence[Array]]) -> dict[Value, Array]:
    return {v: x for some, given in zip(inputs, arrays, strict=True) for v, x in zip(some, given, strict=True)}


def _stack(ops: Ops, value: Value) -> tuple[int, ...]:
    """Lengths of the loops around a value."""
    loop = next((op for op in ops if isinstance(op, Loop) and value in op.inside), None)
    return () if loop is None else (loop.length, *_stack(loop.body, value))


class _CutGraph:
    """The graph whose cheapest cut is what to keep.

    Each operation and each value is a node. On the source's side are the operations that are done in B alone and the
    values that W does not have; on the sink's side the operations that W does and the values it has. A value is kept
    where the operation that makes it is on one side and itself on the other.
    """

    def __init__(self, ops: Ops, dw: list[Value], dx: list[Value], residuals: list[Value], dy: list[Value]) -> None:
        self.graph, self.nodes, self.maker = Graph(), {}, {}
        self.live = mark(ops, {*dw, *dx})
        self.by_b = mark(ops, {*dx, *_forward(ops, self.live, spread(ops, set(dy)))})
        for value in (*residuals, *dy):
            self.graph.edge(SOURCE, self._node(value), HELD * max(1, value.nbytes))
        self._add(ops)
        for value in dw:
            self.graph.edge(self._node(value), SINK)

    def between(self) -> list[Value]:
        """Values that B keeps for W, in the order in which they are made."""
        sinks = self.graph.sinks()
        return [v for v, maker in self.maker.items() if maker not in sinks and self.nodes.get(v) in sinks]

    def _node(self, value: Value) -> int:
        if value not in self.nodes:
            self.nodes[value] = self.graph.node()
        return self.nodes[value]

    def _add(self, ops: Ops) -> None:
        for op in ops:
            if isinstance(op, Loop):
                self._add_loop(op)
            elif not self.live.isdisjoint(op.outs):
                node, name = self.graph.node(), op.eqn.primitive.name
                is_b = not self.by_b.isdisjoint(op.outs)
                if is_b and name not in AGAIN:
                    self.graph.edge(SOURCE, node)
                elif not is_b and name not in EARLY:
                    self.graph.edge(node, SINK)
                self._connect(node, op.ins, op.outs, is_b, GATHERED if name in GATHERS else WRITTEN)

    def _connect(self, node: int, ins: Iterable[Value], outs: Iterable[Value], is_b: bool, price: int | None) -> None:
        """An operation between the values it reads and those it makes. price: of their bytes; None to keep none."""
        for value in ins:
            if not value.is_constant:
                self.graph.edge(self._node(value), node)  # W can only do it where it has what it reads
                if not is_b and value in self.maker and value not in self.by_b:
                    self.graph.edge(node, self.maker[value])  # B likewise
        for value in outs:
            self.maker[value] = node
            self.graph.edge(node, self._node(value), NEVER if price is None else price * max(1, value.nbytes))

    def _add_loop(self, loop: Loop) -> None:
        """Adds a loop: values that enter or leave its body are kept outside."""
        for link in (*loop.consts, *loop.xs):
            if link.inner in self.live:
                self._connect(self.graph.node(), [link.outer], [link.inner], link.inner in self.by_b, None)
        carries = [carry for carry in loop.carries if carry.final in self.live]
        for carry in carries:
            node, is_b = self.graph.node(), carry.final in self.by_b
            self.graph.edge(*((SOURCE, node) if is_b else (node, SINK)))
            self._connect(node, [] if is_b else [carry.init], [carry.inner, carry.final], is_b, WRITTEN)
        self._add(loop.body)
        for carry in carries:
            if carry.final not in self.by_b and not carry.out.is_constant:
                self.graph.edge(self._node(carry.out), SINK)
        for link in loop.ys:
            if link.outer in self.live:
                is_b, price = link.outer in self.by_b, None if loop.stacks else WRITTEN
                self._connect(self.graph.node(), [link.inner], [link.outer], is_b, price)


def _forward(ops: Ops, live: set[Value], after_dy: set[Value]) -> list[Value]:
    """Returns the costly operations of the forward pass that the backward pass repeats: rematerialisation is B."""
    found: list[Value] = []
    for op in walk(ops):
        if isinstance(op, Op) and op.eqn.primitive.name not in AGAIN:
            found += op.outs
        elif isinstance(op, Loop):
            found += (carry.final for carry in op.carries)
    return [value for value in found if value in live and value not in after_dy]
