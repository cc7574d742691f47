"""The protocol of a synchronisation strategy: what it adds to the state, its exchange, its steps, its cost."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.errors import UserError
from jaxtrain.sharding.rules import REPLICA_AXIS
from jaxtrain.sync.replica_dim import average, distance, spread

Tree = Any


class StepPlan(NamedTuple):
    """The compiled programs that the host runs for a step.

    Attributes:
        is_joint: the replicas reduce their gradients and stay equal; else each takes a step of its own.
        exchange: kind of the exchange after it, compiled for each kind; None: no exchange.
        send: kind of what travels during the step, in its own program, compiled for each kind; None: nothing.
    """

    is_joint: bool = False
    exchange: Hashable | None = None
    send: Hashable | None = None


@dataclass(frozen=True, eq=False)
class Replicas:
    """Parameters of all replicas at an exchange.

    Attributes:
        params: parameters, [replicas, ...]. Those of weight 0 may not be finite.
        weights: share of each replica in the tokens since the last exchange, float32 [replicas] of sum 1. A replica
            with parameters that are not finite has 0. All are 0 if there is no other.
        tokens: of each replica since the last exchange, float32 [replicas]; default: 0.
        is_present: replicas of which all numbers are finite, bool [replicas]; default: those with a weight.
    """

    params: Tree
    weights: jax.Array
    tokens: Any = 0.0
    is_present: Any = None
    _distance: dict[str, jax.Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_present is None:
            object.__setattr__(self, "is_present", self.weights > 0)

    @cached_property
    def average(self) -> Tree:
        """Weighted average of the parameters in float32, without a replica dim. Computed once, and sent once."""
        return average(jax.tree.map(lambda x: x.astype(jnp.float32), self.params), self.weights)

    def receive(self, average: Tree) -> None:
        """Takes the average as it was received, such as after compression, in place of one that is computed."""
        self.__dict__["average"] = average

    @property
    def distance(self) -> dict[str, jax.Array]:
        """`consensus_distance`, if the average was used or the distance from it noted; else nothing."""
        if "average" in self.__dict__:
            return {"consensus_distance": distance(self.params, self.average, self.weights > 0)}
        return self._distance

    def note_distance(self, params: Tree, average: Tree, is_any: jax.Array) -> None:
        """Keeps how far parts of the parameters, [replicas, ...], are from an average; 0 unless `is_any`."""
        found = distance(params, average, self.is_present)
        self._distance["consensus_distance"] = jnp.where(is_any, found, 0.0)


def like(tree: Tree, params: Tree) -> Tree:
    """Returns a tree in the dtypes of the parameters."""
    return jax.tree.map(lambda x, p: x.astype(p.dtype), tree, params)


class Strategy:
    """A way in which replicas agree; subclass it for one of your own.

    Replicas are a mesh axis, `axis`. Trees of all replicas have a leading replica dim, which is sharded over it;
    inside a replica any layout works. Methods are traced and must be pure functions of their arguments.

    Attributes:
        parameters_differ: replicas may hold different parameters between exchanges; else there are no exchanges.
        combines_gradients: replicas hold the same parameters, each computes gradients of its rows, and `combine` makes
            those of the batch of them. Not with `parameters_differ`.
        combines_momenta: what it combines are the first moments of Adam that the replicas' gradients would make; the
            second one is frozen.
        mixes_batches: the rows of replicas may be of different steps, see `data_steps`; refused for iterables.
        min_replicas: replicas that it needs.
        early_exchange: kind of the exchange that ends a round early, when a run continues with other replicas.
        config: section `sync` of the config.
        replicas: size of the mesh axis `axis`.
        mesh: the mesh, for a strategy that sends along that axis itself; None: there is one device.
        names: logical names of the dims of the parameters, a tree of tuples; None if unknown.
    """

    parameters_differ = True
    combines_gradients = False
    combines_momenta = False
    mixes_batches = False
    min_replicas = 1
    early_exchange: Hashable = "all"
    names: Tree = None

    def __init__(self, config: SyncConfig, replicas: int, mesh: Mesh | None = None) -> None:
        self.config, self.replicas, self.mesh = config, replicas, mesh

    @property
    def axis(self) -> str:
        """Mesh axis of the replicas: `replica`; for compressed gradients of a mesh with one replica it is `data`."""
        return REPLICA_AXIS if self.mesh is None else self.config.replica_axis(self.mesh.shape)

    @property
    def keeps_equal_replicas(self) -> bool:
        """True if replicas that train on equal rows with equal noise go on as one replica would.

        That is one with the same strategy if it needs no more than one, else one with `bsp`. `jaxtrain verify` compares
        them.
        """
        return False

    @property
    def replica_mesh(self) -> Mesh:
        """The mesh of several replicas. Raises ValueError without one."""
        if self.mesh is None:
            raise ValueError(f"{self.config.strategy} sends along the mesh axis `{self.axis}`; expected a mesh")
        return self.mesh

    def plan(self, step: int) -> StepPlan:
        """Returns the programs of the step after `step` finished ones: by default an exchange every `sync.every`."""
        return StepPlan(exchange="all" if (step + 1) % self.config.every == 0 else None)

    @property
    def phases(self) -> Sequence[tuple[int, Strategy]]:
        """First steps of other strategies with the same own state, (end, strategy): by default none.

        For one that combines gradients. Each has a program of its own.
        """
        return ()

    def at(self, step: int) -> Strategy:
        """Returns the strategy of the step after `step` finished ones."""
        return next((strategy for end, strategy in self.phases if step < end), self)

    def data_steps(self, step: int) -> tuple[int, ...]:
        """Returns the steps of the data order whose rows the replicas train on in a step: by default the step itself.

        A pure function, of one number for all replicas or one for each.
        """
        return (step,)

    def trained_batches(self, step: int) -> float:
        """Returns how many global batches `step` steps train on, for the count of tokens: by default one each."""
        return float(step)

    def host_values(self, step: int) -> dict[str, np.ndarray]:
        """Returns the values of some arrays of the own state for a step, which the host works out: by default none.

        A pure function of the step. `init` adds such arrays too. See `combines_gradients`.
        """
        return {}

    def continues(self, before: Strategy) -> bool:
        """Returns whether the own state of another strategy, of the same shapes, can go on: by default always."""
        return True

    def prepare(self, params: Tree, names: Tree) -> None:
        """Takes the shapes of the parameters and their logical names, before any other method is called.

        Raises:
            UserError: the strategy does not fit these parameters.
        """

    def is_settled(self, step: int) -> bool:
        """Returns whether no round has begun after `step` finished steps: by default if the last one exchanged."""
        return self.plan(step - 1) != StepPlan()

    @property
    def round_form(self) -> Hashable:
        """Options on which a state within a round depends beside its shapes; with others a run begins a new round."""
        return None

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns what the strategy adds to the state, for the parameters of step 0, without a replica dim.

        A tree like the parameters is sharded as they are. If its leaves have a leading dim of the replicas, that is
        sharded over `axis`. Other arrays are replicated.
        """
        return {}

    def exchange(self, own: dict[str, Tree], replicas: Replicas, kind: Hashable) -> tuple[dict[str, Tree], Tree]:
        """Returns (own state, parameters of all replicas) after an exchange: by default all get the average.

        Args:
            own: what `init` added.
            replicas: their parameters and weights.
            kind: of the plan of the step.
        """
        return own, spread(like(replicas.average, replicas.params), self.replicas)

    def read(self, own: dict[str, Tree], params: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (own state, parameters at which gradients are computed) at the start of a step.

        By default those of the state. Others have a leading replica dim. See `combines_gradients`.

        Args:
            own: what `init` added.
            params: parameters of the state, which have no replica dim.
        """
        return own, params

    def present(self, own: dict[str, Tree]) -> jax.Array | None:
        """Returns the replicas whose gradients are part of a step, bool [replicas]; None: all.

        See `combines_gradients`. Losses, statistics and tokens are of their rows alone, and `combine` gets gradients of
        0 of the others.

        Args:
            own: what `read` returned.
        """
        return None

    def scale_updates(self, own: dict[str, Tree], updates: Tree) -> Tree:
        """Returns the updates that the optimizer made of combined gradients, scaled: by default as they are.

        Args:
            own: what `combine` returned.
            updates: like the parameters; they are added to these.
        """
        return updates

    def combine(
        self, own: dict[str, Tree], gradients: Tree, tokens: jax.Array
    ) -> tuple[dict[str, Tree], Tree, dict[str, jax.Array]]:
        """Returns (own state, gradients of the batch, metrics): by default the mean. See `combines_gradients`.

        A step whose loss or combined gradients are not finite is skipped: then the own state is what `read` returned.

        Args:
            own: what `read` returned.
            gradients: of each replica, [replicas, ...], without the loss scale. Their mean is the gradient of the
                batch, whatever the tokens, because each has the weights of the terms over all rows.
            tokens: of each replica in the batch, float32 [replicas].
        """
        count = self.replicas
        return own, jax.tree.map(lambda g: (g.sum(0) / count).astype(g.dtype), gradients), {}

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns PartitionSpecs of trees that `init` adds, by name, if they are not to be those that `init` says.

        Args:
            params: shapes of the parameters, with their shardings.
        """
        return {}

    def send(self, kind: Hashable, own: dict[str, Tree], step: jax.Array) -> dict[str, Tree]:
        """Returns the own state after what travels during a step, independent of the step itself.

        Args:
            kind: of the plan of the step.
            own: what `init` added.
            step: finished steps.

        Raises:
            UserError: `plan` sends something, and the strategy does not say what.
        """
        message = f"{self.config.strategy} plans to send {kind} during a step; expected a method `send`"
        raise UserError(f"sync.strategy: {message}")

    def exchanges_mutable(self, kind: Hashable) -> bool:
        """Returns whether mutable variables are averaged in an exchange of a kind: by default in all."""
        return True

    def agreed(self, own: dict[str, Tree], replicas: Replicas) -> Tree:
        """Returns the parameters that validation and export use, without a replica dim: by default the average."""
        return like(replicas.average, replicas.params)

    def metrics(self, replicas: Replicas, new: Tree) -> dict[str, jax.Array]:
        """Returns how far apart the replicas were before an exchange, if it computed their average.

        `consensus_distance` is the root mean square over the replicas of their distance from it.

        Args:
            replicas: parameters and weights before the exchange.
            new: parameters of all replicas after it.
        """
        return replicas.distance  # without the average, which would be sent for the distance alone

    def sent_bytes(self, params: Tree, kind: Hashable) -> int:
        """Returns the bytes that each replica sends in an exchange: by default those of a ring all-reduce in float32.

        Args:
            params: shapes of the parameters, without a replica dim.
            kind: of the exchange, or of what travels during a step.
        """
        return 2 * float32_bytes(params) * (self.replicas - 1) // self.replicas


def float32_bytes(tree: Tree) -> int:
    """Returns the bytes of a tree of arrays in float32; integers are not counted."""
    return sum(4 * prod(x.shape) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact))
