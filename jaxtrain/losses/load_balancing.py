"""Losses and metrics of the experts' load, from sums over tokens that shards and microbatches add up."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.kernels.moe.routing import Load


def balance(load: Load, chosen_LE: Array, layers: int) -> Array:
    """Sum over tokens of the balance loss, whose mean over tokens is 1 where the load is even; float32 scalar.

    For each layer experts * sum_e f_e P_e, with f_e the share of all choices that fell on expert e and P_e its mean
    probability (Switch, arXiv 2101.03961, equation 4), and the mean over layers. f is that of the whole global batch
    and has no gradient; so the loss is a sum over tokens, whatever the microbatches.

    Args:
        load: sums over the tokens of this microbatch, with a leading dim of layers.
        chosen_LE: choices by layer and expert over the global batch.
        layers: of the whole model, of which `load` may have a part; the parts' sums add up.
    """
    total_L1 = chosen_LE.sum(-1, keepdims=True)
    share_LE = lax.stop_gradient(chosen_LE / jnp.where(total_L1 > 0, total_L1, 1.0))
    return chosen_LE.shape[-1] / layers * jnp.sum(share_LE * load.probability_E)


def router_z(load: Load, layers: int) -> Array:
    """Sum over tokens of log(Z)^2 of the router, mean over layers (ST-MoE, arXiv 2202.08906, equation 5)."""
    return jnp.sum(load.squares) / layers


def load_metrics(chosen_LE: Array, placed_L: Array) -> dict[str, Array]:
    """Metrics of a step, from sums over its global batch.

    `moe/load_max`, `moe/load_min`: choices of the busiest and of the idlest expert of all layers over an even share
    (1 is even); `moe/dropped`: share of the choices that found no place.
    """
    total_L1 = chosen_LE.sum(-1, keepdims=True)
    relative_LE = chosen_LE * chosen_LE.shape[-1] / jnp.where(total_L1 > 0, total_L1, 1.0)
    total = total_L1.sum()
    dropped = (total - placed_L.sum()) / jnp.where(total > 0, total, 1.0)
    return {"moe/load_max": relative_LE.max(), "moe/load_min": relative_LE.min(), "moe/dropped": dropped}
