"""The rule of `async_diloco`: an outer optimizer for changes that come one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.sections.sync import OuterConfig
from jaxtrain.islands.server.rules import Header, Rule, State, Tree, weighted_mean

ROUND = 1 - 1e-4  # of the islands; shares are rounded


@dataclass(frozen=True, eq=False)
class DelayedNesterovRule(Rule):
    """SGD whose momentum waits for a round (Liu et al. 2024, arXiv 2401.09135, algorithm 3 with c = 0).

    An island pushes D = (parameters that it read) - (its own). Pushes of P of N islands, of mean D by tokens, take the
    step g = P / N D at once: x <- x - lr g. When as many have come as there are islands, with B the sum of their g,
    v <- momentum v + B, and the step is g + momentum v (without Nesterov: g + momentum v before). So the steps of a
    round are together that of `diloco` for the mean B, and momentum is not added up by changes of old parameters.

    Attributes:
        outer: section `sync.outer`.
    """

    outer: OuterConfig

    def init(self, params: Tree, names: Tree) -> State:
        """Returns the parameters, also in float32, v, B, and the share of a round that B has."""
        own = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
        zeros = jax.tree.map(jnp.zeros_like, own)
        return {
            "params": params, "outer": own, "velocity": zeros, "gathered": jax.tree.map(jnp.copy, zeros),
            "round": jnp.float32(0),
        }  # fmt: skip

    def share(self, header: Header) -> float:
        """Returns the share of the islands that pushed."""
        return header.share

    def update(self, state: State, pushes: Sequence[Tree], header: Header, names: Tree) -> State:
        """Returns the state after a step."""
        mean = weighted_mean(pushes, header.weights())
        arrived = float(state["round"]) + header.share
        is_round = arrived >= ROUND
        kept = {name: tree for name, tree in state.items() if name not in ("params", "round")}
        kept = self._step(kept, mean, np.float32(header.share), is_round)
        params = jax.tree.map(lambda x, p: np.asarray(x).astype(p.dtype), kept["outer"], state["params"])
        return {"params": params, **kept, "round": np.float32(0 if is_round else arrived)}

    @cached_property
    def _step(self) -> Callable[[State, Tree, Any, bool], State]:
        lr, momentum = self.outer.lr, self.outer.momentum

        def step(kept: State, mean: Tree, share: jax.Array, is_round: bool) -> State:
            change = jax.tree.map(lambda d: share * d, mean)
            gathered = jax.tree.map(jnp.add, kept["gathered"], change)
            velocity, size = kept["velocity"], change
            if is_round:
                before = velocity
                velocity = jax.tree.map(lambda v, b: momentum * v + b, velocity, gathered)
                ahead = velocity if self.outer.nesterov else before
                size = jax.tree.map(lambda g, v: g + momentum * v, change, ahead)
                gathered = jax.tree.map(jnp.zeros_like, gathered)
            outer = jax.tree.map(lambda x, s: x - lr * s, kept["outer"], size)
            return {"outer": outer, "velocity": velocity, "gathered": gathered}

        return jax.jit(step, static_argnums=3)
