"""A parameter server whose workers push gradients of parameters that they read some updates ago, as one program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.errors import UserError
from jaxtrain.sync.clocks import Clocks, ServerUpdate, random_durations
from jaxtrain.sync.replica_dim import choose, spread
from jaxtrain.sync.strategy import Strategy, float32_bytes

Tree = Any


class StaleSynchronous(Strategy):
    """`ssp`: workers push to a server and read from it, each at its own speed, at most `bound` iterations apart.

    A step is one update of the server: x <- x + |P| / M u, with P the workers that push, of M, and u the update that
    the optimizer makes of their gradients g_i(y_i), weighted by tokens; y_i is what worker i read last. Then those that
    read get y_i <- x, their own pushes included. Who pushes and who reads is a model in virtual time, see
    `sync.clocks`. In iteration c a worker trains on its rows of batch c. Ho et al. 2013 ("More effective distributed ML
    via a stale synchronous parallel parameter server"). With a bound of 0 all push and read together: that is `bsp`.
    """

    min_replicas = 2
    parameters_differ = False

    def __init__(self, config: SyncConfig, replicas: int, mesh: Mesh | None = None) -> None:
        super().__init__(config, replicas, mesh)
        options = config.stale
        if options.speeds and len(options.speeds) != replicas:
            message = f"{len(options.speeds)} speeds for {replicas} replicas"
            raise UserError(f"sync.stale.speeds: {message}; expected one for each, or none")
        speeds = options.speeds or (1.0,) * replicas
        self.combines_gradients = self.mixes_batches = replicas > 1 and self.bound != 0
        self._clocks = Clocks(replicas, self.bound, random_durations(speeds, options.jitter, options.seed))

    @property
    def bound(self) -> int | None:
        """Iterations that a worker may be ahead of the slowest; None: any number."""
        return self.config.stale.bound

    def continues(self, before: Strategy) -> bool:
        """Returns whether a state is of the same clocks: of others workers would not have read when these say."""
        return isinstance(before, StaleSynchronous) and self.origin == before.origin

    @property
    def origin(self) -> tuple[Any, ...]:
        """Options that the clocks follow from."""
        options = self.config.stale
        return self.bound, options.speeds, options.jitter, options.seed

    def update(self, step: int) -> ServerUpdate:
        """Returns who pushes and who reads in a step."""
        return self._clocks.update(step)

    def data_steps(self, step: int) -> tuple[int, ...]:
        """Returns the iterations whose gradients are pushed. Rows of the other workers do not count."""
        if not self.mixes_batches:
            return (step,)
        clocks = self.update(step).clocks
        first = min(clock for clock in clocks if clock >= 0)
        return tuple(first if clock < 0 else clock for clock in clocks)

    def trained_batches(self, step: int) -> float:
        """Returns the iterations of all workers that `step` steps have pushed, over the number of workers."""
        if not step or not self.mixes_batches:
            return float(step)
        return self.update(step - 1).completed / self.replicas

    def host_values(self, step: int) -> dict[str, np.ndarray]:
        """Returns which workers read before the step, which push in it, and the updates since those read."""
        update = self.update(step)
        reads = self.update(step - 1).reads if step else (True,) * self.replicas
        return {
            "reads": np.array(reads), "pushes": np.array(update.pushes),
            "staleness": np.array(update.staleness, np.int32),
        }  # fmt: skip

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns the parameters that each worker read, and the values of the first step."""
        read = jax.tree.map(lambda p: spread(p, self.replicas), params)
        return {"read": read, **jax.tree.map(jnp.asarray, self.host_values(0))}

    def read(self, own: dict[str, Tree], params: Tree) -> tuple[dict[str, Tree], Tree]:
        """Gives the server's parameters to those that read after the last update; the others keep theirs."""
        read = choose(own["reads"], spread(params, self.replicas), own["read"])
        return {**own, "read": read}, read

    def present(self, own: dict[str, Tree]) -> jax.Array:
        """Returns the workers that push in this step, bool [replicas]."""
        return own["pushes"]

    def scale_updates(self, own: dict[str, Tree], updates: Tree) -> Tree:
        """Scales the optimizer's update by the share of the workers that push: M single ones are about one of all."""
        share = own["pushes"].sum() / self.replicas
        return jax.tree.map(lambda u: (u * share).astype(u.dtype), updates)

    def combine(
        self, own: dict[str, Tree], gradients: Tree, tokens: jax.Array
    ) -> tuple[dict[str, Tree], Tree, dict[str, jax.Array]]:
        """Returns the gradients of the rows of those that push, and how stale they are."""
        own, mean, _ = super().combine(own, gradients, tokens)
        pushes, staleness = own["pushes"], own["staleness"].astype(jnp.float32)
        messages = pushes.sum() + own["reads"].sum()
        return own, mean, {
            "staleness": jnp.where(pushes, staleness, 0.0).sum() / pushes.sum(),
            "staleness_max": staleness.max(),
            "pushing": pushes.sum().astype(jnp.float32),
            "exchanged_bytes": messages * (float32_bytes(mean) / self.replicas),
        }  # fmt: skip

    def sent_bytes(self, params: Tree, kind: Any) -> int:
        """Returns the bytes of an iteration of a worker: gradients that it pushes and parameters that it reads."""
        return 2 * float32_bytes(params)


class Asynchronous(StaleSynchronous):
    """`asp`: as `ssp`, without a bound. Of one worker it is training one step after the other, `bsp`."""

    min_replicas = 1

    @property
    def bound(self) -> None:
        """The bound, which is None: a worker never waits."""
        return None
