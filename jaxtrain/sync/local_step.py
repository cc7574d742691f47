"""A step that each replica takes on its own rows, with its own parameters; and the joint step of equal replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sharding.sharder import Sharder
from jaxtrain.sync.replica_dim import average, shares

State = dict[str, Any]
Metrics = dict[str, jax.Array]
StepWithGradients = Callable[[State, Mapping[str, jax.Array]], tuple[State, Metrics, Any]]

SHARED = ("step", "frozen")  # parts of a state that are the same for all replicas
SYNC = "sync"  # part of a state that the strategy adds
LEAST, MOST, SAME, TOTAL = ("skipped", "loss_scale"), ("spike",), ("lr",), ("tokens",)  # metrics that are no average


def split_state(state: State) -> tuple[State, State]:
    """Returns the parts that all replicas share, and those with a replica dim, without what the strategy adds."""
    shared = {name: tree for name, tree in state.items() if name in SHARED}
    return shared, {name: tree for name, tree in state.items() if name not in (*SHARED, SYNC)}


class Sending(NamedTuple):
    """Values that travel between the replicas during a step, which does not depend on them.

    Attributes:
        send: (what the strategy added, finished steps) -> the same, after that.
        bytes: that a replica sends.
    """

    send: Callable[[State, jax.Array], State]
    bytes: int


def local_step(step: StepWithGradients, sharder: Sharder, sending: Sending | None = None) -> StepWithGradients:
    """Returns a step of all replicas, each on its rows: (state, batch) -> (state, metrics, gradients).

    Rows are split in the order of the replicas. All but `step` and `frozen` has a leading replica dim, as have the
    gradients. Code inside is manual over the mesh axis `replica`, so it cannot communicate along it; only the metrics
    are reduced, see `combine_metrics`.

    Args:
        step: of one replica, for the sharder without the axis `replica`.
        sharder: of the whole mesh.
        sending: what travels meanwhile.
    """

    def run_one(shared: State, own: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics, Any]:
        new, metrics, grads = step({**shared, **jax.tree.map(lambda x: x[0], own)}, batch)
        return jax.tree.map(lambda x: x[None], (split_state(new)[1], metrics, grads))

    def run(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics, Any]:
        added = state[SYNC]["own"] if sending is None else sending.send(state[SYNC]["own"], state["step"])
        shared, own = split_state(state)
        specs = (P(), P(REPLICA_AXIS), P(REPLICA_AXIS))
        mapped = sharder.shard_map(run_one, specs, P(REPLICA_AXIS), axes=(REPLICA_AXIS,))
        own, metrics, grads = mapped(shared, own, dict(batch))
        if sending is not None:
            # Without this XLA reduces the metrics together with what travels, which then waits for the whole step.
            metrics, added = jax.lax.optimization_barrier((metrics, added))
        tokens = state[SYNC]["tokens"] + jnp.where(metrics["skipped"] > 0, 0.0, metrics["tokens"])
        sync, metrics = {"tokens": tokens, "own": added}, combine_metrics(metrics)
        if sending is not None:
            metrics["exchanged_bytes"] = jnp.float32(sending.bytes)
        return {**shared, **own, "step": state["step"] + 1, SYNC: sync}, metrics, grads

    return run


def combine_metrics(metrics: Metrics) -> Metrics:
    """Returns the metrics of a step from those of the replicas, [replicas]: means weighted by their tokens.

    A replica whose loss or gradient norm is not finite is left out, unless all are so. `tokens` is a sum; `skipped` is
    1 if all replicas skipped the step, `loss_scale` the smallest, and `spike` the largest. Adds `skipped_replicas`,
    their number.
    """
    is_finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
    weights = shares(metrics["tokens"], is_finite | ~is_finite.any())
    result = {"skipped_replicas": metrics["skipped"].sum()}
    for name, values in metrics.items():
        if name in TOTAL:
            result[name] = values.sum()
        elif name in LEAST:
            result[name] = values.min()
        elif name in MOST:
            result[name] = values.max()
        else:
            result[name] = values[0] if name in SAME else average(values, weights)
    return result


def joint_step(step: StepWithGradients, sharder: Sharder) -> StepWithGradients:
    """Returns a step of replicas that are equal, as one program on the whole batch; they stay equal.

    Args:
        step: of a state without a replica dim, for the whole mesh.
        sharder: of the whole mesh.
    """

    def merge(own: State) -> State:  # nothing is sent: the replicas are equal
        return jax.tree.map(lambda x: x[0], own)

    def split(own: State) -> State:
        return jax.tree.map(lambda x: x[None], own)

    def run(state: State, batch: Mapping[str, jax.Array]) -> tuple[State, Metrics, Any]:
        shared, own = split_state(state)
        keys = own.pop("rng")
        one = sharder.shard_map(merge, P(REPLICA_AXIS), P(), axes=(REPLICA_AXIS,))(own)
        new, metrics, grads = step({**shared, **one, "rng": keys[0]}, batch)
        own = {name: tree for name, tree in split_state(new)[1].items() if name != "rng"}
        own, grads = sharder.shard_map(split, P(), P(REPLICA_AXIS), axes=(REPLICA_AXIS,))((own, grads))
        return {**shared, **own, "rng": keys, "step": new["step"], SYNC: state[SYNC]}, metrics, grads

    return run
