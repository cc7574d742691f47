"""Streaming DiLoCo of islands without a server: a fragment is averaged while the island trains on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.core.program import Program
from jaxtrain.islands.client import Arrived
from jaxtrain.islands.peers.client import PeerClient
from jaxtrain.islands.peers.synchronizer import PeerIsland
from jaxtrain.islands.pieces import place_tree
from jaxtrain.islands.shard_encoder import ShardEncoder
from jaxtrain.islands.synchronizer import DISTANCE, Batch, Metrics, State, Step
from jaxtrain.islands.trees import Flat, flatten_dict
from jaxtrain.sync.island_state import RESIDUAL, StreamingPeerSynchronizer
from jaxtrain.sync.local_step import SYNC
from jaxtrain.sync.quantized_mean import BITS
from jaxtrain.sync.replica_dim import are_finite
from jaxtrain.sync.strategy import Replicas, like
from jaxtrain.sync.streaming import PACK, Event

SENT = "sent"  # first name of the parts of a fragment in a message
CLOSE_WAIT = 10.0  # seconds that an island which ends waits for an exchange to notice it


class PendingExchange:
    """An exchange in a thread of its own, which does not keep the process.

    Args:
        due: its number, from 1.
        exchange: returns what arrived.
    """

    def __init__(self, due: int, exchange: Callable[[], Arrived]) -> None:
        self.due = due
        self._found: Future[Arrived] = Future()
        self._thread = threading.Thread(target=self._run, args=(exchange,), daemon=True)
        self._thread.start()

    def _run(self, exchange: Callable[[], Arrived]) -> None:
        try:
            self._found.set_result(exchange())
        except BaseException as error:
            self._found.set_exception(error)

    def result(self) -> Arrived:
        """Returns what arrived, or raises what the exchange raised. Waits."""
        return self._found.result()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout)


class StreamingIsland(PeerIsland):
    """`streaming_diloco` without a server.

    A fragment is due every `every` / `fragments` steps. Its values are captured `tau` steps before, and the islands
    average them while they train on; see `sync.streaming`. Mutable variables travel with them. In few bits each sends
    how far its values are from the outer parameters, in place of them.
    """

    def __init__(self, program: Program, client: PeerClient, sync: SyncConfig) -> None:
        super().__init__(program, client, sync)
        assert isinstance(self.form, StreamingPeerSynchronizer)
        self._strategy, self._fragments = self.form.rounds, self.form.rounds.fragments
        self._pending: PendingExchange | None = None
        self._left: Flat | None = None  # what the exchange in flight has left to be sent
        self._waited = 0.0  # for the last exchange
        part = self.abstract(self.one)
        own, params = (jax.tree.map(lambda leaf: leaf.sharding, tree) for tree in (part[SYNC]["own"], part["params"]))
        self._capture = jax.jit(self._captured, static_argnums=0, out_shardings=(own, params, None, None))
        self._apply = jax.jit(self._applied, static_argnums=0, out_shardings=(own, params, None, None))
        self._message = jax.jit(self._parts_of, static_argnums=0)
        mesh, given = jax.tree.leaves(self.one["params"])[0].sharding.mesh, self._fragments.leaves(self.one["params"])
        specs = {path: each.part_spec(given[path].sharding) for path, each in self._fragments.parameters.items()}
        self._shardings = {path: NamedSharding(mesh, spec) for path, spec in (specs | {PACK: PartitionSpec()}).items()}
        bits = BITS[sync.compress.deltas]
        self._encoders = [ShardEncoder(self._like(i), bits) for i in range(self._fragments.count)] if bits else []
        self._take_residual = jax.jit(self._residual_of, static_argnums=0)
        self._put_residual = jax.jit(self._fragments.put, static_argnums=1, out_shardings=params)

    def training_step(self, step: int, local: Step) -> Step:
        """Returns a step of the island, after which a fragment may be captured or applied, as one function."""
        tau, interval, done = self._sync.streaming.tau, self._sync.interval, step + 1
        due = (done + tau) // interval  # exchange that is captured or in flight after the step, from 1
        captures, applies = (done + tau) % interval == 0, done % interval == 0
        in_flight = (step + tau) // interval if (step + tau) % interval < tau else 0

        def run(state: State, batch: Batch) -> tuple[State, Metrics]:
            if self._pending is not None and self._pending.due != in_flight:  # the run went back to older values
                with self.waiting():
                    self._pending.join()
                self._pending = None
            if in_flight and self._pending is None:  # a run that continues within an exchange
                self._pending = self._started(state, in_flight, None)
            state, metrics = self.counted(local, state, batch)
            if captures:
                state = self._sent(state, due, float(metrics["loss"]))
            if applies:
                state, more = self._received(state, done)
                metrics |= more
            return state, metrics

        return run

    def initial(self, state: State) -> Flat:
        """Returns what was agreed on, and mutable variables."""
        sync = {name: state[SYNC]["own"][name] for name in ("outer", "velocity") if name in state[SYNC]["own"]}
        return flatten_dict({"own": sync}) | self.float_mutable(state)

    def with_values(self, state: State, arrived: Arrived) -> State:
        """Returns a state that continues from what another island has agreed on, if it gave it."""
        if not arrived.values:
            return state
        placed = self.placed_as(arrived, self.initial({**self.one, SYNC: self.abstract(self.one)[SYNC]}))["own"]
        params = jax.jit(like, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.one["params"]))(
            placed["outer"], state["params"]
        )
        fresh = self.start(state)[SYNC]
        kept = {name: tree for name, tree in state[SYNC].items() if name == RESIDUAL}
        sync = self.restarted({**fresh, **kept, "own": {**fresh["own"], **placed}}, arrived)
        return self.with_mutable({**state, "params": params, SYNC: sync}, arrived)

    def close(self) -> None:
        """Says goodbye, and waits for the thread of an exchange."""
        super().close()
        if self._pending is not None:
            self._pending.join(CLOSE_WAIT)

    def _fragment(self, due: int) -> int:
        return (due - 1) % self._sync.streaming.fragments

    def _sent(self, state: State, due: int, loss: float) -> State:
        """Returns the state after a capture, whose exchange has begun."""
        sync = state[SYNC]
        own, params, tokens, is_finite = self._capture(
            self._fragment(due), sync["own"], state["params"], sync["tokens"], self.float_mutable(state)
        )
        if not is_finite:
            state = self.healed(state)
        sync = {**sync, "own": own, "tokens": jnp.zeros_like(sync["tokens"]), "sent_tokens": tokens}
        state = {**state, "params": params, SYNC: sync}
        self._pending = self._started(state, due, loss)
        return state

    def _started(self, state: State, due: int, loss: float | None) -> PendingExchange:
        """Begins the exchange of what a state has in flight."""
        fragment, own, mutable = self._fragment(due), state[SYNC]["own"], self.float_mutable(state)
        parts, mutable, is_finite = self._message(fragment, own, mutable)
        sent, self._left = self._encoded_parts(fragment, parts, state, bool(is_finite))
        tokens, clock = float(state[SYNC]["sent_tokens"]), due * self._sync.interval
        waited = self._waited if self._sync.streaming.tau else None
        self._peers.stand_at(self.place(state))
        average = partial(self._peers.average, sent | mutable, clock, tokens, loss, bool(is_finite), waited)
        return PendingExchange(due, average)

    def _encoded_parts(self, fragment: int, parts: Flat, state: State, is_finite: bool) -> tuple[Flat, Flat | None]:
        """Returns the parts of a fragment as they travel, and what they leave to be sent; None if nothing is kept."""
        if not self._encoders:
            return parts, None
        residual = self._take_residual(fragment, state[SYNC][RESIDUAL]) if RESIDUAL in state[SYNC] else None
        sent, left = self._encoders[fragment](parts, residual)
        return sent, left if is_finite or left is None else jax.tree.map(jnp.zeros_like, left)

    def _residual_of(self, fragment: int, residual: Any) -> Flat:
        """Returns what was left of the parts of a fragment."""
        parts = self._fragments.take(residual, fragment)
        like = {path: x for path, x in self._like(fragment).items() if path[1] != PACK}
        return {path: jax.lax.with_sharding_constraint(parts[path[1]], x.sharding) for path, x in like.items()}

    def _with_left(self, state: State, fragment: int, arrived: Arrived) -> State:
        """Returns a state with what the exchange has left to be sent."""
        if self._left is None:
            return state
        left = {path[1]: x for path, x in self.with_lost(self._left, arrived).items()}
        residual = self._put_residual(state[SYNC][RESIDUAL], fragment, left)
        return {**state, SYNC: {**state[SYNC], RESIDUAL: residual}}

    def _received(self, state: State, clock: int) -> tuple[State, Metrics]:
        """Returns the state after the exchange that is due, and metrics of it. Waits."""
        assert self._pending is not None
        begin = time.monotonic()
        with self.waiting():
            arrived = self._pending.result()
        self._pending, self._waited = None, time.monotonic() - begin
        metrics = self._note(arrived, clock)
        if not arrived.is_mean:
            return self.with_values(state, arrived), metrics
        fragment = self._fragment(clock // self._sync.interval)
        state = self._with_left(state, fragment, arrived)
        sync = state[SYNC]
        means = self._means(arrived, fragment)
        own, params, distance, is_finite = self._apply(
            fragment, sync["own"], state["params"], sync["tokens"], self.float_mutable(state), means
        )
        if not is_finite:
            state = self.healed(state)
        state = {**state, "params": params, SYNC: self.restarted({**sync, "own": own}, arrived)}
        if arrived.values:
            state = self.with_mutable(state, arrived)
        if arrived.is_wanted:
            self._peers.give(self.initial(state))
        return state, metrics | {DISTANCE: distance}

    def _means(self, arrived: Arrived, fragment: int) -> dict[str, jax.Array] | None:
        """Returns the mean of what the islands sent of a fragment; None if nobody's was finite."""
        if not arrived.values:
            return None
        return {path[1]: x for path, x in place_tree(arrived.values, self._like(fragment)).items()}

    def _like(self, fragment: int) -> Flat:
        """Returns shapes and shardings of what travels of a fragment beside mutable variables, float32."""
        parts, width = self._fragments.parameters, self._fragments.pack_width
        shapes = {path: parts[path].part for path in self._fragments.cut_paths(fragment)}
        shapes |= {PACK: (1, width)} if width else {}
        return {
            (SENT, path): jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self._shardings[path])
            for path, shape in shapes.items()
        }

    def _outer_parts(self, fragment: int, own: Any) -> dict[str, jax.Array]:
        """Returns the outer parameters of a fragment, as `_like`."""
        found = self._fragments.take(own["outer"], fragment)
        packed = {PACK: self._fragments.pack(found, fragment)} if self._fragments.pack_width else {}
        return {path: found[path] for path in self._fragments.cut_paths(fragment)} | packed

    def _parts_of(self, fragment: int, own: Any, mutable: Flat) -> tuple[Flat, Flat, jax.Array]:
        """Returns the parts of a fragment in flight, mutable variables, and if all numbers of the island are finite."""
        flight = {path: x[0] for path, x in own["flight"].items()}
        parameters = self._fragments.parameters
        found = {path: parameters[path].join(flight[path]) for path in self._fragments.cut_paths(fragment)}
        found |= {PACK: flight[PACK]} if PACK in flight else {}
        if self._encoders:
            found = {path: x - found[path] for path, x in self._outer_parts(fragment, own).items()}
        placed = {path: jax.lax.with_sharding_constraint(x, self._shardings[path]) for path, x in found.items()}
        parts = {(SENT, path): x for path, x in placed.items()}
        finite = [jnp.isfinite(x).all() for x in (*parts.values(), *mutable.values())]
        is_finite = jnp.stack([own["weights"][0] > 0, *finite]).all()
        return parts, {path: jnp.copy(x) for path, x in mutable.items()}, is_finite

    def _captured(
        self, fragment: int, own: Any, params: Any, tokens: jax.Array, mutable: Flat
    ) -> tuple[Any, Any, Any, Any]:
        """Returns what the strategy keeps, the parameters, the tokens of what is in flight, and if it is finite."""
        one = _as_replica(params, tokens, mutable)
        total = own["tokens"][fragment, 0] + tokens
        own, new = self._strategy.exchange(own, one, Event(fragment, True, False))
        return own, jax.tree.map(lambda x: x[0], new), total, one.is_present[0]

    def _applied(
        self, fragment: int, own: Any, params: Any, tokens: jax.Array, mutable: Flat,
        means: dict[str, jax.Array] | None,
    ) -> tuple[Any, Any, Any, Any]:  # fmt: skip
        """Returns what the strategy keeps, the parameters, their distance from the mean, and if they were finite."""
        one = _as_replica(params, tokens, mutable)
        flight = dict(own["flight"])
        if means and self._encoders:
            means = {path: x - means[path] for path, x in self._outer_parts(fragment, own).items()}
        for path, mean in (means or {}).items():
            flight[path] = (mean if path == PACK else self._fragments.parameters[path].cut_part(mean))[None]
        weights = jnp.full(1, float(means is not None))
        own, new = self._strategy.exchange(
            {**own, "flight": flight, "weights": weights}, one, Event(fragment, False, True)
        )
        distance = one.distance.get(DISTANCE, jnp.float32(0))
        return own, jax.tree.map(lambda x: x[0], new), distance, one.is_present[0]


def _as_replica(params: Any, tokens: jax.Array, mutable: Flat) -> Replicas:
    """Returns the parameters of one island as those of all replicas; it is present if all its numbers are finite."""
    stacked = jax.tree.map(lambda x: x[None], params)
    is_present = are_finite([stacked, [x[None] for x in mutable.values()]])
    return Replicas(stacked, is_present.astype(jnp.float32), tokens[None], is_present)
