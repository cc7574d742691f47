"""The state of an island: that of one run, what was agreed on at the last exchange, and what is still to be sent."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config.sections.islands import AT_ROUNDS, WITHOUT_MEAN
from jaxtrain.config.sections.sync import CompressConfig, SyncConfig
from jaxtrain.sync.added_state import placed_state, replicated
from jaxtrain.sync.local_step import SYNC
from jaxtrain.sync.make import make_strategy
from jaxtrain.sync.strategy import Replicas, Strategy, like
from jaxtrain.sync.streaming import StreamingDiLoCo
from jaxtrain.sync.synchronizer import State, Synchronizer

RESIDUAL = "residual"
PEERS = 2  # islands of a strategy that gets one average, and returns it for each: any number makes the same state


def island_form(strategy: Strategy, one: State, sync: SyncConfig, servers: int, names: Any) -> Synchronizer:
    """Returns the form of an island's state.

    Args:
        strategy: of one run alone, which the island's step is.
        one: abstract state of that, with shardings.
        sync: section of the run's config.
        servers: their number.
        names: logical names of the parameters.
    """
    if sync.strategy in WITHOUT_MEAN:
        return Synchronizer(strategy)
    if not servers and sync.strategy == "streaming_diloco":
        rounds = _fragment_strategy(sync, one["params"], names)
        return StreamingPeerSynchronizer(strategy, one, rounds, sync.has_island_residuals)
    if not servers:
        return PeerSynchronizer(strategy, one, strategy_by_mean(sync), sync.has_island_residuals)
    if sync.strategy in AT_ROUNDS:
        return ConsensusSynchronizer(strategy, one, sync.has_island_residuals)
    return ResidualSynchronizer(strategy, one) if sync.has_island_residuals else Synchronizer(strategy)


def _fragment_strategy(sync: SyncConfig, params: Any, names: Any) -> StreamingDiLoCo:
    """Returns the strategy of one replica, which keeps a fragment in flight whole, for an island that sends it."""
    in_one = sync.streaming.model_copy(update={"tau": 0})
    strategy = StreamingDiLoCo(sync.model_copy(update={"streaming": in_one}), 1)
    strategy.prepare(params, names)
    return strategy


def strategy_by_mean(sync: SyncConfig) -> Strategy:
    """Returns the strategy of `PEERS` for `exchange_by_mean`: what has travelled in few bits is decoded before."""
    return make_strategy(sync.model_copy(update={"compress": CompressConfig()}), PEERS)


def exchange_by_mean(strategy: Strategy, own: Any, params: Any, mean: Any, weight: jax.Array) -> tuple[Any, Any]:
    """Returns what a strategy of `PEERS` keeps, and the parameters from which all go on, after an exchange.

    Args:
        strategy: gets one average, and returns it for each.
        own: what it keeps.
        params: parameters before it.
        mean: average of those that take part, float32.
        weight: 1; 0 if nobody had finite values. Float32 [1].
    """
    replicas = Replicas(jax.tree.map(lambda p: p[None], params), weight, is_present=jnp.ones(1, bool))
    replicas.receive(mean)
    own, new = strategy.exchange(own, replicas, "all")
    return own, jax.tree.map(lambda x: x[0], new)


class ResidualSynchronizer(Synchronizer):
    """The state has a part `sync`: `residual`, float32 like the parameters, which pushes in few bits have not sent yet.

    Args:
        strategy: of one run alone, which the island's step is.
        one: abstract state without the part, with shardings.
        has_residual: pushes keep what they lose; else only what subclasses add is in the part.
    """

    def __init__(self, strategy: Strategy, one: State, has_residual: bool = True) -> None:
        super().__init__(strategy)
        self.one, self._has_residual = one, has_residual

    def added(self, params: Any) -> dict[str, Any]:
        """Returns shapes, dtypes and shardings of the part, for abstract parameters."""

        def like(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)

        return {RESIDUAL: jax.tree.map(like, params)} if self._has_residual else {}

    def initial(self, params: Any) -> dict[str, Any]:
        """Returns the part at the start of a run."""
        zeros = lambda p: jnp.zeros(p.shape, jnp.float32)  # noqa: E731
        return {RESIDUAL: jax.tree.map(zeros, params)} if self._has_residual else {}

    def abstract(self, one: State) -> State:
        """Returns shapes, dtypes and shardings of the state, with the part `sync`."""
        return {**one, SYNC: self.added(one["params"])}

    def start(self, one: State) -> State:
        """Returns the state at the start of a run."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.added(self.one["params"]))
        return {**one, SYNC: jax.jit(self.initial, out_shardings=shardings)(one["params"])}

    def merge(self, state: State) -> State:
        """Returns the state without the part `sync`, from which a run alone may go on."""
        return {name: tree for name, tree in state.items() if name != SYNC}

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use: those that the island has read."""
        return self.merge(state)


class ConsensusSynchronizer(ResidualSynchronizer):
    """The part `sync` has `tokens` since the last exchange, float32 scalar, and `agreed`, parameters after it."""

    def added(self, params: Any) -> dict[str, Any]:
        """Returns shapes, dtypes and shardings of the part, for abstract parameters."""
        tokens = replicated(jax.ShapeDtypeStruct((), jnp.float32), params)
        return {**super().added(params), "tokens": tokens, "agreed": params}

    def initial(self, params: Any) -> dict[str, Any]:
        """Returns the part at the start of a run."""
        return {**super().initial(params), "tokens": jnp.float32(0), "agreed": jax.tree.map(jnp.copy, params)}

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use: those of the last exchange."""
        return {**self.merge(state), "params": state[SYNC]["agreed"]}


class PeerSynchronizer(ConsensusSynchronizer):
    """Without a server the part `sync` also has `own`, what the strategy keeps, and `place`, uint32 [2].

    `place` is the last round that counts: its number, and one that was drawn for it. Islands in which it is equal have
    equal `agreed` and `own`.

    Args:
        strategy: of one run alone, which the island's step is.
        one: abstract state without the part, with shardings.
        rounds: strategy by which the islands agree.
        has_residual: see `ResidualSynchronizer`.
    """

    def __init__(self, strategy: Strategy, one: State, rounds: Strategy, has_residual: bool) -> None:
        super().__init__(strategy, one, has_residual)
        self.rounds = rounds

    def added(self, params: Any) -> dict[str, Any]:
        """Returns shapes, dtypes and shardings of the part, for abstract parameters."""
        place = replicated(jax.ShapeDtypeStruct((2,), jnp.uint32), params)
        return {**super().added(params), "own": placed_state(self.rounds, params), "place": place}

    def initial(self, params: Any) -> dict[str, Any]:
        """Returns the part at the start of a run."""
        return {**super().initial(params), "own": self.rounds.init(params), "place": jnp.zeros(2, jnp.uint32)}


class StreamingPeerSynchronizer(ResidualSynchronizer):
    """The part `sync` of streaming_diloco without a server has `own`, `place`, and two float32 scalars of tokens.

    `own` is what the strategy keeps, with the fragment that the island has sent; `place` as of `PeerSynchronizer`;
    `tokens` since the last event, and `sent_tokens`, those that the fragment in flight was trained on.

    Args:
        strategy: of one run alone, which the island's step is.
        one: abstract state without the part, with shardings.
        rounds: strategy by which the islands agree, of one replica.
        has_residual: see `ResidualSynchronizer`.
    """

    def __init__(self, strategy: Strategy, one: State, rounds: StreamingDiLoCo, has_residual: bool) -> None:
        super().__init__(strategy, one, has_residual)
        self.rounds = rounds

    def added(self, params: Any) -> dict[str, Any]:
        """Returns shapes, dtypes and shardings of the part, for abstract parameters."""
        tokens = replicated(jax.ShapeDtypeStruct((), jnp.float32), params)
        place = replicated(jax.ShapeDtypeStruct((2,), jnp.uint32), params)
        own = placed_state(self.rounds, params)
        return {**super().added(params), "tokens": tokens, "sent_tokens": tokens, "own": own, "place": place}

    def initial(self, params: Any) -> dict[str, Any]:
        """Returns the part at the start of a run."""
        tokens = dict.fromkeys(("tokens", "sent_tokens"), jnp.float32(0))
        place = jnp.zeros(2, jnp.uint32)
        return {**super().initial(params), **tokens, "own": self.rounds.init(params), "place": place}

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use: of each fragment those of its last exchange."""
        return {**self.merge(state), "params": like(state[SYNC]["own"]["outer"], state["params"])}
