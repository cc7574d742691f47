"""Streaming DiLoCo: fragments of the parameters are exchanged in turn, during the steps that follow."""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sync.compression.wire import inner_devices
from jaxtrain.sync.fragments import Fragments, Parts
from jaxtrain.sync.outer_optimizer import outer_step
from jaxtrain.sync.quantized_mean import BITS, Bits, Residuals, quantized_mean, sent_bytes, server_shape
from jaxtrain.sync.replica_dim import along, choose, divided, shares, spread
from jaxtrain.sync.strategy import Replicas, StepPlan, Strategy, like

Tree = Any
Own = dict[str, Tree]
PACK = "pack"  # small parameters in the state of what is in flight
ALL = "all"


class Event(NamedTuple):
    """Events of a fragment after a step: its values are captured, and what was received is applied."""

    fragment: int
    captures: bool
    applies: bool


class Send(NamedTuple):
    """A chunk of a fragment that travels during a step: the parameters that it has values of."""

    paths: tuple[str, ...]


class StreamingDiLoCo(Strategy):
    """`streaming_diloco`: diloco of one fragment of the parameters at a time, which travels while replicas train on.

    Every `every` / `fragments` steps a fragment is due. Its values y_i are captured `tau` steps before; in each of the
    steps in between a chunk of it is averaged, in the program of that step. Then the outer step of diloco gives x, and
    replicas continue from y_i <- alpha y_i + (1 - alpha) x. Douillard et al. 2025 (arXiv 2501.18512).

    A replica that is not finite at a capture is left out of it. Whenever a fragment is captured or applied, one that is
    not finite continues from the outer parameters of all fragments.

    State: `outer` and `velocity` as of diloco; `flight`, the fragment that travels, of which a chunk that has arrived
    holds the average in place of the replica's own values; `weights`, the shares of the replicas in it; `tokens`, those
    since the last capture of each fragment; with residuals `worker` and `server`, of every chunk of every fragment.
    """

    def __init__(self, config: SyncConfig, replicas: int, mesh: Mesh | None = None) -> None:
        super().__init__(config, replicas, mesh)
        self._options = config.streaming
        self._tau = config.streaming.tau
        self._interval = config.every // config.streaming.fragments
        self._prepared: Fragments | None = None

    def prepare(self, params: Tree, names: Tree) -> None:
        """Parts the parameters into fragments and chunks."""
        self._prepared = Fragments(params, names, self._options.fragments, max(self._tau, 1))

    @property
    def fragments(self) -> Fragments:
        """The fragments of the parameters. Raises ValueError before `prepare`."""
        if self._prepared is None:
            raise ValueError("streaming_diloco parts parameters by their names; expected `prepare` before")
        return self._prepared

    def plan(self, step: int) -> StepPlan:
        """Returns a step of each replica, during which a chunk may travel, and what happens to a fragment after it."""
        done = step + 1
        if self._tau == 0:
            due, rest = divmod(done, self._interval)
            return StepPlan(exchange=None if rest else Event(self._fragment(due), True, True))
        due, chunk = divmod(step + self._tau, self._interval)
        send = Send(self.fragments.cut_paths(self._fragment(due))) if due and chunk < self._tau else None
        if done % self._interval == 0:
            return StepPlan(send=send, exchange=Event(self._fragment(done // self._interval), False, True))
        next_due, rest = divmod(done + self._tau, self._interval)
        return StepPlan(send=send, exchange=None if rest else Event(self._fragment(next_due), True, False))

    def _fragment(self, due: int) -> int:
        """Returns the fragment of the exchange with this number, from 1."""
        return (due - 1) % self._options.fragments

    def is_settled(self, step: int) -> bool:
        """Returns whether replicas hold the same parameters after so many steps: never with several fragments."""
        return self._options.fragments == 1 and self._tau == 0 and step % self.config.every == 0

    @property
    def round_form(self) -> Hashable:
        """Options on which the meaning of what is in flight depends."""
        return self.config.every, self._options.fragments, self._tau, self.config.compress.deltas

    def init(self, params: Tree) -> Own:
        """Returns the outer parameters and their velocity, nothing in flight, and residuals of zero."""
        parts = self.fragments
        outer = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        cut = {path: one for path, one in parts.parameters.items() if one.cut}
        flight = {path: jnp.zeros((self.replicas, *one.layout)) for path, one in cut.items()}
        flight |= {name: jnp.zeros((self.replicas, parts.chunks, parts.pack_width)) for name in self._pack}
        own: Own = {"outer": outer, "flight": flight, "weights": jnp.zeros(self.replicas)}
        own["tokens"] = jnp.zeros((parts.count, self.replicas))
        if self.config.outer.momentum:
            own["velocity"] = jax.tree.map(jnp.zeros_like, outer)
        if self._bits and self.config.compress.error_feedback:
            own["worker"], own["server"] = {}, {}
            for path, one in cut.items():
                turns, server = one.fragments or 1, server_shape(one.chunk, self.replicas, self._bits)
                own["worker"][path] = jnp.zeros((self.replicas, turns, *one.layout))
                own["server"][path] = jnp.zeros((self.replicas, turns, parts.chunks, *server[1:]))
        return own

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns the shardings of what is in flight and of the residuals."""
        flight = self.fragments.specs()
        mesh, server = jax.tree.leaves(params)[0].sharding.mesh, {}
        for path in flight if self._bits else ():
            shape = server_shape(self.fragments.parameters[path].chunk, self.replicas, self._bits)
            server[path] = divided(shape, mesh, REPLICA_AXIS, None, None)
        flight_and_pack = flight | dict.fromkeys(self._pack, PartitionSpec(REPLICA_AXIS))
        return {"flight": flight_and_pack, "worker": self.fragments.specs(None), "server": server}

    def send(self, kind: Hashable, own: Own, step: jax.Array) -> Own:
        """Averages a chunk of the fragment in flight over the replicas, during the step after `step` finished ones."""
        assert isinstance(kind, Send)
        due, chunk = jnp.divmod(step + self._tau, self._interval)
        return self._sent(own, kind.paths, (due - 1) % self._options.fragments, chunk)

    def exchange(self, own: Own, replicas: Replicas, kind: Hashable) -> tuple[Own, Tree]:
        """Captures a fragment, or applies the outer step to what has arrived of it, or both at once."""
        own = own | {"tokens": own["tokens"] + replicas.tokens}
        if not isinstance(kind, Event):
            return self._exchange_all(own, replicas)
        params = replicas.params
        if kind.captures:
            own = self._captured(own, replicas, kind.fragment)
        if kind.captures and kind.applies:
            own = self._sent(own, self.fragments.cut_paths(kind.fragment), jnp.int32(kind.fragment), jnp.int32(0))
        if kind.applies:
            own, params = self._applied(own, replicas, kind.fragment)
        return own, choose(replicas.is_present, params, spread(like(own["outer"], params), self.replicas))

    @property
    def keeps_equal_replicas(self) -> bool:
        """True unless changes are rounded."""
        return not self._bits

    def agreed(self, own: Own, replicas: Replicas) -> Tree:
        """Returns the outer parameters: of each fragment those of its last exchange."""
        return like(own["outer"], replicas.params)

    def exchanges_mutable(self, kind: Hashable) -> bool:
        """Returns whether mutable variables are averaged: where a fragment is applied."""
        return kind.applies if isinstance(kind, Event) else not isinstance(kind, Send)

    def sent_bytes(self, params: Tree, kind: Hashable) -> int:
        """Returns the bytes of a chunk; where all is exchanged at once those of a ring all-reduce in float32."""
        if isinstance(kind, Send):
            return self._chunk_bytes(kind.paths)
        if isinstance(kind, Event):
            return self._chunk_bytes(self.fragments.cut_paths(kind.fragment)) if kind.captures and kind.applies else 0
        return super().sent_bytes(params, kind)

    def _chunk_bytes(self, paths: tuple[str, ...]) -> int:
        """Bytes of a chunk. In float32 each device of a replica sends its shard, and all what they all hold."""
        if self.replicas == 1:
            return 0
        chunks = {path: self.fragments.parameters[path].chunk for path in paths}
        mesh, of_device = self.replica_mesh, self.fragments.pack_width
        inner = inner_devices(mesh)
        quantized = sent_bytes(chunks, self._bits, self.replicas, inner) if self._bits else 0
        if not self._bits:
            shardings = {path: NamedSharding(mesh, self.fragments.chunk_spec(path)) for path in chunks}
            of_device += sum(prod(shardings[path].shard_shape(x.shape)) for path, x in chunks.items())
        return quantized + 2 * 4 * of_device * inner * (self.replicas - 1) // self.replicas

    @property
    def _bits(self) -> Bits:
        return BITS[self.config.compress.deltas] if self.replicas > 1 else 0

    @property
    def _pack(self) -> tuple[str, ...]:
        """Name of what is packed in what is in flight, if there is anything: arrays without values cannot be saved."""
        return (PACK,) if self.fragments.pack_width else ()

    def _take(self, tree: Tree, fragment: int) -> Parts:
        """Returns parts in float32."""
        return {path: x.astype(jnp.float32) for path, x in self.fragments.take(tree, fragment).items()}

    def _captured(self, own: Own, replicas: Replicas, fragment: int) -> Own:
        """Returns the state with a fragment in flight: weighted parameters, or changes if these travel in few bits."""
        parts = self.fragments
        weights = shares(own["tokens"][fragment], replicas.is_present)
        outer = self._take(own["outer"], fragment)

        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            share = along(weights, y)
            return jnp.where(share > 0, share * (x - y if self._bits else y), 0.0)

        local = jax.vmap(lambda tree: self._take(tree, fragment))(replicas.params)
        sent = {path: one(outer[path], y) for path, y in local.items()}
        flight = {path: jax.vmap(parts.parameters[path].cut_part)(sent[path]) for path in parts.cut_paths(fragment)}
        flight |= {name: jax.vmap(lambda tree: parts.pack(tree, fragment))(sent) for name in self._pack}
        return own | {
            "flight": own["flight"] | flight, "weights": weights, "tokens": own["tokens"].at[fragment].set(0.0),
        }  # fmt: skip

    def _sent(self, own: Own, paths: tuple[str, ...], fragment: jax.Array, chunk: jax.Array) -> Own:
        """Returns what is in flight after a chunk has been summed, and its residuals."""
        if self.replicas == 1:
            return own
        parameters, flight = self.fragments.parameters, own["flight"]
        turn = {path: fragment if parameters[path].fragments else jnp.int32(0) for path in paths}
        chunks = {path: _at(flight[path], chunk, 1 + parameters[path].axis) for path in paths}
        pack = {name: _at(flight[name], chunk, 1) for name in self._pack}
        if self._bits:
            means, own = self._quantized(own, chunks, turn, chunk)
            means |= self._sums(pack) if pack else {}
        else:
            means, own = self._sums(chunks | pack), dict(own)
        arrived = {
            path: _put(flight[path], mean, chunk, 1 if path == PACK else 1 + parameters[path].axis)
            for path, mean in means.items()
        }
        return own | {"flight": flight | arrived}

    def _sums(self, chunks: Parts) -> Parts:
        """Returns the sums over the replicas in float32: in one collective, in which devices send their shards."""
        specs = {path: PartitionSpec() if path == PACK else self.fragments.chunk_spec(path) for path in chunks}
        stacked = {path: PartitionSpec(REPLICA_AXIS, *spec) for path, spec in specs.items()}

        def total(own: Parts) -> Parts:
            flat = jnp.concatenate([x.reshape(-1) for x in own.values()])
            ends = np.cumsum([x.size for x in own.values()])[:-1]
            sums = jnp.split(jax.lax.psum(flat, REPLICA_AXIS), ends)
            return {path: x.reshape(own[path].shape[1:]) for path, x in zip(own, sums)}

        mapped = jax.shard_map(total, mesh=self.replica_mesh, in_specs=(stacked,), out_specs=specs, check_vma=False)
        return mapped(chunks)

    def _quantized(self, own: Own, chunks: Parts, turn: dict[str, jax.Array], chunk: jax.Array) -> tuple[Parts, Own]:
        """Returns the sums of chunks over the replicas, and the state with other residuals."""
        axes = {path: 1 + self.fragments.parameters[path].axis for path in chunks}
        residuals, own = None, dict(own)
        if "worker" in own:
            worker = {path: _at(_at(own["worker"][path], turn[path], 1), chunk, axis) for path, axis in axes.items()}
            server = {path: _at(_at(own["server"][path], turn[path], 1), chunk, 1) for path in chunks}
            residuals = Residuals(worker, server)
        scaled = {path: x * self.replicas for path, x in chunks.items()}  # their mean is the sum
        means, after = quantized_mean(scaled, residuals, self._bits, self.replica_mesh)
        if after is not None:
            own |= {"worker": dict(own["worker"]), "server": dict(own["server"])}
            for path, axis in axes.items():
                for name, left, place in (("worker", after.worker, axis), ("server", after.server, 1)):
                    old = own[name][path]
                    one = jax.lax.dynamic_update_index_in_dim(_at(old, turn[path], 1), left[path], chunk, place)
                    own[name][path] = jax.lax.dynamic_update_index_in_dim(old, one, turn[path], 1)
        return means, own

    def _applied(self, own: Own, replicas: Replicas, fragment: int) -> tuple[Own, Tree]:
        """Returns the state after an outer step of a fragment, and the parameters, mixed with those of the replicas."""
        parts, is_any = self.fragments, own["weights"].sum() > 0
        flight = self._of_one({path: own["flight"][path] for path in (*parts.cut_paths(fragment), *self._pack)})
        mean = parts.unpack(flight.pop(PACK), fragment) if self._pack else {}
        mean |= {path: parts.parameters[path].join(x) for path, x in flight.items()}
        before = {name: self._take(own[name], fragment) for name in ("outer", "velocity") if name in own}
        if self._bits:
            mean = {path: before["outer"][path] - mean[path] for path in before["outer"]}
        moved = outer_step(self.config.outer, before, mean)
        after = jax.tree.map(lambda new, old: jnp.where(is_any, new, old), moved, before)
        local = jax.vmap(lambda tree: self._take(tree, fragment))(replicas.params)
        replicas.note_distance(local, mean, is_any)
        own = own | {name: parts.put(own[name], fragment, part) for name, part in after.items()}
        own["weights"] = jnp.zeros_like(own["weights"])
        alpha = self._options.alpha
        if alpha == 1:
            return own, replicas.params

        def mixed(y: jax.Array, x: jax.Array) -> jax.Array:
            x = jnp.broadcast_to(x, y.shape)
            return jnp.where(is_any, alpha * y + (1 - alpha) * x if alpha else x, y)

        new = {path: mixed(y, after["outer"][path]) for path, y in local.items()}
        return own, jax.vmap(lambda tree, part: parts.put(tree, fragment, part))(replicas.params, new)

    def _of_one(self, tree: Tree) -> Tree:
        """Returns what is the same for all replicas without a replica dim. Sends nothing."""
        if self.replicas == 1:
            return jax.tree.map(lambda x: x[0], tree)
        return jax.shard_map(
            lambda own: jax.tree.map(lambda x: x[0], own), mesh=self.replica_mesh, in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(), axis_names=frozenset({REPLICA_AXIS}), check_vma=False,
        )(tree)  # fmt: skip

    def _exchange_all(self, own: Own, replicas: Replicas) -> tuple[Own, Tree]:
        """Takes an outer step of all parameters at once, in float32. What is in flight is dropped."""
        weights = shares(own["tokens"].max(0), replicas.is_present)
        everything = Replicas(replicas.params, weights)
        before = {name: own[name] for name in ("outer", "velocity") if name in own}
        moved = outer_step(self.config.outer, before, everything.average)
        after = jax.tree.map(lambda new, old: jnp.where(weights.sum() > 0, new, old), moved, before)
        own = own | after | {name: jnp.zeros_like(own[name]) for name in ("weights", "tokens")}
        return own, spread(like(own["outer"], replicas.params), self.replicas)


def _at(x: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def _put(x: jax.Array, mean: jax.Array, index: jax.Array, axis: int) -> jax.Array:
    """Returns what is in flight with the average of a chunk for all replicas."""
    every = jnp.broadcast_to(mean[None], (len(x), *mean.shape))
    return jax.lax.dynamic_update_index_in_dim(x, every, index, axis)
