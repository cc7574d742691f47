"""The built-in strategies: bsp, local_sgd, post_local, diloco and muloco; others have files of their own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtrain.config.sections.sync import CompressConfig, SyncConfig
from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sync.compression.compressor import Compressor
from jaxtrain.sync.compression.make import make_compressor
from jaxtrain.sync.compression.phases import first_phases
from jaxtrain.sync.compression.wire import inner_devices
from jaxtrain.sync.gossip.strategy import Gossip
from jaxtrain.sync.outer_optimizer import outer_step
from jaxtrain.sync.quantized_mean import (
    BITS,
    Bits,
    Residuals,
    initial_residuals,
    quantized_mean,
    sent_bytes,
    server_specs,
)
from jaxtrain.sync.replica_dim import along, are_finite, spread
from jaxtrain.sync.stale import Asynchronous, StaleSynchronous
from jaxtrain.sync.strategy import Replicas, StepPlan, Strategy, like
from jaxtrain.sync.streaming import StreamingDiLoCo

Tree = Any


class BulkSynchronous(Strategy):
    """`bsp`: all replicas reduce their gradients in every step and hold the same parameters.

    With `sync.compress.gradients` each replica computes gradients of its rows, and their mean travels compressed.
    """

    parameters_differ = False

    def __init__(self, config: SyncConfig, replicas: int, mesh: Mesh | None = None) -> None:
        super().__init__(config, replicas, mesh)
        self.combines_gradients = config.is_compressed and replicas > 1
        self.combines_momenta = self.combines_gradients and config.is_onebit_adam

    def plan(self, step: int) -> StepPlan:
        """Returns the one program of every step."""
        return StepPlan(is_joint=True)

    @cached_property
    def phases(self) -> Sequence[tuple[int, Strategy]]:
        """First steps of another compression: before the second moment of Adam is frozen, or in a warm-up."""
        return [(end, self._with(compress)) for end, compress in first_phases(self.config.compress)]

    def _with(self, compress: CompressConfig) -> BulkSynchronous:
        other = BulkSynchronous(self.config.model_copy(update={"compress": compress}), self.replicas, self.mesh)
        other.names = self.names
        return other

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns what compression keeps, such as what was not sent yet."""
        return self._compressor.init(params) if self.combines_gradients else {}

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns the shardings of what compression keeps in another form than the parameters."""
        return self._compressor.specs(params) if self.combines_gradients else {}

    def combine(
        self, own: dict[str, Tree], gradients: Tree, tokens: jax.Array
    ) -> tuple[dict[str, Tree], Tree, dict[str, jax.Array]]:
        """Returns (own state, mean, bytes that a replica sent); the mean is NaN if any gradient is not finite."""
        own, mean = self._compressor.mean(own, jax.tree.map(lambda g: g.astype(jnp.float32), gradients))
        is_finite = are_finite(gradients).all()
        mean = jax.tree.map(lambda x, g: jnp.where(is_finite, x, jnp.nan).astype(g.dtype), mean, gradients)
        size = self.sent_bytes(jax.tree.map(lambda g: g[0], gradients), None)
        return own, mean, {"exchanged_bytes": jnp.float32(size)}

    def sent_bytes(self, params: Tree, kind: Hashable) -> int:
        """Returns the bytes that each replica sends in a step: those of a ring all-reduce in float32, or compressed."""
        return self._compressor.sent_bytes(params) if self.combines_gradients else super().sent_bytes(params, kind)

    @cached_property
    def _compressor(self) -> Compressor:
        return make_compressor(self.config.compress, self.replicas, self.replica_mesh, self.names)


class LocalSGD(Strategy):
    """`local_sgd`: replicas take steps of their own and average their parameters every `every` steps.

    McMahan et al. 2017 (arXiv 1602.05629); Stich 2019 (arXiv 1805.09767).
    """

    min_replicas = 2

    @property
    def keeps_equal_replicas(self) -> bool:
        """True: the average of equal replicas is one of them."""
        return True


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
    replicas continue from x. Douillard et al. 2023 (arXiv 2311.08105). With `sync.compress` the changes x - y_i travel
    in few bits.
    """

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns the outer parameters, and the velocity unless the momentum is 0; both in float32."""
        outer = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        own = {"outer": outer} | ({"velocity": jax.tree.map(jnp.zeros_like, outer)} if self._momentum else {})
        if self._bits and self.config.compress.error_feedback:
            own |= initial_residuals(params, self.replicas, self._bits)._asdict()
        return own

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns the shardings of the servers' residuals."""
        mesh = jax.tree.leaves(params)[0].sharding.mesh
        return {"server": server_specs(params, self.replicas, self._bits, mesh)} if self._bits else {}

    def exchange(self, own: dict[str, Tree], replicas: Replicas, kind: Hashable) -> tuple[dict[str, Tree], Tree]:
        """Takes an outer step, unless no replica is finite: then all go back to the outer parameters."""
        is_any, outer = replicas.weights.sum() > 0, {name: own[name] for name in ("outer", "velocity") if name in own}
        residuals = {name: own[name] for name in ("worker", "server") if name in own}
        if self._bits and not self._is_of_other_mesh:
            residuals = self._receive(own, replicas)
        moved = outer_step(self.config.outer, outer, replicas.average) | residuals
        own = jax.tree.map(lambda new, old: jnp.where(is_any, new, old), moved, own)
        return own, spread(like(own["outer"], replicas.params), self.replicas)

    @property
    def keeps_equal_replicas(self) -> bool:
        """True unless changes are rounded."""
        return not self._bits

    def agreed(self, own: dict[str, Tree], replicas: Replicas) -> Tree:
        """Returns the outer parameters: those of the last exchange."""
        return like(own["outer"], replicas.params)

    def sent_bytes(self, params: Tree, kind: Hashable) -> int:
        """Returns the bytes of a ring all-reduce in float32, or those of the compressed changes."""
        if not self._bits:
            return super().sent_bytes(params, kind)
        return sent_bytes(params, self._bits, self.replicas, inner_devices(self.mesh))

    @property
    def _bits(self) -> Bits:
        """Bits of a value that is sent; 0: float32. A single replica sends nothing."""
        return BITS[self.config.compress.deltas] if self.replicas > 1 else 0

    @property
    def _is_of_other_mesh(self) -> bool:
        """True if the replicas are those of a state that was saved on another mesh, where they cannot swap blocks."""
        return self.mesh is not None and self.mesh.shape[REPLICA_AXIS] != self.replicas

    def _receive(self, own: dict[str, Tree], replicas: Replicas) -> dict[str, Tree]:
        """Sends the changes of the replicas; takes the average that follows from what arrives; returns residuals."""
        shares = replicas.weights * self.replicas  # their mean is the weighted average

        def weighted(x: jax.Array, y: jax.Array) -> jax.Array:
            share = along(shares, y)
            return jnp.where(share > 0, share * (x - y.astype(jnp.float32)), 0.0)

        changes = jax.tree.map(weighted, own["outer"], replicas.params)
        before = Residuals(own["worker"], own["server"]) if "worker" in own else None
        change, after = quantized_mean(changes, before, self._bits, self.replica_mesh)
        replicas.receive(jax.tree.map(jnp.subtract, own["outer"], change))
        return {} if after is None else after._asdict()

    @property
    def _momentum(self) -> float:
        return self.config.outer.momentum


class MuLoCo(DiLoCo):
    """`muloco`: diloco with Muon as the inner optimizer, and changes in 2 bits with residuals if not configured.

    Therien et al. 2025 (arXiv 2505.23725): the changes of Muon lose less by rounding than those of AdamW.
    """


STRATEGIES: dict[str, type[Strategy]] = {
    "bsp": BulkSynchronous, "local_sgd": LocalSGD, "post_local": PostLocal, "diloco": DiLoCo, "gossip": Gossip,
    "ssp": StaleSynchronous, "asp": Asynchronous,
    "streaming_diloco": StreamingDiLoCo, "muloco": MuLoCo,
}  # fmt: skip
