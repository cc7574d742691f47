"""Adam whose second moment stays as it is, and whose first moment is given (Tang et al. 2021, arXiv 2102.02888)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def scale_by_frozen_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns the direction of `optax.scale_by_adam` for a state that it left, from first moments that are given.

    These come in place of gradients. The second moment v and the count stay, and with it both bias corrections. Values
    of v = 0, which had no gradient so far, keep a first moment of 0: it would be divided by `eps`.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        mu = jax.tree.map(lambda m, v: jnp.where(v > 0, m, 0.0), updates, state.nu)
        mu_hat = optax.tree.bias_correction(mu, b1, state.count)
        nu_hat = optax.tree.bias_correction(state.nu, b2, state.count)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu_hat, nu_hat)
        return updates, state._replace(mu=mu)

    return optax.GradientTransformation(optax.scale_by_adam(b1, b2, eps).init, update)
