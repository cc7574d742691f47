"""Stacked layers: parameters with a leading dim of layers, run by a scan with rematerialisation."""

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
from jaxtrain.sharding.weight_gather import SHARDS

# Primitives that are cheaper to recompute than to keep: shardings, gathers, casts, and what fuses into its readers.
CHEAP = {
    "sharding_constraint", "convert_element_type", "mul", "square", "integer_pow", "rsqrt", "div", "sub", "neg",
    "logistic", "exp", "broadcast_in_dim", "select_n", "eq", "ne", "ge", "gt", "lt", "and", "iota", "split",
    "concatenate", "stop_gradient", "all_gather", "reshape", "bitcast_convert_type",
}  # fmt: skip


class Layers(NamedTuple):
    """Layers that a stack holds on a pipeline stage.

    number: int32 [layers], the index of each in the model. present: bool [layers], False for the padding of stages that
    hold fewer layers than others; None if there is none.
    """

    number: jax.Array | np.ndarray
    present: jax.Array | np.ndarray | None


Step = Callable[[Any, Any, Any, int], tuple[Any, Any]]  # (layer, carry, x, index in its group) -> (carry, y)


def stacked(make: Callable[[nnx.Rngs], Any], layers: int, rngs: nnx.Rngs) -> Any:
    """Returns a module like `make(rngs)` whose parameters hold `layers` layers on a leading dim `layers`."""
    keys = jax.random.split(rngs.params(), layers)
    graphdef, _ = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    state = jax.vmap(lambda key: nnx.state(make(nnx.Rngs(key))))(keys)
    return nnx.merge(graphdef, _renamed(state, lambda names: (LAYERS, *names)))


def scan(
    stack: Any, step: Step, carry: Any, xs: Any = None, *, env: Env, group: int = 1, layers: Layers | None = None
) -> tuple[Any, Any]:
    """Runs `step` over the layers of a stack in a loop, so that compile time does not depend on their number.

    The loop copies the residuals of each layer into a buffer of all layers, and each layer's gradient likewise.
    `env.unroll=0` avoids the loop and the copies, and compiles every layer.

    Args:
        stack: a module made by `stacked`.
        step: called with a one-layer module, the carry, the layer's slice of `xs` (or None) and the layer's index
            within its group (a Python int, so that layers of a group may differ statically).
        carry: input of the first layer.
        xs: pytree with a leading dim of layers (a KV cache), or None.
        env: gives remat, offload and unroll.
        group: layers per group; a remainder runs unrolled after the scan.
        layers: the layers of a pipeline stage; padding changes nothing, and its y is 0.

    Returns:
        The last carry, and the ys stacked over layers.
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

    groups = count // group
    unroll: int | bool = True if env.unroll == 0 else max(1, env.unroll // group)
    # JAX makes no loop of a single iteration; without `unroll` that is compiled as if it were in a loop.
    in_loop = env.unroll == 1 or (unroll is not True and unroll < groups)

    def bodies(in_scan: bool) -> list[Callable]:
        remat = checkpointed(env.remat, env.offload, in_scan)
        return [remat(lambda c, i, index=index: one(c, i, index)) for index in range(group)]

    if group == 1:
        return jax.lax.scan(bodies(in_loop)[0], carry, inputs, unroll=unroll)

    def run_group(carry: Any, inputs: Any) -> tuple[Any, Any]:
        ys = []
        for index, body in enumerate(bodies(in_loop)):
            carry, y = body(carry, jax.tree.map(lambda leaf, i=index: leaf[i], inputs))
            ys.append(y)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *ys)

    head = jax.tree.map(lambda leaf: leaf[: groups * group].reshape(groups, group, *leaf.shape[1:]), inputs)
    carry, ys = jax.lax.scan(run_group, carry, head, unroll=unroll)
    ys = jax.tree.map(lambda leaf: leaf.reshape(groups * group, *leaf.shape[2:]), ys)
    for layer in range(groups * group, count):
        carry, y = bodies(False)[layer % group](carry, jax.tree.map(lambda leaf, i=layer: leaf[i], inputs))
        ys = jax.tree.map(lambda all_ys, last: jnp.concatenate([all_ys, last[None]]), ys, y)
    return carry, ys


def _renamed(state: Any, change: Callable[[Names], Names]) -> Any:
    """Returns the state with changed logical names of its parameters; unnamed dims are None."""

    def rename(param: nnx.Variable) -> nnx.Variable:
        names = param.get_metadata().get("names") or (None,) * param.get_value().ndim
        return param.replace(names=change(names))

    return jax.tree.map(rename, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def checkpointed(
    policy: str | tuple[str, ...], offload: tuple[str, ...], in_scan: bool
) -> Callable[[Callable], Callable]:
    """Returns `jax.checkpoint` with the named policy, see `checkpoint_policy`."""
    rule = checkpoint_policy(policy, offload)
    # Outside of a loop the compiler would merge the recomputation with the first computation.
    return lambda fn: jax.checkpoint(fn, policy=rule, prevent_cse=not in_scan)


def checkpoint_policy(policy: str | tuple[str, ...], offload: tuple[str, ...]) -> Any:
    """Returns the named policy of `jax.checkpoint`.

    `none` recomputes no matmul, sum or attention, only casts, shardings and elementwise operations, which fuse into
    others. So a weight that is stored in shards is gathered again for the backward pass instead of being kept
    unsharded for every layer, and a norm keeps only its input. `dots` saves matmul outputs without batch dims. A tuple
    saves the values with these `checkpoint_name`s; `attention` is the name of all residuals of the attention kernel,
    with softmax statistics, so that the backward pass does not run it again. The values named in `offload` are kept in
    pinned host memory. All of them keep what the backward pass gathers weights from (`sharding.weight_gather`).
    """
    policies = jax.checkpoint_policies
    shards = policies.save_only_these_names(SHARDS)
    dots = policies.save_from_both_policies(policies.dots_with_no_batch_dims_saveable, shards)
    named = {"none": _is_saved, "full": shards, "dots": dots}
    rule: Any = named[policy] if isinstance(policy, str) else policies.save_only_these_names(*policy, SHARDS)
    if offload:
        rule = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[SHARDS] if isinstance(policy, str) else [*policy, SHARDS],
            names_which_can_be_offloaded=list(offload), offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
    return rule


def _is_saved(primitive: Any, *_: Any, **params: Any) -> bool:
    """Returns whether the result of an operation is saved: unless it, or all that a call contains, is cheap."""
    if "call_jaxpr" in params:
        return not all(eqn.primitive.name in CHEAP for eqn in params["call_jaxpr"].eqns)
    return primitive.name not in CHEAP
