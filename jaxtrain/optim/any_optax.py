"""Optimizers that are not ours: objects of optax, functions that make one, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.errors import UserError, describe_error
from jaxtrain.optim.functions import call_by_name
from jaxtrain.optim.layer_stack import one_layer_at_a_time
from jaxtrain.optim.schedules import Schedule


def make_by_name(cfg: OptimizerConfig, schedule: Schedule | None) -> optax.GradientTransformation:
    """Calls the function that `optimizer.name` names, with `optimizer.options`.

    Args:
        cfg: the `optimizer` section.
        schedule: learning rate by step, for a function that takes `learning_rate`.

    Raises:
        UserError: no such function, it does not take these options, or returns something else.
    """
    tx = call_by_name("optimizer", cfg.name, cfg.options, {"learning_rate": schedule})
    if not isinstance(tx, optax.GradientTransformation):
        raise UserError(f"optimizer.name: {cfg.name} returns {type(tx).__name__}; expected a GradientTransformation")
    return tx


def on_stacked_layers(tx: optax.GradientTransformation, names: Any, params: Any) -> optax.GradientTransformation:
    """Returns an optimizer of any kind as one of stacked parameters, traced once to see that it works.

    Its state has the same shapes and dtypes after each update. It gets the loss as `value` and the gradients as `grad`.

    Args:
        tx: the optimizer.
        names: tree of tuples of logical names, like the parameters.
        params: tree of arrays or ShapeDtypeStructs.

    Raises:
        UserError: it raises, its state is no tree of arrays, or changes its shapes.
    """
    extended = optax.with_extra_args_support(tx)

    def init(params: Any) -> Any:
        return _strongly_typed(extended.init(params))

    strong = optax.GradientTransformationExtraArgs(init, extended.update)
    _traced("init", init, params)  # before anything else, for its message
    strong = one_layer_at_a_time(strong, names, params)
    state = _traced("init", strong.init, params)

    def update(params: Any, state: Any) -> Any:
        return strong.update(params, state, params, value=jnp.float32(0), grad=params)

    updates, after = _traced("update", update, params, state)
    _check_same("updates", params, updates)
    _check_same("state", state, after)
    return strong


def _strongly_typed(state: Any) -> Any:
    """Returns the state with arrays alone: a Python number has a weak type, and the next step would compile again."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, (jax.Array, int, float, complex)) and not hasattr(leaf, "dtype"):
            where = jax.tree_util.keystr(path)
            raise UserError(f"optimizer: its state{where} is {type(leaf).__name__}; expected a tree of arrays")
    return jax.tree.map(lambda x: jax.lax.convert_element_type(jnp.asarray(x), jnp.asarray(x).dtype), state)


def _traced(what: str, f: Callable[..., Any], *args: Any) -> Any:
    try:
        return jax.eval_shape(f, *args)
    except UserError:
        raise
    except Exception as error:
        text = describe_error(error)
        if "value_fn" in text:
            text = "it searches along a line, which needs the loss as a function; expected an optimizer without"
        raise UserError(f"optimizer: its `{what}` fails: {text}") from error


def _check_same(what: str, before: Any, after: Any) -> None:
    structures = jax.tree.structure(before), jax.tree.structure(after)
    if structures[0] != structures[1]:
        raise UserError(f"optimizer: its update returns {what} of another structure; expected {structures[0]}")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after)):
        if x.shape != y.shape:
            where = jax.tree_util.keystr(path)
            raise UserError(f"optimizer: its update returns {what}{where} of shape {y.shape}; expected {x.shape}")


def is_schedule_free(state: Any) -> bool:
    """Returns whether an optimizer with this state has parameters of its own for evaluation."""
    return bool(_schedule_free_states(state))


def evaluation_parameters(state: Any, params: Any) -> Any:
    """Returns the parameters to evaluate with: those of a schedule-free optimizer's average, else the trained ones.

    Defazio et al. 2024, arXiv 2405.15682: gradients are taken at y = (1 - b1) z + b1 x; x is to be used.

    Args:
        state: state of the optimizer.
        params: the trained parameters.
    """
    found = _schedule_free_states(state)
    return optax.contrib.schedule_free_eval_params(found[0], params) if found else params


def _schedule_free_states(state: Any) -> list[Any]:
    def is_found(x: Any) -> bool:
        return isinstance(x, optax.contrib.ScheduleFreeState)

    return [x for x in jax.tree.leaves(state, is_leaf=is_found) if is_found(x)]
