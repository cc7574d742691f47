"""Islands without a server: what all of them have in common, and those that exchange at the end of a round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.core.program import Program
from jaxtrain.islands.client import Arrived
from jaxtrain.islands.peers.client import PeerClient
from jaxtrain.islands.pieces import place_rows, place_tree
from jaxtrain.islands.synchronizer import Batch, IslandSynchronizer, Metrics, RoundIsland, State, Step
from jaxtrain.islands.trees import Flat, flatten_dict, unflatten_dict
from jaxtrain.sync.island_state import PeerSynchronizer, exchange_by_mean
from jaxtrain.sync.local_step import SYNC


class PeerIsland(IslandSynchronizer):
    """Base of the islands that take the step of the strategy themselves, by the mean of all of a round.

    Args:
        program: the island's program, of a run alone.
        client: speaks for the island.
        sync: section of the run's config.
    """

    def __init__(self, program: Program, client: PeerClient, sync: SyncConfig) -> None:
        super().__init__(program, client, sync)
        self._peers = client

    @abstractmethod
    def training_step(self, step: int, local: Step) -> Step:
        """Returns a step of an island that has begun, with what is exchanged, as one function."""

    def reads_first(self, step: int) -> bool:
        """Returns True: what it gets has values only if it cannot go on from its own."""
        return True

    def step_at(self, step: int, local: Step) -> Step:
        """Returns a step; of an island that begins with the values of another at that one's step it changes nothing."""
        following = self.training_step(step, local)

        def run(state: State, batch: Batch) -> tuple[State, Metrics]:
            state = self.begun(state, step)
            if self.behind is None:
                return following(state, batch)
            _, metrics = local(self.merge(jax.tree.map(jnp.copy, state)), batch)
            return state, metrics

        return run

    def begun(self, state: State, step: int) -> State:
        """Returns the state of the first step, and notes if others are further."""
        before = self.place(state)
        state = super().begun(state, step)
        number, _ = self.place(state)
        if (number, _) != before and number * self._sync.interval > step:
            self.behind = number * self._sync.interval
        return state

    def place(self, state: State) -> tuple[int, int]:
        """Returns the last round that counts in a state."""
        number, token = np.asarray(state[SYNC]["place"])
        return int(number), int(token)

    def restarted(self, sync: State, arrived: Arrived) -> State:
        """Returns the part `sync` after a round: no tokens since then, and its place."""
        part = self.abstract(self.one)[SYNC]
        tokens = jax.device_put(np.float32(0), part["tokens"].sharding)
        place = jax.device_put(np.asarray(arrived.place, np.uint32), part["place"].sharding)
        return {**sync, "tokens": tokens, "place": place}

    def with_mutable(self, state: State, arrived: Arrived) -> State:
        """Returns a state with the mutable variables that arrived."""
        if not (like := self.float_mutable(self.one)):
            return state
        placed = self.placed_as(arrived, like)["mutable"]
        return {**state, "mutable": unflatten_dict(flatten_dict(state["mutable"]) | flatten_dict(placed))}

    def placed_as(self, arrived: Arrived, like: Flat) -> State:
        """Returns what arrived on the devices, as a tree."""
        return unflatten_dict(place_tree(arrived.values, like))

    def _with_residual(self, state: State, residual: Flat | None, arrived: Arrived) -> State:
        """Adds what the mean has lost that this island has rounded, to be sent with its next values."""
        return super()._with_residual(state, residual and self.with_lost(residual, arrived), arrived)

    def with_lost(self, residual: Flat, arrived: Arrived) -> Flat:
        """Returns residuals and what a mean has lost in addition."""
        part, lost = arrived.lost
        placed = {path: place_rows(part[path], x, residual[path]) for path, x in lost.items()}
        return {**residual, **self._added({path: residual[path] for path in placed}, placed)}

    @cached_property
    def _added(self) -> Callable[[Flat, Flat], Flat]:
        return jax.jit(lambda left, right: jax.tree.map(jnp.add, left, right))


class PeerRoundIsland(PeerIsland, RoundIsland):
    """`local_sgd`, `diloco` and `muloco` without a server.

    In few bits each sends how far it has come from the outer parameters, in place of its own.
    """

    def __init__(self, program: Program, client: PeerClient, sync: SyncConfig) -> None:
        super().__init__(program, client, sync)
        assert isinstance(self.form, PeerSynchronizer)
        self._rounds = self.form.rounds
        self._rounds.prepare(self.one["params"], program.model_def.names)

    def training_step(self, step: int, local: Step) -> Step:
        """Returns a step of the island, and an exchange after the last one of a round, as one function."""
        return RoundIsland.step_at(self, step, local)

    def outgoing(self, state: State) -> Flat:
        """Returns what an exchange sends: parameters or changes, and mutable variables."""
        if self._encoder is None:
            return self.pushed(state)
        changes = self._change(state[SYNC]["own"]["outer"], state["params"])
        return self.pushed(state) | flatten_dict({"params": changes})

    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state that continues from the values of another island, or from the mean of the islands."""
        if not arrived.is_mean:
            return self._from_another(state, arrived) if arrived.values else state
        sync = self.restarted(state[SYNC], arrived)
        is_any = bool(arrived.values)
        like = flatten_dict({"params": jax.tree.map(_in_float32, self.one["params"])})
        mean = self.placed_as(arrived, like)["params"] if is_any else state["params"]
        own, params, agreed = self._exchanged(sync["own"], sync["agreed"], mean, jnp.ones(1) * is_any)
        new = {**state, "params": params, SYNC: {**sync, "own": own, "agreed": agreed}}
        return self.with_mutable(new, arrived) if is_any else new

    def _from_another(self, state: State, arrived: Arrived) -> State:
        part = self.abstract(self.one)[SYNC]
        like = flatten_dict({"params": self.one["params"], "own": part["own"]})
        placed, again = self.placed_as(arrived, like), self.placed_as(arrived, like)
        sync = self.restarted(state[SYNC], arrived)
        sync |= {"own": placed.get("own", {}), "agreed": again["params"]}
        return self.with_mutable({**state, "params": placed["params"], SYNC: sync}, arrived)

    @cached_property
    def _exchanged(self) -> Callable[..., tuple[Any, Any, Any]]:
        """Returns what the strategy keeps, the parameters after an exchange, and these again, as agreed on."""

        def exchange(own: Any, agreed: Any, mean: Any, weight: jax.Array) -> tuple[Any, Any, Any]:
            if self._encoder is not None:
                mean = jax.tree.map(jnp.subtract, own["outer"], mean)
            own, params = exchange_by_mean(self._rounds, own, agreed, mean, weight)
            return own, params, jax.tree.map(jnp.copy, params)

        part = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(self.one)[SYNC])
        return jax.jit(exchange, out_shardings=(part["own"], part["agreed"], part["agreed"]))

    def _exchange(self, state: State, clock: int, loss: float) -> tuple[State, Metrics]:
        self._peers.stand_at(self.place(state))
        state, metrics = super()._exchange(state, clock, loss)
        if self._is_wanted:
            values = self.pushed(state) | flatten_dict({"own": state[SYNC]["own"]})
            self._peers.give(values)
        return state, metrics

    def _note(self, arrived: Arrived, clock: int) -> Metrics:
        self._is_wanted = arrived.is_wanted
        return super()._note(arrived, clock)


def _in_float32(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)
