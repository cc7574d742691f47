"""One tick of a pipeline stage, as code that is manual over the mesh axis `pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.models.model_def import ModelDef
from jaxtrain.nn.param import float32_proxies, with_proxies
from jaxtrain.nn.stack import Layers
from jaxtrain.pipeline.backward_split import SplitBackward, split
from jaxtrain.pipeline.partition import Stages
from jaxtrain.pipeline.schedules.table import Action
from jaxtrain.sharding.rules import PIPELINE_AXIS

Sums = dict[str, Array]


class StepInputs(NamedTuple):
    """Inputs of a step, the same for all stages and ticks.

    micro: arrays [microbatches, rows, ...]. keys: of each microbatch. scale: of every term's sum in the loss. known:
    what every microbatch's batch holds besides.
    """

    micro: Mapping[str, Array]
    keys: Array
    scale: Sums
    known: Mapping[str, Any]

    def batch(self, microbatch: Any) -> tuple[dict[str, Any], Array]:
        """A microbatch and its key."""
        take = lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False)  # noqa: E731
        return {**jax.tree.map(take, dict(self.micro)), **self.known}, take(self.keys)

    def weighted(self, terms: Mapping[str, tuple[Array, Array]]) -> tuple[Array, Sums]:
        """The part of the loss that these terms are, and their sums."""
        sums = {name: jnp.asarray(total, jnp.float32) for name, (total, _) in terms.items()}
        return sum((sums[name] * self.scale[name] for name in sums if name in self.scale), jnp.zeros(())), sums


class Refs(NamedTuple):
    """Values that stages keep from tick to tick: arrays [stages * n, ...] of which each stage sees its own [n, ...].

    inputs, gradients: what arrived, in slots. kept: what F keeps, in slots; between: what B keeps for W. grads: of the
    layers, as these lie. sums, counts: of the layers' own terms; counts as the layers lie.
    """

    inputs: Any
    gradients: Any
    kept: list[Any]
    between: Any
    grads: Any
    sums: Any
    counts: Any


@dataclass(eq=False)
class Derivative:
    """A stage's derivative, taken apart into what F keeps and what a backward action has anyway.

    is_training: else there is no derivative, and nothing is kept. cut: into B and W, once `divide` was called.
    """

    inside: ModelDef
    stages: Stages
    is_training: bool
    cut: SplitBackward | None = None
    _rebuild: Callable[[list[Array], list[Array]], Any] | None = field(default=None)

    def forward(self, layers: Any, numbers: Layers, inputs: StepInputs, microbatch: Any, x: Any) -> tuple[Any, ...]:
        """Runs the forward pass of a stage: (output, sums, counts, residuals)."""
        batch, key = inputs.batch(microbatch)

        def run_layers(wide: Any, x: Any) -> tuple[Any, Any]:
            model = self.inside.bind(self.stages.merge_layers(with_proxies(wide, layers), {}))
            y, terms, counts = model.run_layers(x, batch, key, numbers)
            part, sums = inputs.weighted(terms)
            return (y, part), (sums, counts)

        if not self.is_training:
            (y, _), (sums, counts) = run_layers(layers, x)
            return y, sums, counts, []
        wide = float32_proxies(layers)
        (y, _), pull, (sums, counts) = jax.vjp(run_layers, wide, x, has_aux=True)
        known = self._known(wide, layers, inputs)
        leaves, tree = jax.tree.flatten(pull)
        source = [next((i for i, own in enumerate(known) if own is leaf), None) for leaf in leaves]

        def rebuild(kept: list[Array], known: list[Array]) -> Any:
            rest = iter(kept)
            return jax.tree.unflatten(tree, [next(rest) if i is None else known[i] for i in source])

        self._rebuild = rebuild  # by the side, for it is no array; the last trace is the one that counts
        return y, sums, counts, [leaf for leaf, i in zip(leaves, source) if i is None]

    def skips(self, layers: Any, numbers: Layers, inputs: StepInputs, x: Any) -> bool:
        """Returns whether the model heeds which of its layers are none."""

        def run_layers(present: Any) -> Any:
            return self.forward(layers, numbers._replace(present=present), inputs, 0, x)[0]

        traced = jax.make_jaxpr(run_layers)(numbers.present)
        (given,) = traced.jaxpr.invars
        return any(given in eqn.invars for eqn in traced.jaxpr.eqns)

    def pull(self, kept: list[Array], layers: Any, inputs: StepInputs) -> Any:
        """The pull-back of (what goes on, part of the loss), from what a `forward` traced before has kept."""
        assert self._rebuild is not None
        return self._rebuild(kept, self._known(float32_proxies(layers), layers, inputs))

    def divide(self, kept: list[Any], layers: Any, inputs: StepInputs, dy: Any) -> SplitBackward:
        """Cuts the pull-back into B and W. All are arrays or their shapes."""

        def pull(kept: list[Array], given: tuple, dy: Any) -> tuple[Any, Any]:
            return self.pull(kept, *given)((dy, jnp.float32(1)))

        self.cut = split(pull, kept, (layers, inputs), dy)
        return self.cut

    def until(self, count: int) -> list[str]:
        """Returns how long each residual is kept: what W does not read is free after B."""
        late = set(range(count)) if self.cut is None else set(self.cut.kept)
        return ["until W" if i in late else "until B" for i in range(count)]

    def _known(self, wide: Any, layers: Any, inputs: StepInputs) -> list[Array]:
        """Returns the values at hand in every action."""
        return jax.tree.leaves((wide, layers, inputs))


@dataclass(eq=False)
class Stage:
    """One stage in one tick. row: its numbers. numbers: of its layers. begun: the first layer's input, where this tick
    begins one."""

    derivative: Derivative
    row: Mapping[str, Array]
    numbers: Layers
    layers: Any
    refs: Refs
    inputs: StepInputs
    begun: Any
    late: Any
    sides: Mapping[str, int]

    @property
    def actions(self) -> dict[Action, Callable[..., Any]]:
        """Actions of this table's stages, without waiting."""
        does = {
            Action.F: self.forward,
            Action.B: self.backward_input,
            Action.W: self.backward_weight,
            Action.BW: self.backward,
        }
        return {action: run for action, run in does.items() if (self.derivative.stages.table.action == action).any()}

    def act(self) -> Any:
        """Does the action of this tick, hands on what it made, and takes what arrives. Returns what it made."""
        row, refs = self.row, self.refs
        _write(refs.gradients, row["take loss"], self.late)
        x = jax.tree.map(
            lambda new, old: jnp.where(row["is first"], new, old[row["read input"]]), self.begun, refs.inputs
        )
        dy = _read(refs.gradients, row["read gradient"])
        chunk = row["chunk"]
        layers = self._of_chunk(self.layers)
        numbers = jax.tree.map(lambda n: n[0, chunk], self.numbers)
        made = jax.tree.map(jnp.zeros_like, x)
        for action, run in self.actions.items():
            operands = (layers, numbers, self.inputs, x, dy)
            made = once(action.name, row["action"] == action, partial(run, *operands), made)
        for side, step in self.sides.items():
            self._take(side, made if step == 0 else self._passed(made, step))
        return made

    @property
    def _chunks(self) -> int:
        return self.derivative.stages.table.chunks

    def _of_chunk(self, layers: Any) -> Any:
        if self._chunks == 1:
            return layers
        split = lambda x: x.reshape(self._chunks, -1, *x.shape[1:])  # noqa: E731
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(split(x), self.row["chunk"], keepdims=False), layers)

    def _passed(self, made: Any, step: int) -> Any:
        count = lax.axis_size(PIPELINE_AXIS)
        return jax.tree.map(
            lambda x: lax.ppermute(x, PIPELINE_AXIS, [(i, (i + step) % count) for i in range(count)]), made
        )

    def _take(self, side: str, message: Any) -> None:
        for kind, ref in (("ACTIVATION", self.refs.inputs), ("GRADIENT", self.refs.gradients)):
            if (slot := self.row.get(f"take {side} {kind}")) is not None:
                _write(ref, slot, message)

    def forward(self, layers: Any, numbers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """F: what goes on to the next layers; keeps the residuals."""
        y, sums, counts, kept = self.derivative.forward(layers, numbers, inputs, self.row["microbatch"], x)
        for ref, until, value in zip(self.refs.kept, self.derivative.until(len(kept)), kept):
            ref[self.row[f"keep {until}"]] = value
        for name, value in sums.items():
            self.refs.sums[name][0] += value
        jax.tree.map(self._add, self.refs.counts, counts)
        return y

    def backward(self, layers: Any, numbers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """BW: the gradient of what came in; adds those of the weights."""
        pull = self._pull(layers, inputs)
        if self._chunks > 1:
            grads, dx = pull((dy, jnp.float32(1)))
            jax.tree.map(self._add, self.refs.grads, grads)
            return dx
        into = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), x)
        pull.with_refs(self.refs.grads, into)((dy, jnp.float32(1)))
        return jax.tree.map(jax.freeze, into)

    def backward_input(self, layers: Any, numbers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """B: the gradient of what came in; adds those of the weights that come with it."""
        cut = self._cut
        dx, between, early = cut.b(self._kept(), (layers, inputs), dy)
        leaves = jax.tree.leaves(dy)
        _write(self.refs.between, self.row["keep between"], (between, [leaves[i] for i in cut.dy]))
        self._add_some(early)
        return dx

    def backward_weight(self, layers: Any, numbers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """W: adds the other gradients of the weights."""
        between, leaves = _read(self.refs.between, self.row["read between"])
        kept = _read([self.refs.kept[i] for i in self._cut.kept], self.row["read until W"])
        self._add_some(self._cut.w(kept, (layers, inputs), between, leaves))
        return jax.tree.map(jnp.zeros_like, x)

    @property
    def _cut(self) -> SplitBackward:
        assert self.derivative.cut is not None  # made with the buffers
        return self.derivative.cut

    def _add_some(self, grads: Any) -> None:
        """Adds those gradients that are not None."""
        jax.tree.map(lambda ref, g: None if g is None else self._add(ref, g), self.refs.grads, grads)

    def _pull(self, layers: Any, inputs: StepInputs) -> Any:
        return self.derivative.pull(self._kept(), layers, inputs)

    def _kept(self) -> list[Array]:
        """Returns the values that F kept."""
        untils = self.derivative.until(len(self.refs.kept))
        return [ref[self.row[f"read {until}"]] for ref, until in zip(self.refs.kept, untils)]

    def _add(self, ref: Any, value: Array) -> None:
        """Adds what is of this chunk's layers to that of all layers of the stage."""
        size = value.shape[0]
        ref[jax.ds(self.row["chunk"] * size, size)] += value


def once(name: str, is_on: Array, run: Callable[[], Any], otherwise: Any) -> Any:
    """`run()`, or `otherwise`, which is like its result.

    A loop of one turn or none: XLA's compilers for CPU and CUDA copy every Ref that a branch of a conditional writes,
    in each branch and once more after it, while loops write in place. The scope `once_NAME` tells it from others
    (`plan.hlo`).
    """

    def turn(_: Any) -> tuple[Array, Any]:
        return jnp.zeros((), bool), run()

    with jax.named_scope(f"once_{name}"):
        return lax.while_loop(lambda carry: carry[0], turn, (is_on, otherwise))[1]


def _read(refs: Any, slot: Array) -> Any:
    return jax.tree.map(lambda ref: ref[slot], refs)


def _write(refs: Any, slot: Array, values: Any) -> None:
    def write(ref: Any, value: Array) -> None:
        ref[slot] = value

    jax.tree.map(write, refs, values)
