"""Optimizers on stacked layers: each layer is its own tensor to them, as in a model that does not stack.

A scanned model holds the weights of all layers in one tensor with a leading dim `layers`. An optimizer that reduces
over a tensor, such as LAMB's norms, would mix the layers, and one that looks at the number of dims would take a norm's
scale [L, D] for a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.losses.row_independence import CALLS, ELEMENTWISE, IDENTITIES
from jaxtrain.optim.param_dims import map_names
from jaxtrain.sharding.rules import LAYERS


@jax.tree_util.register_pytree_with_keys_class
class LayerValues:
    """Values of one parameter in every layer, in the place of the stacked parameter."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.SequenceKey(i), value) for i, value in enumerate(self.values)], None

    @classmethod
    def tree_unflatten(cls, _: None, values: Any) -> LayerValues:
        return cls(list(values))


def one_layer_at_a_time(
    tx: optax.GradientTransformationExtraArgs, names: Any, params: Any
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer of stacked parameters that does what `tx` does to the parameters of single layers.

    An optimizer that is proven to treat elements one by one is returned as it is. For any other one, the layers are
    taken apart in each update, and put together again. Parts of its state that follow the tree of the parameters are
    stored stacked; others, such as a list of all norms, as they are.

    Args:
        tx: the optimizer.
        names: tree of tuples of logical names, like the parameters; a first name `layers` stacks.
        params: tree of arrays or ShapeDtypeStructs.
    """
    is_stacked = map_names(lambda n: n[:1] == (LAYERS,), names)
    if not any(jax.tree.leaves(is_stacked)) or is_elementwise(tx, is_stacked, params):
        return tx
    structure = jax.tree.structure(params)
    template = jax.eval_shape(lambda p: tx.init(_unstack(p, is_stacked)), params)

    def init(params: Any) -> Any:
        return _stack(tx.init(_unstack(params, is_stacked)))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        def apart(tree: Any) -> Any:
            return _unstack(tree, is_stacked) if jax.tree.structure(tree) == structure else tree

        extra = {name: apart(value) for name, value in extra.items()}
        updates, state = tx.update(apart(updates), _unstack_like(template, state), apart(params), **extra)
        return _stack(updates), _stack(state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_layers(x: Any) -> bool:
    return isinstance(x, LayerValues)


def _unstack(tree: Any, is_stacked: Any) -> Any:
    return jax.tree.map(lambda stacked, x: LayerValues(list(x)) if stacked else x, is_stacked, tree)


def _stack(tree: Any) -> Any:
    def stack(x: Any) -> Any:
        return jax.tree.map(lambda *layers: jnp.stack(layers), *x.values) if _is_layers(x) else x

    return jax.tree.map(stack, tree, is_leaf=_is_layers)


def _unstack_like(template: Any, tree: Any) -> Any:
    """Takes apart what is `LayerValues` in the template."""

    def unstack(like: Any, x: Any) -> Any:
        if not _is_layers(like):
            return x
        return LayerValues([jax.tree.map(lambda stacked, i=i: stacked[i], x) for i in range(len(like.values))])

    return jax.tree.map(unstack, template, tree, is_leaf=_is_layers)


def is_elementwise(tx: optax.GradientTransformationExtraArgs, is_stacked: Any, params: Any) -> bool:
    """Returns whether an optimizer is proven to treat elements one by one, whatever the shape of their tensor.

    It is traced with stacked parameters and with those of one layer. Both traces must consist of the same elementwise
    operations with the same constants.

    Args:
        tx: the optimizer.
        is_stacked: tree of bools, like the parameters.
        params: tree of arrays or ShapeDtypeStructs.
    """

    def one_layer(stacked: bool, p: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(p.shape[1:] if stacked else p.shape, p.dtype)

    def run(params: Any, grads: Any) -> Any:
        return tx.update(grads, tx.init(params), params, value=jnp.float32(0), grad=grads)

    try:
        traces = [jax.make_jaxpr(run)(p, p) for p in (params, jax.tree.map(one_layer, is_stacked, params))]
    except Exception:  # the caller's own trace of the optimizer tells what is wrong
        return False
    return _same_jaxprs(*(trace.jaxpr for trace in traces)) and _same_values(*(trace.consts for trace in traces))


def _same_jaxprs(a: Any, b: Any) -> bool:
    return len(a.eqns) == len(b.eqns) and all(map(_same_equations, a.eqns, b.eqns))


def _same_equations(a: Any, b: Any) -> bool:
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
        return False
    name = a.primitive.name
    has_arrays = any(getattr(v.aval, "ndim", 0) for v in (*a.invars, *a.outvars))
    is_broadcast = name == "broadcast_in_dim" and not a.invars[0].aval.ndim
    if has_arrays and not is_broadcast and name not in ELEMENTWISE | IDENTITIES | CALLS:
        return False
    literals = [[getattr(v, "val", None) for v in equation.invars] for equation in (a, b)]
    return _same_values(*literals) and all(_same_parameters(*pair) for pair in _parameters(a, b))


def _parameters(a: Any, b: Any) -> Iterator[tuple[Any, Any]]:
    shapes = ("shape", "sharding", "out_sharding")  # of what is broadcast, and where: no numbers of the result
    return ((a.params[name], b.params.get(name)) for name in a.params if name not in shapes)


def _same_parameters(a: Any, b: Any) -> bool:
    inner = [getattr(x, "jaxpr", x) for x in (a, b)]
    if all(hasattr(x, "eqns") for x in inner):
        return _same_jaxprs(*inner) and _same_values(*(getattr(x, "consts", ()) for x in (a, b)))
    return callable(a) or bool(a == b)  # functions are those of the same rule of differentiation


def _same_values(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Returns whether two lists have the same scalars, and no arrays."""

    def is_same(x: Any, y: Any) -> bool:
        if x is None or y is None:
            return x is y
        return not np.ndim(x) and np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)

    return len(a) == len(b) and all(map(is_same, a, b))
