"""Layers stacked on a leading dim and scanned, with rematerialisation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.nn.env import Env
from jaxtrain.sharding.rules import LAYERS, Names

# Primitives that are cheaper to compute again than to keep: placements, gathers, casts and what fuses into its readers.
CHEAP = {
    "sharding_constraint", "convert_element_type", "mul", "square", "integer_pow", "rsqrt", "div", "sub", "neg",
    "logistic", "exp", "broadcast_in_dim", "select_n", "eq", "ne", "ge", "gt", "lt", "and", "iota", "split",
    "concatenate", "stop_gradient", "all_gather",
}  # fmt: skip


class Layers(NamedTuple):
    """Layers that a stack's parameters hold, on a pipeline stage that has a part of them.

    number: int32 [layers]. present: bool [layers], or None where all are; the others are no layers, but room that is
    left because another stage has more.
    """

    number: jax.Array | np.ndarray
    present: jax.Array | np.ndarray | None


Step = Callable[[Any, Any, Any, int], tuple[Any, Any]]  # (layer, carry, x, index in its group) -> (carry, y)


def stacked(make: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """A module like `make(rngs)` whose parameters hold `layers` independent layers on a leading dim `layers`."""
    keys = jax.random.split(rngs.params(), layers)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)
    return nnx.merge(graphdef, _renamed(state, lambda names: (LAYERS, *names)))


def scan(
    stack: Any, step: Step, carry: Any, xs: Any = None, *, env: Env, period: int = 1, layers: Layers | None = None
) -> tuple[Any, Any]:
    """Runs `step` over the layers of a stack, in a loop: compile time does not grow with their number.

    The loop copies what backward needs of a layer into a buffer of all layers, which it clears first, and the layer's
    gradient likewise. `env.unroll=0` does without loop and copies, and compiles every layer.

    Args:
        stack: a module made by `stacked`.
        step: called with a one-layer module, the carry, the layer's slice of `xs` (or None) and the layer's index
            modulo `period` (a Python int, so that layers of a group may differ statically).
        xs: pytree with a leading dim of one entry per layer (a KV cache), or None.
        period: layers per group; a remainder runs unrolled after the scan.
        layers: of a pipeline stage, which the stack's layers are: what is none changes nothing, and its y is 0.

    Returns:
        The last carry and the ys stacked over layers.
    """
    graphdef, state = nnx.split(stack)
    count = jax.tree.leaves(state)[0].shape[0]
    inputs = (state, xs, None if layers is None else layers.present)

    def one(carry: Any, inputs: tuple[Any, Any, Any], index: int) -> tuple[Any, Any]:
        params, x, is_present = inputs
        new, y = step(nnx.merge(graphdef, _renamed(params, lambda names: names[1:])), carry, x, index)
        if is_present is None:
            return new, y
        return jax.tree.map(partial(jnp.where, is_present), (new, y), (carry, jax.tree.map(jnp.zeros_like, y)))

    groups = count // period
    turn: int | bool = True if env.unroll == 0 else max(1, env.unroll // period)
    # JAX makes no loop of a single turn; unless it was asked for, that is compiled as if it were one.
    in_loop = env.unroll == 1 or (turn is not True and turn < groups)

    def bodies(in_scan: bool) -> list[Callable]:
        remat = _rematerialised(env.remat, env.offload, in_scan)
        return [remat(lambda c, i, index=index: one(c, i, index)) for index in range(period)]

    if period == 1:
        return jax.lax.scan(bodies(in_loop)[0], carry, inputs, unroll=turn)

    def group(carry: Any, inputs: Any) -> tuple[Any, Any]:
        ys = []
        for index, body in enumerate(bodies(in_loop)):
            carry, y = body(carry, jax.tree.map(lambda leaf, i=index: leaf[i], inputs))
            ys.append(y)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)

    head = jax.tree.map(lambda leaf: leaf[: groups * period].reshape(groups, period, *leaf.shape[1:]), inputs)
    carry, ys = jax.lax.scan(group, carry, head, unroll=turn)
    ys = jax.tree.map(lambda leaf: leaf.reshape(groups * period, *leaf.shape[2:]), ys)
    for layer in range(groups * period, count):
        carry, y = bodies(False)[layer % period](carry, jax.tree.map(lambda leaf, i=layer: leaf[i], inputs))
        ys = jax.tree.map(lambda all_ys, last: jnp.concatenate([all_ys, last[None]]), ys, y)
    return carry, ys


def _renamed(state: Any, change: Callable[[Names], Names]) -> Any:
    """A copy of the state whose parameters carry changed logical names; unnamed dims are None."""

    def rename(param: nnx.Variable) -> nnx.Variable:
        names = param.get_metadata().get("names") or (None,) * param.get_value().ndim
        return param.replace(names=change(names))

    return jax.tree.map(rename, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _rematerialised(
    policy: str | tuple[str, ...], offload: tuple[str, ...], in_scan: bool
) -> Callable[[Callable], Callable]:
    """`jax.checkpoint` under the named policy.

    `none` computes no matmul, sum or attention again, only casts, placements and elementwise operations, which fuse
    into their readers. So a weight that is stored in shards is gathered again for the backward pass instead of being
    kept whole for every layer, and a norm keeps its input alone.
    `dots` saves matmul outputs without batch dims. A tuple saves the values so named with `checkpoint_name`;
    the name `attention` is that of all the attention kernel keeps, softmax statistics included, so that the backward
    pass does not run it again. The values named in `offload` are kept in pinned host memory until then.
    """
    policies = jax.checkpoint_policies
    named = {"none": _is_kept, "full": None, "dots": policies.dots_with_no_batch_dims_saveable}
    chosen: Any = named[policy] if isinstance(policy, str) else policies.save_only_these_names(*policy)
    if offload:
        chosen = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[] if isinstance(policy, str) else list(policy),
            names_which_can_be_offloaded=list(offload), offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    # Outside of a loop the compiler would merge what is computed again with what was computed before.
    return lambda fn: jax.checkpoint(fn, policy=chosen, prevent_cse=not in_scan)


def _is_kept(primitive: Any, *_: Any, **params: Any) -> bool:
    """Returns whether the result of an operation is kept; that of a call, unless all it does is cheap."""
    if "call_jaxpr" in params:
        return not all(eqn.primitive.name in CHEAP for eqn in params["call_jaxpr"].eqns)
    return primitive.name not in CHEAP
