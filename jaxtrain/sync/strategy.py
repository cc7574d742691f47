"""The protocol of a synchronisation strategy: what it adds to the state, its exchange, its steps, its cost."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import jax

from jaxtrain.config.schema import SyncConfig
from jaxtrain.sync.replica_dim import average, spread

Tree = Any


class StepPlan(NamedTuple):
    """The compiled programs that the host runs for a step.

    Attributes:
        is_joint: the replicas reduce their gradients and stay equal; else each takes a step of its own.
        exchange: kind of the exchange after it, compiled for each kind; None: no exchange.
    """

    is_joint: bool = False
    exchange: Hashable | None = None


class Strategy:
    """A way in which replicas agree; subclass it for one of your own.

    Replicas are the mesh axis `replica`. Trees of all replicas have a leading replica dim, which is sharded over it;
    inside a replica any layout works. Methods are traced and must be pure functions of their arguments.

    Attributes:
        parameters_differ: replicas may hold different parameters between exchanges. False is `bsp` alone.
        min_replicas: replicas that it needs.
        early_exchange: kind of the exchange that ends a round early, when a run continues with other replicas.
        config: section `sync` of the config.
        replicas: size of the mesh axis `replica`.
    """

    parameters_differ = True
    min_replicas = 1
    early_exchange: Hashable = "all"

    def __init__(self, config: SyncConfig, replicas: int) -> None:
        self.config, self.replicas = config, replicas

    def plan(self, step: int) -> StepPlan:
        """Returns the programs of the step after `step` finished ones: by default an exchange every `sync.every`."""
        return StepPlan(exchange="all" if (step + 1) % self.config.every == 0 else None)

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns what the strategy adds to the state, for the parameters of step 0, without a replica dim.

        A tree like the parameters is sharded as they are. If its leaves have a leading dim of the replicas, that is
        sharded over `replica`. Other arrays are replicated.
        """
        return {}

    def exchange(
        self, own: dict[str, Tree], params: Tree, weights: jax.Array, kind: Hashable
    ) -> tuple[dict[str, Tree], Tree]:
        """Returns (own state, parameters) after an exchange: by default all replicas get the average.

        Args:
            own: what `init` added.
            params: parameters of all replicas, [replicas, ...]. Those of weight 0 may not be finite.
            weights: share of each replica in the tokens since the last exchange, float32 [replicas] of sum 1. A replica
                with parameters that are not finite has 0. All are 0 if there is no other.
            kind: of the plan of the step.
        """
        return own, spread(average(params, weights), self.replicas)

    def agreed(self, own: dict[str, Tree], params: Tree, weights: jax.Array) -> Tree:
        """Returns the parameters that validation and export use, without a replica dim: by default the average."""
        return average(params, weights)

    def sent_bytes(self, parameter_bytes: int, kind: Hashable) -> int:
        """Returns the bytes that each replica sends in an exchange: by default those of a ring all-reduce.

        Args:
            parameter_bytes: of all parameters in float32, in which averages are summed.
            kind: of the exchange.
        """
        return 2 * parameter_bytes * (self.replicas - 1) // self.replicas
