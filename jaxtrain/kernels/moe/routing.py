"""Routing of tokens to experts: choices, gates, and slots within the capacity.

It runs outside any `shard_map`, on whole rows of the batch, so that decisions do not depend on the layout.
Shapes: B batch, T tokens, K choices of a token, E experts.

Switch: Fedus et al. 2021, arXiv 2101.03961. Top-k gates that sum to one: Shazeer et al. 2017, arXiv 1701.06538, and
Mixtral, arXiv 2401.04088. A selection bias in place of a balance loss: Wang et al. 2024, arXiv 2408.15664.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxtrain.sharding.rules import BATCH
from jaxtrain.sharding.sharder import Sharder


class Routing(NamedTuple):
    """Experts and slots of tokens.

    Attributes:
        expert_BTK: int32; E for a dropped choice (padding, or beyond the capacity).
        gate_BTK: float32 factor of that expert's output.
        slot_BTK: int32 index among the tokens of the same sequence and expert; None without a capacity.
    """

    expert_BTK: Array
    gate_BTK: Array
    slot_BTK: Array | None


class Load(NamedTuple):
    """Sums over tokens, float32; a stack of layers has a leading dim on each.

    Attributes:
        chosen_E: choices of every expert, including dropped ones.
        placed: choices within the capacity.
        probability_E: router probability of every expert.
        squares: log(Z)^2 of the router.
    """

    chosen_E: Array
    placed: Array
    probability_E: Array
    squares: Array


def expert_capacity(length: int, experts: int, top_k: int, factor: float) -> int:
    """Returns the tokens that an expert takes of one sequence: an even share times the capacity factor, rounded up."""
    return min(length, math.ceil(factor * length * top_k / experts))


def route(
    logits_BTE: Array,
    bias_E: Array | None,
    is_token_BT: Array,
    *,
    top_k: int,
    normalize: bool,
    capacity_factor: float | None = None,
    order_BT: Array | None = None,
    sharder: Sharder | None = None,
) -> tuple[Routing, Load]:
    """Routes every token by its router logits.

    Args:
        logits_BTE: float32 router logits.
        bias_E: float32, added to the probabilities for the selection only, not for the gates; or None. For its
            gradient see `with_bias_gradient`.
        is_token_BT: bool; False is padding, which is neither routed nor counted.
        top_k: choices per token.
        normalize: scale the gates of a token to sum to one; else they are the probabilities.
        capacity_factor: capacity of an expert over its even share of a sequence; None drops no choice. First choices of
            all tokens precede second ones, and earlier tokens later ones, in each sequence separately: groups that
            depend on the devices would drop different tokens on different layouts. The documents of a sequence compete:
            what a document's experts drop depends on those before it.
        order_BT: int32, unique, increasing with the true order of the tokens of a sequence if the arrays are permuted.
        sharder: mesh and rules; ranks are computed on whole rows.
    """
    experts = logits_BTE.shape[-1]
    probability_BTE = jax.nn.softmax(logits_BTE, -1)
    score_BTE = logits_BTE if bias_E is None else probability_BTE + bias_E
    expert_BTK = top_k_indices(lax.stop_gradient(score_BTE), top_k)
    # One-hot sums rather than gathers: their gradients are sums too, not scatters.
    one_hot_BTKE = (expert_BTK[..., None] == jnp.arange(experts)) & is_token_BT[..., None, None]
    gate_BTK = jnp.sum(jnp.where(one_hot_BTKE, probability_BTE[:, :, None], 0.0), -1)
    if normalize:
        total_BT1 = gate_BTK.sum(-1, keepdims=True)
        gate_BTK = gate_BTK / jnp.where(total_BT1 > 0, total_BT1, 1.0)
    chosen_E = jnp.sum(one_hot_BTKE, (0, 1, 2), dtype=jnp.int32).astype(jnp.float32)
    if bias_E is not None:
        gate_BTK = with_bias_gradient(gate_BTK, bias_E, experts * chosen_E - chosen_E.sum())
    expert_BTK = jnp.where(is_token_BT[..., None], expert_BTK, experts)
    slot_BTK, placed = None, chosen_E.sum()
    if capacity_factor is not None:
        slot_BTK = expert_ranks(expert_BTK, experts, order_BT, sharder or Sharder())
        capacity = expert_capacity(logits_BTE.shape[1], experts, top_k, capacity_factor)
        fits = (slot_BTK < capacity) & (expert_BTK < experts)
        expert_BTK, placed = jnp.where(fits, expert_BTK, experts), jnp.sum(fits, dtype=jnp.int32).astype(jnp.float32)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, -1))
    load = Load(
        chosen_E,
        placed,
        jnp.sum(jnp.where(is_token_BT[..., None], probability_BTE, 0.0), (0, 1)),
        jnp.sum(jnp.where(is_token_BT, squares_BT, 0.0)),
    )
    return Routing(expert_BTK, gate_BTK, slot_BTK), load


def top_k_indices(score_BTE: Array, top_k: int) -> Array:
    """Returns the indices of the `top_k` largest scores, int32 [B, T, K]; of equal ones the first.

    By repeated argmax: the partitioner gathers the whole batch for `lax.top_k` if tokens are replicated over an axis.
    """
    chosen = []
    for _ in range(top_k):
        index_BT = jnp.argmax(score_BTE, -1).astype(jnp.int32)
        chosen.append(index_BT)
        score_BTE = jnp.where(jnp.arange(score_BTE.shape[-1]) == index_BT[..., None], -jnp.inf, score_BTE)
    return jnp.stack(chosen, -1)


def expert_ranks(expert_BTK: Array, experts: int, order_BT: Array | None, sharder: Sharder) -> Array:
    """Returns the rank of every choice among those of the same row and expert, int32 [B, T, K].

    The order is by (choice, order of the token), a total order, so that the stability of the two sorts does not matter.
    A value is meaningless if the expert is `experts`.
    """
    B, T, K = expert_BTK.shape
    order_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T)) if order_BT is None else order_BT
    expert_BTK = sharder.constrain(expert_BTK, BATCH, None, None)
    order_BT = sharder.constrain(order_BT.astype(jnp.int32), BATCH, None)
    order, choice, index = (
        jnp.broadcast_to(x, (B, T, K)).reshape(B, -1)
        for x in (order_BT[..., None], jnp.arange(K, dtype=jnp.int32), jnp.arange(T * K, dtype=jnp.int32).reshape(T, K))
    )
    keys = (expert_BTK.reshape(B, -1), choice, order)
    by_expert, _, _, index = lax.sort((*keys, index), dimension=1, num_keys=3)
    count_BE = jnp.sum(expert_BTK[..., None] == jnp.arange(experts + 1), (1, 2), dtype=jnp.int32)
    start_BE = jnp.cumsum(count_BE, 1) - count_BE
    rank = jnp.arange(T * K, dtype=jnp.int32) - jnp.take_along_axis(start_BE, by_expert, 1)
    _, rank = lax.sort((index, rank), dimension=1, num_keys=1)  # back to the order of the tokens
    return rank.reshape(B, T, K)


@jax.custom_vjp
def with_bias_gradient(gate_BTK: Array, bias_E: Array, excess_E: Array) -> Array:
    """Returns `gate_BTK`, and defines `excess_E` as the gradient of the selection bias.

    The excess, experts * choices - all choices, is positive for an expert with more than its share. It is a sum of
    whole numbers over tokens, so that sums over microbatches and shards are exact (below 2^24). The optimizer takes a
    step against its sign (`optim.selection_bias`).
    """
    del bias_E, excess_E
    return gate_BTK


def _bias_gradient_fwd(gate_BTK, bias_E, excess_E):
    return gate_BTK, (excess_E.astype(bias_E.dtype), jnp.zeros_like(excess_E))


def _bias_gradient_bwd(residuals, gradient):
    return (gradient, *residuals)


with_bias_gradient.defvjp(_bias_gradient_fwd, _bias_gradient_bwd)
