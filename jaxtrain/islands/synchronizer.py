"""Programs that the host of an island runs in a step: the step of its own, then a push and a read if one is due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.core.program import Program
from jaxtrain.islands.client import Arrived, IslandClient
from jaxtrain.islands.pieces import place_tree
from jaxtrain.islands.shard_encoder import ShardEncoder
from jaxtrain.islands.trees import Flat, flatten_dict, unflatten_dict
from jaxtrain.optim.optimizers import ema_update
from jaxtrain.sync.island_state import RESIDUAL, island_form
from jaxtrain.sync.local_step import SYNC
from jaxtrain.sync.quantized_mean import BITS
from jaxtrain.sync.replica_dim import distance
from jaxtrain.sync.synchronizer import SENT, Metrics, State, Step, Synchronizer

Batch = Mapping[str, jax.Array]
DISTANCE, RECEIVED, PARAMS = "consensus_distance", "received_bytes", "params"


class IslandSynchronizer(Synchronizer, ABC):
    """Base of the islands of all strategies.

    Args:
        program: the island's program, of a run alone.
        client: speaks for the island.
        sync: section of the run's config.

    Attributes:
        form: the form of its state.
        behind: steps after which the island has to go on, because the others went on without it; None: it is with them.
        waiting: opens a context for the time in which the island waits for the others, or for values on their way.
    """

    def __init__(self, program: Program, client: IslandClient, sync: SyncConfig) -> None:
        servers, names = program.config.islands.servers, program.model_def.names
        form = island_form(program.synchronizer.strategy, program.one, sync, servers, names)
        super().__init__(form.strategy)
        self.form = form
        self.program, self.client, self.one = program, client, program.one
        self.abstract, self.start, self.merge, self.agreed = form.abstract, form.start, form.merge, form.agreed
        self.behind: int | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self._sync, self._has_begun = sync, False
        bits = BITS.get(sync.island_format, 0)
        self._encoder = ShardEncoder(flatten_dict({PARAMS: self.one[PARAMS]}), bits) if bits else None

    def begun(self, state: State, step: int) -> State:
        """Returns the state of the first step: with the values of the servers, or they begin with those of it.

        Args:
            state: of the run.
            step: finished steps.
        """
        if self._has_begun:
            return state
        self._has_begun = True
        with self.waiting():
            arrived = self.client.start(step, lambda: self.initial(state), self.place(state))
        return self.with_values(state, arrived) if self.reads_first(step) else state

    def place(self, state: State) -> tuple[int, int]:
        """Returns the last round that counts in a state, if there is no server."""
        return 0, 0

    def close(self) -> None:
        """Says goodbye."""
        self.client.leave()

    @abstractmethod
    def reads_first(self, step: int) -> bool:
        """Returns whether a run that begins after some steps continues from the values of the servers."""

    @abstractmethod
    def initial(self, state: State) -> Flat:
        """Returns the values that the servers begin with if they hold none."""

    @abstractmethod
    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state with the values of the servers."""

    def encoded(self, values: Flat, state: State) -> tuple[Flat, Flat | None]:
        """Returns what an exchange of values sends, and what it leaves to be sent; None if nothing is kept."""
        if self._encoder is None:
            return values, None
        residual = state.get(SYNC, {}).get(RESIDUAL)
        return self._encoder(values, None if residual is None else flatten_dict({PARAMS: residual}))

    def _with_residual(self, state: State, residual: Flat | None, arrived: Arrived) -> State:
        """Returns a state with what an exchange has left to be sent; with that before it if it does not count."""
        if residual is None or not arrived.counts:
            return state
        return {**state, SYNC: {**state[SYNC], RESIDUAL: unflatten_dict(residual)[PARAMS]}}

    def _placed(self, arrived: Arrived, like: State) -> State:
        return unflatten_dict(place_tree(arrived.values, flatten_dict(like)))

    def counted(self, local: Step, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Returns the state after a step of the island alone, with its tokens counted in the part `sync`."""
        sync = state[SYNC]
        new, metrics = local(self.merge(state), batch)
        tokens = self._count(sync["tokens"], metrics["skipped"], metrics["tokens"])
        return {**new, SYNC: {**sync, "tokens": tokens}}, metrics

    @cached_property
    def _count(self) -> Callable[..., jax.Array]:
        def count(before: jax.Array, skipped: jax.Array, tokens: jax.Array) -> jax.Array:
            return before + jnp.where(skipped > 0, 0.0, tokens)

        return jax.jit(count)

    def float_mutable(self, state: State) -> Flat:
        """Returns the mutable variables with fractions, which are averaged as parameters are."""
        mutable = flatten_dict({"mutable": state.get("mutable", {})})
        return {path: x for path, x in mutable.items() if jnp.issubdtype(x.dtype, jnp.inexact)}

    def healed(self, state: State) -> State:
        """Returns a state with initial moments in place of those that are not finite."""
        fresh = self.program.init()
        names = [name for name in ("opt_state", "ema") if name in state]
        heal = jax.jit(lambda x, y: jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(a), a, b.astype(a.dtype)), x, y))
        return {**state, **{name: heal(state[name], fresh[name]) for name in names}}

    def _note(self, arrived: Arrived, clock: int) -> Metrics:
        """Notes if the island was left behind. Returns metrics of the exchange."""
        self.behind = arrived.clock if arrived.clock > clock else None
        nbytes = {SENT: jnp.float32(arrived.nbytes), RECEIVED: jnp.float32(arrived.received)}
        return nbytes | {name: jnp.float32(x) for name, x in arrived.metrics.items()}


class GradientIsland(IslandSynchronizer):
    """`bsp`, `ssp` and `asp`: the island computes gradients, and the servers make the update.

    The state of the island is that of one run without moments. Moving averages of parameters are of those that it
    reads; mutable variables are its own.

    Args:
        rate: learning rate by step, for the log; None: the optimizer has its own.
    """

    def __init__(
        self, program: Program, client: IslandClient, sync: SyncConfig, rate: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(program, client, sync)
        self._rate = rate

    def reads_first(self, step: int) -> bool:
        """Returns True: the parameters are those of the servers."""
        return True

    def initial(self, state: State) -> Flat:
        """Returns the parameters."""
        return flatten_dict({"params": state["params"]})

    def step_at(self, step: int, local: Step) -> Step:
        """Returns the gradients of a step, their push and the read after it, as one function."""

        def run(state: State, batch: Batch) -> tuple[State, Metrics]:
            state = self.begun(state, step)
            kept, metrics, grads = self._compute(self.merge(state), dict(batch))
            tokens, loss = (float(metrics[name]) for name in ("tokens", "loss"))
            before = state
            pushed, residual = self.encoded(flatten_dict({"params": grads}), state)
            with self.waiting():
                arrived = self.client.exchange(pushed, lambda: self.initial(before), step + 1, tokens, loss)
            new = self._with_residual(self.with_values({**state, **kept}, arrived), residual, arrived)
            if "ema" in new:
                new["ema"] = self._average(new["ema"], new["params"])
            more = {} if self._rate is None else {"lr": jnp.float32(self._rate(step))}
            return new, metrics | more | self._note(arrived, step + 1)

        return run

    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state with the parameters of the servers."""
        return {**state, **self._placed(arrived, {"params": self.one["params"]})}

    @cached_property
    def _average(self) -> Callable[[Any, Any], Any]:
        decay = self.program.config.optimizer.ema_decay or 0.0
        return jax.jit(lambda ema, params: ema_update(ema, params, decay), donate_argnums=0)

    @cached_property
    def _compute(self) -> Callable[[State, Any], tuple[State, Metrics, Any]]:
        def compute(state: State, batch: Any) -> tuple[State, Metrics, Any]:
            new, metrics, grads = self.program.step_with_gradients(state, batch)
            kept = {name: tree for name, tree in new.items() if name not in ("params", "opt_state", "ema", "frozen")}
            return kept, metrics, grads

        return jax.jit(compute)


class RoundIsland(IslandSynchronizer):
    """`local_sgd` and `diloco`: islands train alone, then all go on from what the servers make of their parameters."""

    def step_at(self, step: int, local: Step) -> Step:
        """Returns a step of the island, and an exchange after the last one of a round, as one function."""
        is_last = (step + 1) % self._sync.every == 0

        def run(state: State, batch: Batch) -> tuple[State, Metrics]:
            state, metrics = self.counted(local, self.begun(state, step), batch)
            if not is_last:
                return state, metrics
            state, more = self._exchange(state, step + 1, float(metrics["loss"]))
            return state, metrics | more

        return run

    def reads_first(self, step: int) -> bool:
        """Returns True at step 0; later the island is within a round."""
        return step == 0

    def initial(self, state: State) -> Flat:
        """Returns what was agreed on, and mutable variables."""
        return self.pushed({**state, "params": state[SYNC]["agreed"]})

    def pushed(self, state: State) -> Flat:
        """Returns parameters and mutable variables with fractions, which all are averaged."""
        return flatten_dict({"params": state["params"]}) | self.float_mutable(state)

    def outgoing(self, state: State) -> Flat:
        """Returns what an exchange sends: parameters, and mutable variables."""
        return self.pushed(state)

    def _exchange(self, state: State, clock: int, loss: float) -> tuple[State, Metrics]:
        """Returns the state after an exchange, and metrics of it."""
        tokens = float(state[SYNC]["tokens"])
        values = self.outgoing(state)
        is_finite = bool(self._is_finite(list(values.values())))
        pushed, residual = self.encoded(values, state)
        with self.waiting():
            arrived = self.client.exchange(pushed, lambda: self.initial(state), clock, tokens, loss, is_finite)
        if not is_finite:
            state = self.healed(state)
        new = self._with_residual(self.with_values(state, arrived), residual, arrived)
        return new, self._note(arrived, clock) | {DISTANCE: self._distance(state["params"], new["params"])}

    @cached_property
    def _distance(self) -> Callable[[Any, Any], jax.Array]:
        """Returns how far the island was from what the islands agreed on."""
        return jax.jit(lambda own, read: distance(jax.tree.map(lambda x: x[None], own), read, jnp.ones(1, bool)))

    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state that continues from the values of the servers."""
        like = self.pushed(self.one)
        placed = unflatten_dict(place_tree(arrived.values, like))
        again = unflatten_dict(place_tree(arrived.values, flatten_dict({"params": self.one["params"]})))
        tokens = jax.device_put(np.float32(0), self.abstract(self.one)[SYNC]["tokens"].sharding)
        new = {**state, "params": placed["params"], SYNC: {**state[SYNC], "tokens": tokens, "agreed": again["params"]}}
        if "mutable" in placed:
            new["mutable"] = unflatten_dict(flatten_dict(state["mutable"]) | flatten_dict(placed["mutable"]))
        return new

    @cached_property
    def _is_finite(self) -> Callable[[Any], jax.Array]:
        return jax.jit(lambda values: jnp.stack([jnp.isfinite(x).all() for x in values]).all())

    @cached_property
    def _change(self) -> Callable[[Any, Any], Any]:
        """Returns (what was agreed on, parameters) -> how far they are from it, float32."""

        def change(agreed: Any, params: Any) -> Any:
            return jax.tree.map(lambda x, y: x.astype(jnp.float32) - y.astype(jnp.float32), agreed, params)

        return jax.jit(change)


class ChangeIsland(RoundIsland):
    """`async_diloco`, or `diloco` in few bits: the island pushes how far it has come from what it read.

    Others may have updated that since.
    """

    def outgoing(self, state: State) -> Flat:
        """Returns the parameters that it read less its own, float32, and mutable variables."""
        return self.pushed(state) | flatten_dict({"params": self._change(state[SYNC]["agreed"], state["params"])})
