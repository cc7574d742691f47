"""Selection biases of experts: balanced by their load alone (Wang et al. 2024, arXiv 2408.15664).

The gradient of such a bias is its expert's choices over an even share, in whole numbers (`kernels.moe.routing.steer`),
so that it adds up over shards and microbatches like any other. The step is the same for all, whatever the size:

    bias <- bias - rate * sign(gradient)

No moments, no weight decay, no clipping and no schedule.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def apart(tx: optax.GradientTransformation, is_bias: Any, rate: float) -> optax.GradientTransformation:
    """`tx` for all parameters but the selection biases, which take the step above; the state is that of `tx`.

    Args:
        tx: made for the parameters without the biases (see `without_biases`).
        is_bias: nested dict of bools, one per parameter.
        rate: size of a step.
    """

    def init(params: Any) -> Any:
        return tx.init(without_biases(params, is_bias))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        rest = None if params is None else without_biases(params, is_bias)
        others, state = tx.update(without_biases(updates, is_bias), state, rest)
        steps = jax.tree.map(lambda b, g: -rate * jnp.sign(g.astype(jnp.float32)) if b else None, is_bias, updates)
        return _merged(others, steps), state

    return optax.GradientTransformation(init, update)


def without_biases(tree: Any, is_bias: Any) -> Any:
    """A nested dict less the leaves that `is_bias`, a tree like it, marks."""
    kept = {}
    for key, value in tree.items():
        if isinstance(is_bias[key], dict):
            kept[key] = without_biases(value, is_bias[key])
        elif not is_bias[key]:
            kept[key] = value
    return kept


def _merged(tree: Any, more: Any) -> Any:
    """`tree` with the leaves of `more` where these are not None, in the order of `more`."""
    return {
        key: _merged(tree[key], value) if isinstance(value, dict) else tree[key] if value is None else value
        for key, value in more.items()
    }
