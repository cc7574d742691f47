"""The train state: abstract, then shardings, then a jitted initialisation. Three pure functions in a row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.schema import Config
from jaxtrain.core import spike_detection
from jaxtrain.models.definition import Definition
from jaxtrain.optim.optimizers import ema_init
from jaxtrain.optim.state_sharding import state_names
from jaxtrain.precision.loss_scaling import initial
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.sharder import Sharder

State = dict[str, Any]


def abstract(definition: Definition, optimizer: optax.GradientTransformation, config: Config) -> State:
    """Shapes and dtypes of {step, params, opt_state, rng, ema, scaling, spikes}: without shardings."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(lambda params, key: _around(params, key, optimizer, _extras(config)), definition.params, key)


def shardings(state: State, definition: Definition, optimizer: optax.GradientTransformation, sharder: Sharder) -> State:
    """NamedSharding of every leaf: parameters and EMA by their names, optimizer state by its parameter's."""
    everywhere = sharder.sharding(())
    named = _by_names(state["params"], definition.names, sharder)
    placed = {"step": everywhere, "rng": everywhere, "params": named}
    placed["opt_state"] = _by_names(
        state["opt_state"], state_names(optimizer, definition.params, definition.names), sharder
    )
    for name in ("scaling", "spikes"):
        if name in state:
            placed[name] = dict.fromkeys(state[name], everywhere)
    return placed | ({"ema": named} if "ema" in state else {})


def with_shardings(state: State, placed: State) -> State:
    """The abstract state with its shardings: what a checkpoint is restored into."""
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), state, placed)


def init(definition: Definition, optimizer: optax.GradientTransformation, config: Config, placed: State) -> State:
    """The state of step 0, each shard made where it lives."""
    on_cpu = jax.tree.leaves(placed)[0].mesh.devices.flat[0].platform == "cpu"
    make = jax.jit(
        _make,
        static_argnums=(0, 1, 2),
        out_shardings=placed,
        # Runs once: optimised code for the random bits would take 5 times as long to compile.
        compiler_options={"xla_backend_optimization_level": 0} if on_cpu else None,
    )
    return make(definition, optimizer, _extras(config), np.uint32(config.seed))


def _extras(config: Config) -> frozenset[str]:
    """Returns the optional parts of the state: an average of the weights, a loss scale, a window of the last steps."""
    wanted = {
        "ema": config.optimizer.ema_decay is not None,
        "scaling": POLICIES[config.precision].scales,
        "spikes": config.guard.spike.action != "none",
    }
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted)


def _make(
    definition: Definition,
    optimizer: optax.GradientTransformation,
    extras: frozenset[str],
    seed: int | np.uint32 | jax.Array,
) -> State:
    key = jax.random.key(seed)
    return _around(definition.init(jax.random.fold_in(key, 0)), key, optimizer, extras)


def _around(params: Any, key: jax.Array, optimizer: optax.GradientTransformation, extras: frozenset[str]) -> State:
    """The state of step 0 with these parameters."""
    state: State = {
        "step": jnp.zeros((), jnp.int32),
        "params": params,
        "opt_state": optimizer.init(params),
        "rng": jax.random.key_data(jax.random.fold_in(key, 1)),
    }
    if "scaling" in extras:
        state["scaling"] = initial()
    if "spikes" in extras:
        state["spikes"] = spike_detection.initial()
    return state | ({"ema": ema_init(params)} if "ema" in extras else {})


def _by_names(tree: Any, names: Any, sharder: Sharder) -> Any:
    return jax.tree.map(lambda leaf, n: sharder.state_sharding(n or (), leaf.shape), tree, names)
