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
from jaxtrain.nn.param import attach_grad_proxies, float32_grad_proxies
from jaxtrain.nn.stack import Layers
from jaxtrain.pipeline.backward_split import SplitBackward, split_backward
from jaxtrain.pipeline.buffers import Payload
from jaxtrain.pipeline.partition import LayerPartition
from jaxtrain.pipeline.schedules.table import Action
from jaxtrain.sharding.rules import PIPELINE_AXIS

Sums = dict[str, Array]


class StepInputs(NamedTuple):
    """Inputs of a step, the same for all stages and ticks.

    Attributes:
        microbatches: arrays [microbatches, rows, ...].
        keys: random key of each microbatch.
        scale: factor of every term's sum in the loss.
        shared: entries of the batch that are the same for all microbatches.
    """

    microbatches: Mapping[str, Array]
    keys: Array
    scale: Sums
    shared: Mapping[str, Any]

    def batch(self, microbatch: Any) -> tuple[dict[str, Any], Array]:
        """Returns a microbatch and its key."""
        take = lambda x: lax.dynamic_index_in_dim(x, microbatch, keepdims=False)  # noqa: E731
        return {**jax.tree.map(take, dict(self.microbatches)), **self.shared}, take(self.keys)

    def weighted(self, terms: Mapping[str, tuple[Array, Array]]) -> tuple[Array, Sums]:
        """Returns the contribution of these terms to the loss, and their sums."""
        sums = {name: jnp.asarray(total, jnp.float32) for name, (total, _) in terms.items()}
        return sum((sums[name] * self.scale[name] for name in sums if name in self.scale), jnp.zeros(())), sums


class StageRefs(NamedTuple):
    """State of the stages between ticks: arrays [stages * n, ...], of which each stage sees its own [n, ...].

    Attributes:
        activations, gradients: received messages, in slots.
        residuals: residuals of F, in slots.
        b_to_w: values that B saves for W, in slots.
        grads: accumulated gradients of the layers, on their stages.
        sums, counts: of the layers' loss terms; counts on the stages of their layers.
    """

    activations: Any
    gradients: Any
    residuals: list[Any]
    b_to_w: Any
    grads: Any
    sums: Any
    counts: Any


@dataclass(eq=False)
class StageVjp:
    """The forward pass of a stage and its pullback, which is taken apart into residuals and constants.

    Constants are the weights and inputs, which are available to every action; residuals are all other arrays of the
    pullback, which F has to save.

    Attributes:
        model_def: the model on one slice of the pipeline axis.
        partition: layers of the stages.
        is_training: False to run forward passes only, without residuals.
        split: the pullback as B and W, once `split_pullback` was called.
    """

    model_def: ModelDef
    partition: LayerPartition
    is_training: bool
    split: SplitBackward | None = None
    _rebuild: Callable[[list[Array], list[Array]], Any] | None = field(default=None)

    def forward(self, weights: Any, layers: Layers, inputs: StepInputs, microbatch: Any, x: Any) -> tuple[Any, ...]:
        """Runs the forward pass of a stage. Returns (output, sums, counts, residuals)."""
        batch, key = inputs.batch(microbatch)

        def run_layers(proxies: Any, x: Any) -> tuple[Any, Any]:
            model = self.model_def.bind(self.partition.merge_layers(attach_grad_proxies(proxies, weights), {}))
            y, terms, counts = model.run_layers(x, batch, key, layers)
            loss, sums = inputs.weighted(terms)
            return (y, loss), (sums, counts)

        if not self.is_training:
            (y, _), (sums, counts) = run_layers(weights, x)
            return y, sums, counts, []
        proxies = float32_grad_proxies(weights)
        (y, _), pullback, (sums, counts) = jax.vjp(run_layers, proxies, x, has_aux=True)
        constants = jax.tree.leaves((proxies, weights, inputs))
        leaves, tree = jax.tree.flatten(pullback)
        source = [next((i for i, constant in enumerate(constants) if constant is leaf), None) for leaf in leaves]

        def rebuild(residuals: list[Array], constants: list[Array]) -> Any:
            rest = iter(residuals)
            return jax.tree.unflatten(tree, [next(rest) if i is None else constants[i] for i in source])

        self._rebuild = rebuild  # a side effect of tracing, as it is no array; the last trace counts
        return y, sums, counts, [leaf for leaf, i in zip(leaves, source) if i is None]

    def masks_padding(self, weights: Any, layers: Layers, inputs: StepInputs, x: Any) -> bool:
        """Returns whether the model reads which of its layers are padding."""

        def run_layers(present: Any) -> Any:
            return self.forward(weights, layers._replace(present=present), inputs, 0, x)[0]

        jaxpr = jax.make_jaxpr(run_layers)(layers.present).jaxpr
        return any(jaxpr.invars[0] in eqn.invars for eqn in jaxpr.eqns)

    def pullback(self, residuals: list[Array], weights: Any, inputs: StepInputs) -> Any:
        """Returns the pullback of (output, contribution to the loss) of a `forward` that was traced before."""
        assert self._rebuild is not None
        return self._rebuild(residuals, jax.tree.leaves((float32_grad_proxies(weights), weights, inputs)))

    def split_pullback(self, residuals: list[Any], weights: Any, inputs: StepInputs, dy: Any) -> SplitBackward:
        """Splits the pullback into B and W. Arguments are arrays or their shapes."""

        def pullback(residuals: list[Array], constants: tuple, dy: Any) -> tuple[Any, Any]:
            return self.pullback(residuals, *constants)((dy, jnp.float32(1)))

        self.split = split_backward(pullback, residuals, (weights, inputs), dy)
        return self.split

    def last_readers(self, count: int) -> list[str]:
        """Returns the last action, B or W, that reads each of `count` residuals."""
        read_by_w = range(count) if self.split is None else self.split.w_residuals
        return ["W" if i in read_by_w else "B" for i in range(count)]


@dataclass(eq=False)
class StageTick:
    """One stage in one tick.

    Attributes:
        vjp: forward pass and pullback of the stage.
        instruction: the stage's numbers in this tick, see `Executor.instructions`.
        layers: layers of the stage.
        weights: parameters of its layers.
        refs: its state.
        inputs: of the step.
        embedded: input of the first layer, if this tick embeds a microbatch.
        loss_gradient: gradient of the last layer's output, from the loss of the previous tick.
        shifts: see `Executor.shifts`.
    """

    vjp: StageVjp
    instruction: Mapping[str, Array]
    layers: Layers
    weights: Any
    refs: StageRefs
    inputs: StepInputs
    embedded: Any
    loss_gradient: Any
    shifts: Mapping[str, int]

    def run(self) -> Any:
        """Runs the action of this tick, sends the result and stores what is received. Returns the result."""
        instruction, refs = self.instruction, self.refs
        _write(refs.gradients, instruction["write_loss_gradient"], self.loss_gradient)
        is_first, slot = instruction["is_first"], instruction["read_activation"]
        x = jax.tree.map(lambda new, ref: jnp.where(is_first, new, ref[slot]), self.embedded, refs.activations)
        dy = _read(refs.gradients, instruction["read_gradient"])
        chunk = instruction["chunk"]
        weights = self._of_chunk(self.weights)
        layers = jax.tree.map(lambda n: n[0, chunk], self.layers)
        output = jax.tree.map(jnp.zeros_like, x)
        actions = {
            Action.F: self._forward,
            Action.B: self._backward_input,
            Action.W: self._backward_weight,
            Action.BW: self._backward,
        }
        for action, run in actions.items():
            if (self.vjp.partition.table.action == action).any():
                run = partial(run, weights, layers, self.inputs, x, dy)
                output = run_if(action.name, instruction["action"] == action, run, output)
        for side, shift in self.shifts.items():
            self._receive(side, output if shift == 0 else _shifted(output, shift))
        return output

    @property
    def _chunks(self) -> int:
        return self.vjp.partition.table.chunks

    def _of_chunk(self, weights: Any) -> Any:
        if self._chunks == 1:
            return weights
        split = lambda x: x.reshape(self._chunks, -1, *x.shape[1:])  # noqa: E731
        chunk = self.instruction["chunk"]
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(split(x), chunk, keepdims=False), weights)

    def _receive(self, side: str, message: Any) -> None:
        for payload, ref in ((Payload.ACTIVATION, self.refs.activations), (Payload.GRADIENT, self.refs.gradients)):
            if (slot := self.instruction.get(f"receive_{side}_{payload.name}")) is not None:
                _write(ref, slot, message)

    def _forward(self, weights: Any, layers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """F: saves the residuals. Returns the output."""
        microbatch = self.instruction["microbatch"]
        y, sums, counts, residuals = self.vjp.forward(weights, layers, inputs, microbatch, x)
        for ref, reader, value in zip(self.refs.residuals, self.vjp.last_readers(len(residuals)), residuals):
            ref[self.instruction[f"write_residuals_{reader}"]] = value
        for name, value in sums.items():
            self.refs.sums[name][0] += value
        jax.tree.map(self._accumulate, self.refs.counts, counts)
        return y

    def _backward(self, weights: Any, layers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """BW: accumulates the weight gradients. Returns the input gradient."""
        pullback = self.vjp.pullback(self._residuals(), weights, inputs)
        if self._chunks > 1:
            grads, dx = pullback((dy, jnp.float32(1)))
            jax.tree.map(self._accumulate, self.refs.grads, grads)
            return dx
        dx = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), x)
        pullback.with_refs(self.refs.grads, dx)((dy, jnp.float32(1)))
        return jax.tree.map(jax.freeze, dx)

    def _backward_input(self, weights: Any, layers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """B: saves values for W and accumulates the weight gradients that B computes. Returns the input gradient."""
        split = self._split
        dx, saved, grads = split.backward_input(self._residuals(), (weights, inputs), dy)
        leaves = jax.tree.leaves(dy)
        _write(self.refs.b_to_w, self.instruction["write_b_to_w"], (saved, [leaves[i] for i in split.w_cotangents]))
        self._accumulate_some(grads)
        return dx

    def _backward_weight(self, weights: Any, layers: Layers, inputs: StepInputs, x: Any, dy: Any) -> Any:
        """W: accumulates the other weight gradients."""
        saved, cotangents = _read(self.refs.b_to_w, self.instruction["read_b_to_w"])
        refs = [self.refs.residuals[i] for i in self._split.w_residuals]
        residuals = _read(refs, self.instruction["read_residuals_W"])
        self._accumulate_some(self._split.backward_weight(residuals, (weights, inputs), saved, cotangents))
        return jax.tree.map(jnp.zeros_like, x)

    @property
    def _split(self) -> SplitBackward:
        assert self.vjp.split is not None  # made with the buffers
        return self.vjp.split

    def _residuals(self) -> list[Array]:
        readers = self.vjp.last_readers(len(self.refs.residuals))
        return [ref[self.instruction[f"read_residuals_{reader}"]] for ref, reader in zip(self.refs.residuals, readers)]

    def _accumulate_some(self, grads: Any) -> None:
        """Accumulates those gradients that are not None."""
        jax.tree.map(lambda ref, g: None if g is None else self._accumulate(ref, g), self.refs.grads, grads)

    def _accumulate(self, ref: Any, value: Array) -> None:
        """Adds a value of this chunk's layers to that of all layers of the stage."""
        size = value.shape[0]
        ref[jax.ds(self.instruction["chunk"] * size, size)] += value


def run_if(name: str, predicate: Array, run: Callable[[], Any], otherwise: Any) -> Any:
    """Returns `run()` if the predicate is true, else `otherwise`, which must have the same structure.

    This is a loop of one iteration or none. XLA's compilers for CPU and CUDA copy every Ref that a branch of a
    conditional writes, in each branch and once more after it; loops write in place. The scope `run_if_NAME` marks these
    loops for `hlo.parse`.
    """

    def body(_: Any) -> tuple[Array, Any]:
        return jnp.zeros((), bool), run()

    with jax.named_scope(f"run_if_{name}"):
        return lax.while_loop(lambda carry: carry[0], body, (predicate, otherwise))[1]


def _shifted(tree: Any, shift: int) -> Any:
    """Sends arrays from every stage to the one `shift` positions later."""
    count = lax.axis_size(PIPELINE_AXIS)
    pairs = [(i, (i + shift) % count) for i in range(count)]
    return jax.tree.map(lambda x: lax.ppermute(x, PIPELINE_AXIS, pairs), tree)


def _read(refs: Any, slot: Array) -> Any:
    return jax.tree.map(lambda ref: ref[slot], refs)


def _write(refs: Any, slot: Array, values: Any) -> None:
    def write(ref: Any, value: Array) -> None:
        ref[slot] = value

    jax.tree.map(write, refs, values)
