"""Shardings of parameters and activations from logical names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.sharding.rules import (
    STAGES,
    Names,
    Rules,
    axes_of,
    dims_to_axes,
    full_rules,
    placed_dims,
    storage_axes,
    stored_dims,
    without,
)

Dims = tuple[tuple[str, ...], ...]  # mesh axes of every dim


@dataclass(frozen=True, eq=False)
class Sharder:
    """Places tensors by logical names. Passed explicitly to whatever constrains an activation.

    With `mesh=None` every method is the identity, so that a model runs unsharded in a plain test. `zero` is the ZeRO
    stage over the replicas: 0 keeps all state in each, from 1 on it is spread (`stored`); weights are gathered once a
    step, in stage 3 in every layer. `manual` are axes that a `jax.shard_map` around everything has split already.
    """

    mesh: Mesh | None = None
    rules: Rules | None = None
    zero: int = 0
    manual: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", full_rules(self.rules or {}, self.zero))

    def without(self, axis: str) -> Sharder:
        """The same inside a `map` over a mesh axis: no rule names it, nothing is spread over it."""
        rules = {name: tuple(a for a in axes if a != axis) for name, axes in (self.rules or {}).items()}
        return Sharder(self.mesh, rules, self.zero, self.manual | {axis})

    @property
    def takes_turns(self) -> bool:
        """True if this is code of a pipeline stage: other stages may be at another action, and would miss a permutation
        here, for which all devices wait.
        """
        return STAGES in self.manual

    def map(self, body: Callable, in_specs: Any, out_specs: Any, axes: Iterable[str] | None = None) -> Callable:
        """`jax.shard_map` over some mesh axes, default all that are left. Raises ValueError without a mesh.

        Unchecked, as kernels need it: never differentiate across it inside.
        """
        mesh = self._mesh()
        over = frozenset(mesh.axis_names if axes is None else axes) - self.manual
        return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=over, check_vma=False)

    def _mesh(self) -> Any:
        """The mesh as code sees it that runs with `manual` axes."""
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        if not self.manual:
            return self.mesh
        return self.mesh.abstract_mesh.update_axis_types(dict.fromkeys(self.manual, AxisType.Manual))

    def spec(self, names: Sequence[str | None]) -> PartitionSpec:
        """PartitionSpec of a tensor whose dims have these logical names."""
        return _spec(dims_to_axes(names, self.rules or {}))

    def sharding(self, names: Sequence[str | None]) -> NamedSharding:
        """NamedSharding of the same. Raises ValueError without a mesh."""
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        return NamedSharding(self.mesh, self.spec(names))

    def axes(self, name: str | None) -> tuple[str, ...]:
        """Mesh axes that shard a logical name."""
        return axes_of(name, self.rules or {})

    def dims(self, names: Sequence[str | None]) -> Dims:
        """Mesh axes of every dim of a tensor with these names."""
        return dims_to_axes(names, self.rules or {})

    def size(self, name: str | None) -> int:
        """Number of shards of a logical name."""
        return 1 if self.mesh is None else prod(self.mesh.shape[axis] for axis in self.axes(name))

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """`x` placed by logical names, one per dim; its cotangent likewise."""
        return self.place(x, dims_to_axes(names, self.rules or {}))

    def place(self, x: jax.Array, dims: Dims) -> jax.Array:
        """`x` placed by mesh axes, one tuple per dim."""
        if self.mesh is None:
            return x
        if len(dims) != x.ndim:
            raise ValueError(f"{len(dims)} names for a tensor of shape {x.shape}")
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), _spec(dims)))

    def lead(self, x: jax.Array, dims: Dims) -> jax.Array:
        """`x` with its first dims placed by mesh axes and the others left as they lie."""
        if self.mesh is None:
            return x
        free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - len(dims))
        return jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh(), PartitionSpec(*_spec(dims), *free)))

    def placed(self, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
        """Mesh axes of every dim of a parameter where the model expects it, gathered over the replicas."""
        return placed_dims(names, shape, self.rules or {}, self._sizes)

    def stored(self, names: Sequence[str | None], shape: Sequence[int]) -> Dims:
        """Mesh axes of every dim of a parameter, its gradient or its moment in the train state."""
        return stored_dims(names, shape, self.rules or {}, self._sizes, self.zero)

    @property
    def _sizes(self) -> dict[str, int]:
        return {} if self.mesh is None else dict(self.mesh.shape)

    def state_sharding(self, names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding:
        """NamedSharding of `stored`. Raises ValueError without a mesh."""
        if self.mesh is None:
            raise ValueError("a sharding needs a mesh")
        return NamedSharding(self.mesh, _spec(self.stored(names, shape)))

    def boundary(self, x: jax.Array, fwd: Sequence[Names], bwd: Sequence[Names]) -> jax.Array:
        """Identity that places `x` by each of `fwd` in turn, and its cotangent by each of `bwd`.

        A plain constraint also constrains the cotangent, which turns a reduce-scatter into an all-reduce
        wherever forward and backward want different places. Naming the place before a gather pins what travels:
        without it the partitioner may gather ahead of a cast, in float32.
        """
        rules = self.rules or {}
        forward, backward = (tuple(dims_to_axes(names, rules) for names in side) for side in (fwd, bwd))
        return _boundary(self, forward, backward, x.dtype, x)

    def weight(self, w: jax.Array, names: Sequence[str | None], dtype: Any, gather: bool = True) -> jax.Array:
        """A parameter made ready for use: cast to `dtype`, gathered over the storage axes (FSDP) unless told not to.

        Cast first and constrained sharded before gathered, so that `dtype` (not float32) travels, also when
        rematerialisation gathers again; the gradient is reduced straight into the shards of the train state.
        """
        rules = self.rules or {}
        placed = self.dims(names)
        forward = (placed, without(names, storage_axes(rules, names), rules)) if gather else (placed,)
        return _boundary(self, forward, (self.stored(names, w.shape),), jnp.dtype(dtype), w)

    def gathered(self, w: jax.Array, names: Sequence[str | None], dtype: Any) -> jax.Array:
        """A parameter of the train state where the model expects it: itself, or gathered over the replicas in `dtype`.

        Its cotangent is reduced into the shards of the train state.
        """
        stored, placed = self.stored(names, w.shape), self.placed(names, w.shape)
        return w if stored == placed else _boundary(self, (stored, placed), (stored,), jnp.dtype(dtype), w)


def _spec(dims: Dims) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _boundary(sharder: Sharder, forward: tuple[Dims, ...], backward: tuple[Dims, ...], dtype: Any, x: jax.Array):
    """Cast `x` to `dtype`, then place it by each of `forward` in turn; the cotangent by each of `backward`."""
    x = x.astype(dtype)
    for dims in forward:
        x = sharder.place(x, dims)
    return x


def _boundary_fwd(sharder, forward, backward, dtype, x):
    # An empty array carries the dtype to cast the cotangent back to.
    return _boundary(sharder, forward, backward, dtype, x), jnp.zeros((0,), x.dtype)


def _boundary_bwd(sharder, forward, backward, dtype, like, g):
    for dims in backward:
        g = sharder.place(g, dims)
    return (g.astype(like.dtype),)


_boundary.defvjp(_boundary_fwd, _boundary_bwd)
