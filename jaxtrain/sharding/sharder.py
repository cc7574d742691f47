"""Shardings of parameters and activations from logical names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.sharding.rules import (
    PIPELINE_AXIS,
    Names,
    Rules,
    axes_of,
    compute_dims,
    dims_to_axes,
    dims_without_axes,
    storage_axes,
    storage_dims,
    with_implied_rules,
)
from jaxtrain.sharding.weight_gather import PLAIN, SHARDS, GatherPlan, WeightGather

Dims = tuple[tuple[str, ...], ...]  # mesh axes of every dim


@dataclass(frozen=True, eq=False)
class Sharder:
    """A mesh, and the rules that map logical names to its axes. Given to everything that constrains an activation.

    Without a mesh every method is the identity, so that a model runs unsharded in a plain test.

    Attributes:
        mesh: the device mesh.
        rules: logical name -> mesh axes.
        zero: ZeRO stage over the data axis. From 1 on the train state is sharded over it (`storage_dims`), and weights
            are gathered once a step, in stage 3 in every layer.
        manual: axes that an enclosing `jax.shard_map` has split already.
        weight_gather: how the weights of layers travel.
    """

    mesh: Mesh | None = None
    rules: Rules | None = None
    zero: int = 0
    manual: frozenset[str] = frozenset()
    weight_gather: WeightGather = PLAIN

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", with_implied_rules(self.rules or {}, self.zero))

    def without_axis(self, axis: str) -> Sharder:
        """Returns the sharder for code inside a `shard_map` over a mesh axis: no rule uses that axis."""
        rules = {name: tuple(a for a in axes if a != axis) for name, axes in (self.rules or {}).items()}
        return replace(self, rules=rules, manual=self.manual | {axis})

    @property
    def in_pipeline_stage(self) -> bool:
        """True in code of a pipeline stage. A permutation there would wait for stages that run another action."""
        return PIPELINE_AXIS in self.manual

    def shard_map(self, body: Callable, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None) -> Callable:
        """Returns `jax.shard_map` of `body` over some mesh axes, by default all that are not manual yet.

        Replication is not checked, because kernels do not support that: never differentiate across it inside.

        Raises:
            ValueError: no mesh.
        """
        mesh = self._mesh()
        over = frozenset(mesh.axis_names if axes is None else axes) - self.manual
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=over, check_vma=False)

    def _mesh(self) -> Any:
        """Returns the mesh as code within the `manual` axes sees it."""
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        if not self.manual:
            return self.mesh
        return self.mesh.abstract_mesh.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """Returns the PartitionSpec of a tensor whose dims have these logical names."""
        return _spec(self.dims(names))

    def sharding(self, names: Sequence[str | None]) -> NamedSharding:
        """Returns the NamedSharding of such a tensor. Raises ValueError without a mesh."""
        return self._named(self.dims(names))

    def storage_sharding(self, names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """Returns the NamedSharding of a tensor of the train state. Raises ValueError without a mesh."""
        return self._named(self.storage_dims(names, shape))

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Returns the mesh axes that shard a logical name."""
        return axes_of(name, self.rules or {})

    def dims(self, names: Sequence[str | None]) -> Dims:
        """Returns the mesh axes of every dim of a tensor with these names."""
        return dims_to_axes(names, self.rules or {})

    def compute_dims(self, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
        """Returns the mesh axes of every dim of a parameter as the model uses it: gathered over the data axis."""
        return compute_dims(names, shape, self.rules or {}, self._sizes)

    def storage_dims(self, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
        """Returns the mesh axes of every dim of a parameter, its gradient or its moment in the train state."""
        return storage_dims(names, shape, self.rules or {}, self._sizes, self.zero)

    def size(self, name: str | None) -> int:
        """Returns the number of shards of a logical name."""
        return 1 if self.mesh is None else prod(self.mesh.shape[axis] for axis in self.axes(name))

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Constrains the sharding of `x` by logical names, one for each dim; its cotangent likewise."""
        return self.constrain_dims(x, self.dims(names))

    def constrain_dims(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Constrains the sharding of `x` by mesh axes, a tuple for each dim."""
        if self.mesh is None:
            return x
        if len(dims) != x.ndim:
            raise ValueError(f"{len(dims)} names for a tensor of shape {x.shape}")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), _spec(dims)))

    def constrain_leading(self, x: jax.Array, dims: Dims) -> jax.Array:
        """Constrains the first dims of `x` by mesh axes and leaves the others to the compiler."""
        if self.mesh is None:
            return x
        free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(dims))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), PartitionSpec(*_spec(dims), *free)))

    def reshard(self, x: jax.Array, fwd: Sequence[Names], bwd: Sequence[Names]) -> jax.Array:
        """Constrains `x` by each of the names in `fwd`, one after the other, and its cotangent by each in `bwd`.

        A plain constraint also constrains the cotangent. Where forward and backward pass want different shardings, that
        turns a reduce-scatter into an all-reduce. Naming the sharding before a gather fixes the dtype that is sent:
        otherwise the partitioner may gather before a cast, in float32.

        Returns:
            `x`, resharded.
        """
        forward, backward = (tuple(self.dims(names) for names in side) for side in (fwd, bwd))
        return _reshard(self, forward, backward, x.dtype, x)

    def gather_weight(
        self, w: jax.Array, names: Sequence[str | None], dtype: Any, gather: bool = True, of_layer: bool = False
    ) -> jax.Array:
        """Returns a parameter for use: cast to `dtype`, and gathered over the storage axes (FSDP) if `gather`.

        The cast comes before the gather, so that `dtype` is sent and not float32, also when rematerialisation gathers
        again. The gradient is reduced straight into the shards of the train state. With `of_layer` it travels as
        `weight_gather` says.
        """
        rules, sharded = self.rules or {}, self.dims(names)
        if of_layer and self.mesh is not None:
            used = dims_without_axes(names, storage_axes(rules, names), rules)
            if (plan := self.weight_gather.plan(sharded, used, w.shape, self._sizes)) is not None:
                return _gather(self, plan, self.storage_dims(names, w.shape), jnp.dtype(dtype), w)
        gathered = (dims_without_axes(names, storage_axes(rules, names), rules),) if gather else ()
        return _reshard(self, (sharded, *gathered), (self.storage_dims(names, w.shape),), jnp.dtype(dtype), w)

    def gather_replicas(self, w: jax.Array, names: Sequence[str | None], dtype: Any) -> jax.Array:
        """Returns a parameter of the train state as the model uses it: gathered over the data axis, if ZeRO shards it.

        It is sent in `dtype`; its cotangent is reduced into the shards of the train state.
        """
        stored, used = self.storage_dims(names, w.shape), self.compute_dims(names, w.shape)
        return w if stored == used else _reshard(self, (stored, used), (stored,), jnp.dtype(dtype), w)

    @property
    def _sizes(self) -> dict[str, int]:
        return {} if self.mesh is None else dict(self.mesh.shape)

    def _named(self, dims: Dims) -> NamedSharding:
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        return NamedSharding(self.mesh, _spec(dims))


def _spec(dims: Dims) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _reshard(sharder: Sharder, forward: tuple[Dims, ...], backward: tuple[Dims, ...], dtype: Any, x: jax.Array):
    """Casts `x` to `dtype` and constrains it by each of `forward`; its cotangent by each of `backward`."""
    x = x.astype(dtype)
    for dims in forward:
        x = sharder.constrain_dims(x, dims)
    return x


def _reshard_fwd(sharder, forward, backward, dtype, x):
    # An empty array carries the dtype of the cotangent.
    return _reshard(sharder, forward, backward, dtype, x), jnp.zeros((0,), x.dtype)


def _reshard_bwd(sharder, forward, backward, dtype, like, g):
    for dims in backward:
        g = sharder.constrain_dims(g, dims)
    return (g.astype(like.dtype),)


_reshard.defvjp(_reshard_fwd, _reshard_bwd)


def _gather(sharder: Sharder, plan: GatherPlan, backward: Dims, dtype: Any, w: jax.Array) -> jax.Array:
    """Returns a weight, gathered by a plan; its cotangent passes straight through, and is constrained to `backward`.

    What rematerialisation keeps and what it repeats is within no `custom_vjp`, where its policy would not see it.
    """
    x = jax.lax.stop_gradient(w)
    x = sharder.constrain_dims(x if plan.block else x.astype(dtype), plan.stored)
    stored, packed, used = map(_spec, (plan.stored, plan.packed, plan.used))
    shards = checkpoint_name(sharder.shard_map(plan.before, stored, packed)(x), SHARDS)
    return _in_place_of(sharder, backward, w, sharder.shard_map(plan.after, packed, used)(shards).astype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_place_of(sharder: Sharder, backward: Dims, w: jax.Array, gathered: jax.Array) -> jax.Array:
    """Returns what was gathered of a weight, whose cotangent is that of the weight."""
    return gathered


def _in_place_of_fwd(sharder, backward, w, gathered):
    return gathered, jnp.zeros((0,), w.dtype)


def _in_place_of_bwd(sharder, backward, like, g):
    return sharder.constrain_dims(g, backward).astype(like.dtype), None


_in_place_of.defvjp(_in_place_of_fwd, _in_place_of_bwd)
