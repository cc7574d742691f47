"""Update of the selection biases of experts by the experts' load (Wang et al. 2024, arXiv 2408.15664).

The gradient of a bias is the load of its expert in excess of an even share, as a whole number
(`kernels.moe.routing.with_bias_gradient`), so that it sums over shards and microbatches like any other. Only its sign
counts:

    bias <- bias - rate * sign(gradient)

There are no moments, no weight decay, no clipping and no schedule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def with_selection_biases(
    tx: optax.GradientTransformationExtraArgs, is_bias: Any, rate: float
) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` for all other parameters, and the update above for the selection biases; the state is that of `tx`.

    Args:
        tx: made for the parameters without the biases (see `without_biases`).
        is_bias: nested dict of bools, one per parameter.
        rate: step size.
    """

    def init(params: Any) -> Any:
        return tx.init(without_biases(params, is_bias))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        other_params = None if params is None else without_biases(params, is_bias)
        if "grad" in extra:
            extra["grad"] = without_biases(extra["grad"], is_bias)
        others, state = tx.update(without_biases(updates, is_bias), state, other_params, **extra)
        steps = jax.tree.map(lambda b, g: -rate * jnp.sign(g.astype(jnp.float32)) if b else None, is_bias, updates)
        return _merge(others, steps), state

    return optax.GradientTransformationExtraArgs(init, update)


def without_biases(tree: Any, is_bias: Any) -> Any:
    """Returns a nested dict without the leaves that are True in `is_bias`."""
    others = {}
    for key, value in tree.items():
        if isinstance(is_bias[key], dict):
            others[key] = without_biases(value, is_bias[key])
        elif not is_bias[key]:
            others[key] = value
    return others


def _merge(tree: Any, biases: Any) -> Any:
    """Returns `tree` with those leaves of `biases` that are not None, in the order of `biases`."""
    return {
        key: _merge(tree[key], value) if isinstance(value, dict) else tree[key] if value is None else value
        for key, value in biases.items()
    }
