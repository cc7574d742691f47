"""Routing of tokens to experts: choices, gates, and slots within the capacity.

Everything here has the meaning it has on one device: it runs outside any `shard_map`, on whole rows of the batch, so
that no layout changes a decision. Shapes: B batch, T tokens, K choices of a token, E experts.

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

    expert_BTK: int32; E for a choice that goes nowhere (padding, or no place left).
    gate_BTK: float32 factor of that expert's output.
    slot_BTK: int32 place among the tokens of the same sequence and expert; None without a capacity.
    """

    expert_BTK: Array
    gate_BTK: Array
    slot_BTK: Array | None


class Load(NamedTuple):
    """Sums over tokens, float32; a stack of layers has a leading dim on each.

    chosen_E: choices of every expert, whether they found a place or not.
    placed: choices that found a place.
    probability_E: router probability of every expert.
    squares: log(Z)^2 of the router.
    """

    chosen_E: Array
    placed: Array
    probability_E: Array
    squares: Array


def places(length: int, experts: int, top_k: int, capacity: float) -> int:
    """Places that an expert has for the tokens of one sequence: an even share times `capacity`, rounded up."""
    return min(length, math.ceil(capacity * length * top_k / experts))


def route(
    logits_BTE: Array,
    bias_E: Array | None,
    is_token_BT: Array,
    *,
    top_k: int,
    normalize: bool,
    capacity: float | None = None,
    order_BT: Array | None = None,
    sharder: Sharder | None = None,
) -> tuple[Routing, Load]:
    """Routes every token by its router logits.

    Args:
        logits_BTE: float32 router logits.
        bias_E: float32, added to the probabilities for the selection alone, not for the gates; or None. Its
            gradient is made up: see `steer`.
        is_token_BT: bool; False is padding, neither routed nor counted.
        top_k: choices of a token.
        normalize: the gates of a token sum to one; else they are the probabilities.
        capacity: places of an expert over its even share of a sequence; None takes every choice. First choices of
            all tokens go before second ones, earlier tokens before later ones, in each sequence by itself: groups
            that followed the devices would drop other tokens on other layouts.
        order_BT: int32, rising with the true order of the tokens of a sequence, no two alike, where the arrays may be
            in another order.
        sharder: places whole rows on one device for the ranks.
    """
    experts = logits_BTE.shape[-1]
    probability_BTE = jax.nn.softmax(logits_BTE, -1)
    score_BTE = logits_BTE if bias_E is None else probability_BTE + bias_E
    expert_BTK = largest(lax.stop_gradient(score_BTE), top_k)
    # One-hot sums rather than gathers: their gradients are sums too, not scatters.
    one_hot_BTKE = (expert_BTK[..., None] == jnp.arange(experts)) & is_token_BT[..., None, None]
    gate_BTK = jnp.sum(jnp.where(one_hot_BTKE, probability_BTE[:, :, None], 0.0), -1)
    if normalize:
        total_BT1 = gate_BTK.sum(-1, keepdims=True)
        gate_BTK = gate_BTK / jnp.where(total_BT1 > 0, total_BT1, 1.0)
    chosen_E = jnp.sum(one_hot_BTKE, (0, 1, 2), dtype=jnp.int32).astype(jnp.float32)
    if bias_E is not None:
        gate_BTK = steer(gate_BTK, bias_E, experts * chosen_E - chosen_E.sum())
    expert_BTK = jnp.where(is_token_BT[..., None], expert_BTK, experts)
    slot_BTK, placed = None, chosen_E.sum()
    if capacity is not None:
        slot_BTK = ranks(expert_BTK, experts, order_BT, sharder or Sharder())
        fits = (slot_BTK < places(logits_BTE.shape[1], experts, top_k, capacity)) & (expert_BTK < experts)
        expert_BTK, placed = jnp.where(fits, expert_BTK, experts), jnp.sum(fits, dtype=jnp.int32).astype(jnp.float32)
    squares_BT = jnp.square(jax.nn.logsumexp(logits_BTE, -1))
    load = Load(
        chosen_E,
        placed,
        jnp.sum(jnp.where(is_token_BT[..., None], probability_BTE, 0.0), (0, 1)),
        jnp.sum(jnp.where(is_token_BT, squares_BT, 0.0)),
    )
    return Routing(expert_BTK, gate_BTK, slot_BTK), load


def largest(score_BTE: Array, top_k: int) -> Array:
    """Indices of the `top_k` largest, int32 [B, T, K], the first of equals first.

    As many argmaxes: partitioned, `lax.top_k` gathers the whole batch once tokens are replicated over an axis.
    """
    chosen = []
    for _ in range(top_k):
        index_BT = jnp.argmax(score_BTE, -1).astype(jnp.int32)
        chosen.append(index_BT)
        score_BTE = jnp.where(jnp.arange(score_BTE.shape[-1]) == index_BT[..., None], -jnp.inf, score_BTE)
    return jnp.stack(chosen, -1)


def ranks(expert_BTK: Array, experts: int, order_BT: Array | None, sharder: Sharder) -> Array:
    """Rank of every choice among those of the same row and expert, int32 [B, T, K].

    By (choice, order of the token), a total order: two sorts, and nothing left to their stability. A value is
    meaningless where the expert is `experts`.
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
def steer(gate_BTK: Array, bias_E: Array, excess_E: Array) -> Array:
    """`gate_BTK`, and a gradient for the selection bias, which has none of its own: `excess_E`.

    The excess, experts * choices - all choices, is above zero for an expert with more than its share. It is a sum
    over tokens of whole numbers: microbatches and shards add up to the same, exactly (below 2^24). The optimizer
    takes a step against its sign (`optim.balance`).
    """
    del bias_E, excess_E
    return gate_BTK


def _steer_fwd(gate_BTK, bias_E, excess_E):
    return gate_BTK, (excess_E.astype(bias_E.dtype), jnp.zeros_like(excess_E))


def _steer_bwd(residuals, gradient):
    return (gradient, *residuals)


steer.defvjp(_steer_fwd, _steer_bwd)
