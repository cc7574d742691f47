"""Gossip of an island: after every round it mixes its values with those of a few others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.core.program import Program
from jaxtrain.islands.client import Arrived
from jaxtrain.islands.gossip.client import GossipClient
from jaxtrain.islands.pieces import place_tree
from jaxtrain.islands.synchronizer import Batch, Metrics, RoundIsland, State, Step
from jaxtrain.islands.trees import Flat, flatten_dict, unflatten_dict
from jaxtrain.sync.gossip.strategy import mix_received
from jaxtrain.sync.island_state import PEERS
from jaxtrain.sync.make import make_strategy
from jaxtrain.sync.strategy import Replicas


class GossipIsland(RoundIsland):
    """`gossip` of islands: the state is that of a run alone, and each island has parameters of its own.

    Args:
        program: the island's program, of a run alone.
        client: speaks for the island.
        sync: section of the run's config.
    """

    def __init__(self, program: Program, client: GossipClient, sync: SyncConfig) -> None:
        super().__init__(program, client, sync)
        self._neighbours, self._gossip = client, make_strategy(sync, PEERS)
        self._tokens: Any = np.float32(0)  # since the last meeting

    def reads_first(self, step: int) -> bool:
        """Returns True: what it gets has values only if it cannot go on from its own."""
        return True

    def step_at(self, step: int, local: Step) -> Step:
        """Returns a step of the island, and a meeting after the last one of a round, as one function."""
        is_last, ends = (step + 1) % self._sync.every == 0, step + 1 == self.program.config.steps

        def run(state: State, batch: Batch) -> tuple[State, Metrics]:
            state = self.begun(state, step)
            if self.behind is not None:  # it goes on at the step of another one
                return state, local(jax.tree.map(jnp.copy, state), batch)[1]
            state, metrics = local(state, batch)
            self._tokens = self._count(self._tokens, metrics["skipped"], metrics["tokens"])
            if is_last:
                state, more = self._exchange(state, step + 1, float(metrics["loss"]))
                metrics = metrics | more
            if ends:
                self._neighbours.linger()
            return state, metrics

        return run

    def begun(self, state: State, step: int) -> State:
        """Returns the state of the first step, and notes if others are further."""
        if self._has_begun:
            return state
        self._has_begun = True
        with self.waiting():
            arrived = self.client.start(step, dict, self.place(state))
        self.behind = arrived.clock if arrived.clock > step else None
        return self.with_values(state, arrived)

    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state mixed with the values of neighbours, or that goes on from those of another island."""
        if not arrived.values:
            return state
        like = self.pushed(self.one)
        if not arrived.weights:
            return _with_leaves(state, place_tree(arrived.values, like))
        shares = np.asarray(arrived.weights, np.float32)
        messages = [self._message(place_tree([each], like), share) for each, share in zip(arrived.values, shares[1:])]
        return _with_leaves(state, self._mixed(self.pushed(state), shares, messages))

    def _exchange(self, state: State, clock: int, loss: float) -> tuple[State, Metrics]:
        values, tokens = self.pushed(state), float(self._tokens)
        is_finite = bool(self._is_finite(list(values.values())))
        with self.waiting():
            arrived = self._neighbours.exchange(values, dict, clock, tokens, loss, is_finite)
        self._tokens = np.float32(0)
        new = self.with_values(state if is_finite else self.healed(state), arrived)
        if arrived.is_wanted:
            self._neighbours.give(self.pushed(new))
        moved = self._moved(values, self.pushed(new), np.full(1, is_finite, np.float32))
        return new, self._note(arrived, clock) | moved

    @cached_property
    def _message(self) -> Callable[[Flat, np.float32], Flat]:
        """Returns a share of values in float32: rounded by itself, as that which a replica sends."""
        multiply = jax.jit(lambda x, share: x.astype(jnp.float32) * share)
        return lambda values, share: {path: multiply(x, share) for path, x in values.items()}

    @cached_property
    def _mixed(self) -> Callable[[Flat, np.ndarray, list[Flat]], Flat]:
        def mix(values: list[Any], shares: jax.Array, messages: list[list[Any]]) -> list[Any]:
            is_present = jnp.stack([jnp.isfinite(x).all() for x in values]).all()[None]
            own, received = _stacked(values), [_stacked(each) for each in messages]
            return [x[0] for x in mix_received(own, is_present, shares, received)]

        like = self.pushed(self.one)
        run = jax.jit(mix, out_shardings=[leaf.sharding for leaf in like.values()])

        def mixed(values: Flat, shares: np.ndarray, messages: list[Flat]) -> Flat:
            new = run([values[path] for path in like], shares, [[each[path] for path in like] for each in messages])
            return dict(zip(like, new))

        return mixed

    @cached_property
    def _moved(self) -> Callable[[Flat, Flat, np.ndarray], Metrics]:
        """Returns the metrics of the strategy: how far parameters were moved."""

        def metrics(before: list[Any], after: list[Any], weights: jax.Array) -> Metrics:
            return self._gossip.metrics(Replicas(_stacked(before), weights), _stacked(after))

        paths, run = list(flatten_dict({"params": self.one["params"]})), jax.jit(metrics)
        return lambda before, after, weights: run([before[p] for p in paths], [after[p] for p in paths], weights)


def _stacked(leaves: list[Any]) -> list[Any]:
    return [x[None] for x in leaves]


def _with_leaves(state: State, leaves: Flat) -> State:
    before = flatten_dict({name: state[name] for name in ("params", "mutable") if name in state})
    return {**state, **unflatten_dict(before | leaves)}
