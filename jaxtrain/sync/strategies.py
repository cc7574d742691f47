"""The built-in strategies: bsp, local_sgd, post_local and diloco."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.sync.gossip import Gossip
from jaxtrain.sync.replica_dim import spread
from jaxtrain.sync.strategy import Replicas, StepPlan, Strategy, like

Tree = Any


class BulkSynchronous(Strategy):
    """`bsp`: all replicas reduce their gradients in every step and hold the same parameters."""

    parameters_differ = False

    def plan(self, step: int) -> StepPlan:
        """Returns the one program of every step."""
        return StepPlan(is_joint=True)


class LocalSGD(Strategy):
    """`local_sgd`: replicas take steps of their own and average their parameters every `every` steps.

    McMahan et al. 2017 (arXiv 1602.05629); Stich 2019 (arXiv 1805.09767).
    """

    min_replicas = 2


class PostLocal(LocalSGD):
    """`post_local`: `bsp` for the first `bsp_steps` steps, then `local_sgd`. Lin et al. 2020 (arXiv 1808.07217)."""

    def plan(self, step: int) -> StepPlan:
        """Returns a joint step, or later a step of each replica, with an exchange every `every` steps from then on."""
        done = step - self.config.bsp_steps
        if done < 0:
            return StepPlan(is_joint=True)
        return StepPlan(exchange="all" if (done + 1) % self.config.every == 0 else None)


class DiLoCo(Strategy):
    """`diloco`: the average change of the replicas is the gradient of an outer SGD with momentum.

    With x the outer parameters, y_i those of replica i, w_i its share and D = x - sum_i w_i y_i, the outer step is that
    of torch.optim.SGD: v <- momentum v + D; x <- x - lr (D + momentum v) with Nesterov's momentum, else x - lr v. All
    replicas continue from x. Douillard et al. 2023 (arXiv 2311.08105).
    """

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns the outer parameters, and the velocity unless the momentum is 0; both in float32."""
        outer = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return {"outer": outer} | ({"velocity": jax.tree.map(jnp.zeros_like, outer)} if self._momentum else {})

    def exchange(self, own: dict[str, Tree], replicas: Replicas, kind: Hashable) -> tuple[dict[str, Tree], Tree]:
        """Takes an outer step, unless no replica is finite: then all go back to the outer parameters."""
        is_any, moved = replicas.weights.sum() > 0, self._moved(own, replicas.average)
        own = jax.tree.map(lambda new, old: jnp.where(is_any, new, old), moved, own)
        return own, spread(like(own["outer"], replicas.params), self.replicas)

    def agreed(self, own: dict[str, Tree], replicas: Replicas) -> Tree:
        """Returns the outer parameters: those of the last exchange."""
        return like(own["outer"], replicas.params)

    @property
    def _momentum(self) -> float:
        return self.config.outer.momentum

    def _moved(self, own: dict[str, Tree], mean: Tree) -> dict[str, Tree]:
        """Returns the outer parameters and the velocity after a step."""
        lr, momentum = self.config.outer.lr, self._momentum
        if lr == 1 and not momentum:
            return {"outer": mean}  # copied: x - (x - mean) would be rounded
        change = jax.tree.map(jnp.subtract, own["outer"], mean)
        if not momentum:
            return {"outer": jax.tree.map(lambda x, d: x - lr * d, own["outer"], change)}
        velocity = jax.tree.map(lambda v, d: momentum * v + d, own["velocity"], change)
        step = velocity
        if self.config.outer.nesterov:
            step = jax.tree.map(lambda v, d: d + momentum * v, velocity, change)
        return {"outer": jax.tree.map(lambda x, s: x - lr * s, own["outer"], step), "velocity": velocity}


STRATEGIES: dict[str, type[Strategy]] = {
    "bsp": BulkSynchronous, "local_sgd": LocalSGD, "post_local": PostLocal, "diloco": DiLoCo, "gossip": Gossip,
}  # fmt: skip
