"""The train state: abstract shapes, then shardings, then a jitted initialisation. Pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.core import spike_detection
from jaxtrain.models.model_def import ModelDef, NonTrainable, Tree, merge_trees, select_paths
from jaxtrain.optim.any_optax import evaluation_parameters, is_schedule_free
from jaxtrain.optim.optimizers import ema_init
from jaxtrain.optim.state_sharding import state_names
from jaxtrain.precision.loss_scaling import initial_loss_scale
from jaxtrain.sharding.rules import INFERRED, Names
from jaxtrain.sharding.sharder import Sharder

State = dict[str, Any]
VARIABLES = ("params", *NonTrainable._fields)  # kinds of the model's variables


@dataclass(frozen=True)
class StateParts:
    """Optional parts of the train state: an average of the weights, a loss scale, a window of the last steps."""

    ema: bool = False
    scaling: bool = False
    spikes: bool = False


def abstract(model_def: ModelDef, optimizer: optax.GradientTransformation, parts: StateParts) -> State:
    """Returns shapes and dtypes of the state, without shardings.

    It has step, params, opt_state and rng, and, if there are such, frozen, mutable, ema, scaling and spikes.
    """
    variables = _by_kind(model_def.params, model_def.non_trainable)
    return jax.eval_shape(partial(_state_of_variables, optimizer, parts, seed=np.uint32(0)), variables)


def shardings(state: State, model_def: ModelDef, optimizer: optax.GradientTransformation, sharder: Sharder) -> State:
    """Returns the NamedSharding of every leaf, by the logical names of its parameter."""

    def by_names(tree: Any, names: Any) -> Any:
        return jax.tree.map(lambda leaf, n: sharder.storage_sharding(n or (), leaf.shape), tree, names)

    replicated = sharder.sharding(())
    params = by_names(state["params"], model_def.names)
    moments = by_names(state["opt_state"], names_of_moments(state, model_def, optimizer, sharder))
    result = {"step": replicated, "rng": replicated, "params": params, "opt_state": moments}
    for name, names in model_def.non_trainable_names._asdict().items():
        if name in state:
            result[name] = by_names(state[name], names)
    for name in ("scaling", "spikes"):
        if name in state:
            result[name] = dict.fromkeys(state[name], replicated)
    return result | ({"ema": params} if "ema" in state else {})


def names_of_moments(
    state: State, model_def: ModelDef, optimizer: optax.GradientTransformation, sharder: Sharder
) -> Any:
    """Returns the logical names of the optimizer's state; a dim that its shards do not divide is not `inferred`."""

    def divisible(leaf: Any, names: Names) -> Names:
        shards = sharder.size(INFERRED)
        return tuple(None if n == INFERRED and size % shards else n for n, size in zip(names, leaf.shape))

    return jax.tree.map(divisible, state["opt_state"], state_names(optimizer, model_def.params, model_def.names))


def with_shardings(state: State, shardings: State) -> State:
    """Returns the abstract state with its shardings, which a checkpoint is restored into."""
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), state, shardings)


def init(
    model_def: ModelDef, optimizer: optax.GradientTransformation, parts: StateParts, seed: int, shardings: State,
    replace: Callable[[State], State] | None = None,
) -> State:  # fmt: skip
    """Returns the state of step 0; every shard is created on its device.

    Args:
        model_def: the model.
        optimizer: the optimizer.
        parts: optional parts of the state.
        seed: of the random initial values.
        shardings: of the state.
        replace: gets `params`, `frozen` and `mutable` with random values and returns them with others, before the rest
            of the state is made of them.
    """
    is_cpu = jax.tree.leaves(shardings)[0].mesh.devices.flat[0].platform == "cpu"
    # This runs once, and optimised code for the random bits would take 5 times as long to compile.
    options = {"xla_backend_optimization_level": 0} if is_cpu else None
    jit = partial(jax.jit, compiler_options=options)
    if replace is None:
        make = jit(_initial_state, static_argnums=(0, 1, 2), out_shardings=shardings)
        return make(model_def, optimizer, parts, np.uint32(seed))
    placed = {kind: shardings[kind] for kind in VARIABLES if kind in shardings}
    variables = jit(_initial_variables, static_argnums=0, out_shardings=placed)(model_def, np.uint32(seed))
    finish = jit(_state_of_variables, static_argnums=(0, 1), out_shardings=shardings, donate_argnums=2)
    return finish(optimizer, parts, replace(variables), np.uint32(seed))


def _initial_state(
    model_def: ModelDef, optimizer: optax.GradientTransformation, parts: StateParts, seed: np.uint32 | jax.Array
) -> State:
    return _state_of_variables(optimizer, parts, _initial_variables(model_def, seed), seed)


def _initial_variables(model_def: ModelDef, seed: np.uint32 | jax.Array) -> State:
    return _by_kind(*model_def.init(jax.random.fold_in(jax.random.key(seed), 0)))


def _by_kind(params: Tree, other: NonTrainable) -> State:
    """Returns the variables of the model as they are in a state, without empty kinds."""
    return {"params": params} | {kind: tree for kind, tree in other._asdict().items() if tree}


def all_parameters(state: State) -> Tree:
    """Returns the parameters of a state, trained and frozen ones."""
    return merge_trees(state["params"], state.get("frozen", {}))


def evaluated_kinds(state: State) -> tuple[str, ...]:
    """Returns the entries of a state that `evaluated_parameters` reads."""
    if "ema" in state:
        return "ema", "frozen"
    return ("params", "opt_state", "frozen") if is_schedule_free(state["opt_state"]) else ("params", "frozen")


def evaluated_parameters(state: State) -> Tree:
    """Returns the parameters to evaluate a model with: the averages of the trained ones, if a state has them."""
    averages = state.get("ema") or evaluation_parameters(state.get("opt_state"), state["params"])
    return all_parameters({**state, "params": averages})


def split_parameters(parameters: Tree, like: State) -> State:
    """Returns all parameters as `params` and `frozen` of a state like another one."""
    return {kind: select_paths(parameters, like[kind]) for kind in ("params", "frozen") if kind in like}


def non_trainable(state: State) -> NonTrainable:
    """Returns the variables of the model that are not trained."""
    return NonTrainable(state.get("frozen", {}), state.get("mutable", {}))


def _state_of_variables(
    optimizer: optax.GradientTransformation, parts: StateParts, variables: State, seed: np.uint32 | jax.Array
) -> State:
    params, key = variables["params"], jax.random.key(seed)
    state: State = {
        **variables,
        "step": jnp.zeros((), jnp.int32),
        "opt_state": optimizer.init(params),
        "rng": jax.random.key_data(jax.random.fold_in(key, 1)),
    }
    if parts.scaling:
        state["scaling"] = initial_loss_scale()
    if parts.spikes:
        state["spikes"] = spike_detection.initial()
    if parts.ema:
        state["ema"] = ema_init(params)
    return state
