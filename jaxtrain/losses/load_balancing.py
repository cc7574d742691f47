"""Losses and metrics of the load of experts, from sums over tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.routing import Load


def load_balance_loss(load: Load, chosen_LE: Array, layers: int) -> Array:
    """Returns the sum over tokens of the load-balancing loss, a float32 scalar. Its mean is 1 if the load is even.

    It is experts * sum_e f_e P_e for each layer, with f_e the share of all choices that expert e got and P_e its mean
    probability (Switch, arXiv 2101.03961, equation 4), and the mean over layers. f is of the whole global batch and has
    no gradient, so the loss is a sum over tokens and does not depend on the microbatches.

    Args:
        load: sums over the tokens of this microbatch, with a leading dim of layers.
        chosen_LE: choices by layer and expert over the global batch.
        layers: number of layers of the whole model; `load` may be of some of them.
    """
    total_L1 = chosen_LE.sum(-1, keepdims=True)
    share_LE = lax.stop_gradient(chosen_LE / jnp.where(total_L1 > 0, total_L1, 1.0))
    return chosen_LE.shape[-1] / layers * jnp.sum(share_LE * load.probability_E)


def router_z_loss(load: Load, layers: int) -> Array:
    """Returns the sum over tokens of log(Z)^2 of the router, mean over layers (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return jnp.sum(load.squares) / layers


def load_metrics(chosen_LE: Array, placed_L: Array) -> dict[str, Array]:
    """Returns metrics of a step from sums over its global batch.

    `moe/load_max`, `moe/load_min`: choices of the busiest and of the idlest expert of all layers over an even share
    (1 is even); `moe/dropped`: share of the choices that exceeded an expert's capacity.
    """
    total_L1 = chosen_LE.sum(-1, keepdims=True)
    relative_LE = chosen_LE * chosen_LE.shape[-1] / jnp.where(total_L1 > 0, total_L1, 1.0)
    total = total_L1.sum()
    dropped = (total - placed_L.sum()) / jnp.where(total > 0, total, 1.0)
    return {"moe/load_max": relative_LE.max(), "moe/load_min": relative_LE.min(), "moe/dropped": dropped}
