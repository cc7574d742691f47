"""Gossip: in an exchange each replica averages with a few others, so that all agree only after many exchanges."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sync.gossip.graphs import Edge, Messages, check_edges, messages_of, round_number
from jaxtrain.sync.replica_dim import along, average, spread
from jaxtrain.sync.strategy import Replicas, StepPlan, Strategy, float32_bytes

Tree = Any
ALL = "all"


class Gossip(Strategy):
    """`gossip`: each replica mixes its parameters with those of its neighbours in a graph, every `every` steps.

    On graphs in which each replica receives as much as it sends the mean of the replicas stays what it was (Lian et al.
    2017, arXiv 1705.09056). On others, and where messages are lost, it does with push-sum: x are parameters times a
    weight that travels with them, and z = x / w are those that are trained (Assran et al. 2019, arXiv 1811.10792,
    algorithm 1; Kempe et al. 2003). The share of a lost message stays with its sender.

    A replica that is not finite sends nothing. With push-sum it takes part with its parameters after the last exchange;
    else it continues from the mean of what it receives, and its neighbours keep their own in place of its values.
    """

    min_replicas = 2

    def __init__(self, config: SyncConfig, replicas: int, mesh: Mesh | None = None) -> None:
        super().__init__(config, replicas, mesh)
        self._options = config.gossip
        self._edges: list[Edge] = [(int(a), int(b)) for a, b in self._options.edges]
        if self._options.graph == "directed":
            check_edges(self._edges, replicas)

    @property
    def is_push_sum(self) -> bool:
        """True if the weights of push-sum are needed."""
        return self._options.graph == "directed" or self._options.drop > 0

    @property
    def keeps_equal_replicas(self) -> bool:
        """True: the average of equal replicas is one of them."""
        return True

    def plan(self, step: int) -> StepPlan:
        """Returns a step of each replica, and the round of the graph after every `every` of them."""
        count, rest = divmod(step + 1, self.config.every)
        if rest:
            return StepPlan()
        return StepPlan(exchange=round_number(self._options.graph, self.replicas, count - 1, self._options.seed))

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns for push-sum x and w of all replicas, in float32, and the number of exchanges."""
        if not self.is_push_sum:
            return {}
        biased = jax.tree.map(lambda p: spread(p.astype(jnp.float32), self.replicas), params)
        return {"biased": biased, "weight": jnp.ones(self.replicas), "exchanges": jnp.int32(0)}

    def exchange(self, own: dict[str, Tree], replicas: Replicas, kind: Hashable) -> tuple[dict[str, Tree], Tree]:
        """Mixes the parameters along the edges of a round; `kind`: its number, or `all` for the mean of all."""
        params, weights = replicas.params, replicas.weights
        if kind == ALL:
            mean = self._mean(own, params, weights)
            return self.init(mean), spread(mean, self.replicas)
        parts = messages_of(self._options.graph, self.replicas, int(str(kind)), self._edges)
        if not self.is_push_sum:
            return own, mix(params, parts, weights > 0, self.replica_mesh)
        received = self._received(own["exchanges"], parts)
        biased, weight = push((self._moved(own, params, weights), own["weight"]), parts, received, self.replica_mesh)
        new = jax.tree.map(lambda x, p: (x / along(weight, x)).astype(p.dtype), biased, params)
        return {"biased": biased, "weight": weight, "exchanges": own["exchanges"] + 1}, new

    def agreed(self, own: dict[str, Tree], replicas: Replicas) -> Tree:
        """Returns the mean of the replicas, each counted once."""
        return self._mean(own, replicas.params, replicas.weights)

    def metrics(self, replicas: Replicas, new: Tree) -> dict[str, jax.Array]:
        """Returns `mixing_distance`: the root mean square over the replicas of how far the exchange moved them.

        The distance from the mean would need an all-reduce of all parameters.
        """
        moved = jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), replicas.params, new)
        present = replicas.weights > 0
        squares = (jnp.sum(jnp.where(along(present, x), x**2, 0.0)) for x in jax.tree.leaves(moved))
        return {"mixing_distance": jnp.sqrt(sum(squares, jnp.float32(0)) / jnp.maximum(present.sum(), 1))}

    def sent_bytes(self, params: Tree, kind: Hashable) -> int:
        """Returns the bytes of the messages of the replica that sends most; of `all` those of a ring all-reduce.

        A message has the parameters in float32 and one more number: the weight, or a mark that they are finite.
        """
        if kind == ALL:
            return super().sent_bytes(params, kind)
        parts = messages_of(self._options.graph, self.replicas, int(str(kind)), self._edges)
        senders = [sender for part in parts for sender, _ in part.edges]
        return max(map(senders.count, range(self.replicas))) * (float32_bytes(params) + 4)

    def _moved(self, own: dict[str, Tree], params: Tree, weights: jax.Array) -> Tree:
        """Returns x after the local steps, which changed z: x + z - x / w; of a replica that is not finite x."""

        def one(x: jax.Array, z: jax.Array) -> jax.Array:
            moved = x + (z.astype(jnp.float32) - x / along(own["weight"], x))
            return jnp.where(along(weights > 0, x), moved, x)

        return jax.tree.map(one, own["biased"], params)

    def _mean(self, own: dict[str, Tree], params: Tree, weights: jax.Array) -> Tree:
        if not self.is_push_sum:
            present = (weights > 0).astype(jnp.float32)
            return average(params, present / jnp.maximum(present.sum(), 1))
        moved = self._moved(own, params, weights)
        return jax.tree.map(lambda x, p: (x.sum(0) / self.replicas).astype(p.dtype), moved, params)

    def _received(self, exchanges: jax.Array, parts: Sequence[Messages]) -> list[jax.Array] | None:
        """Returns which messages of each part arrive, by sender, bool [replicas]; None: all."""
        if not self._options.drop:
            return None
        key = jax.random.fold_in(jax.random.key(self._options.seed), exchanges)
        draws = jax.random.uniform(key, (len(parts), self.replicas))
        return list(draws >= self._options.drop)


def mix(tree: Tree, parts: Sequence[Messages], is_present: jax.Array, mesh: Mesh) -> Tree:
    """Returns what replicas hold after a round in which all receive as much as they send, [replicas, ...].

    One that is not present is replaced: for itself by the mean of what it receives, for others by their own values.
    """
    finite = _finite(tree, is_present)
    sums, mass = push((finite, is_present.astype(jnp.float32)), parts, None, mesh)
    return _completed(tree, finite, is_present, sums, mass)


def mix_received(tree: Tree, is_present: jax.Array, shares: jax.Array, received: Sequence[Tree]) -> Tree:
    """Returns what `mix` does for one replica, which has the messages that reached it.

    Args:
        tree: its values, [1, ...].
        is_present: they are finite, bool [1].
        shares: that it keeps of its values, and that each message has of those of its sender, float32 [1 + messages].
        received: messages, shares of values, float32 [1, ...].
    """
    finite = _finite(tree, is_present)
    sums = jax.tree.map(lambda x, *messages: sum(messages, shares[0] * x), finite, *received)
    mass = shares[0] * is_present.astype(jnp.float32)
    for share in shares[1:]:
        mass = mass + share
    return _completed(tree, finite, is_present, sums, mass)


def _finite(tree: Tree, is_present: jax.Array) -> Tree:
    """Returns the values of replicas in float32, and zeros of those that are not present."""
    return jax.tree.map(lambda x: jnp.where(along(is_present, x), x.astype(jnp.float32), 0.0), tree)


def _completed(tree: Tree, finite: Tree, is_present: jax.Array, sums: Tree, mass: jax.Array) -> Tree:
    """Returns values by sums of what replicas keep and receive, and by the shares that these have in all."""
    lacks = jnp.where(is_present, jnp.where(mass < 1 - 1e-6, 1 - mass, 0.0), 0.0)

    def one(total: jax.Array, own: jax.Array, x: jax.Array) -> jax.Array:
        kept = total + along(lacks, own) * own
        return jnp.where(along(is_present, x), kept, total / along(mass, total)).astype(x.dtype)

    return jax.tree.map(one, sums, finite, tree)


def push(tree: Tree, parts: Sequence[Messages], received: Sequence[jax.Array] | None, mesh: Mesh) -> Tree:
    """Returns the sums of what replicas keep and receive, [replicas, ...]; sums over all replicas stay.

    Args:
        tree: values of all replicas, float32 [replicas, ...].
        parts: the messages of the round.
        received: which of them arrive, by sender, bool [replicas] for each part; the others are kept. None: all.
        mesh: with the axis `replica`, along which messages travel.
    """
    shares = [jnp.asarray(part.share) for part in parts]
    if received is not None:
        shares = [jnp.where(arrives, share, 0.0) for share, arrives in zip(shares, received)]
    kept = 1 - sum(shares, jnp.zeros(()))

    def one(x: jax.Array) -> jax.Array:
        total = along(kept, x) * x
        for part, share in zip(parts, shares):
            total = total + send(along(share, x) * x, part.edges, mesh)
        return total

    return jax.tree.map(one, tree)


def send(x: jax.Array, edges: Sequence[Edge], mesh: Mesh) -> jax.Array:
    """Returns for each replica what was sent to it, or zeros, [replicas, ...].

    Args:
        x: what each replica sends, [replicas, ...].
        edges: (sender, receiver), each once.
        mesh: see `push`.
    """
    spec = PartitionSpec(REPLICA_AXIS)
    return jax.shard_map(
        lambda part: jax.lax.ppermute(part, REPLICA_AXIS, list(edges)), mesh=mesh, in_specs=spec, out_specs=spec,
        axis_names=frozenset({REPLICA_AXIS}), check_vma=False,
    )(x)  # fmt: skip
