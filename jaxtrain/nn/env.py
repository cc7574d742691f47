"""Environment of a module: sharding, dtypes and the attention kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.param import Param
from jaxtrain.precision.policy import POLICIES, Policy
from jaxtrain.sharding.rules import BATCH, CONTEXT, SEQUENCE
from jaxtrain.sharding.sharder import Sharder

Init = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclass(frozen=True, eq=False)
class Env:
    """Passed to every model's constructor. The default runs unsharded in float32.

    attention: the kernel; context: how attention crosses the shards of a sequence (see `kernels.attention`).
    remat: `none`, `full`, `dots`, or the names of values to save; offload: of values to save in host memory (see
    `nn.stack`). unroll: layers in one turn of the loop over them; 0: all, no loop.
    """

    sharder: Sharder = field(default_factory=Sharder)
    policy: Policy = POLICIES["fp32"]
    attention: str = "auto"
    context: str = "auto"
    remat: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    unroll: int = 1

    def param(
        self,
        rngs: nnx.Rngs,
        names: tuple[str | None, ...],
        shape: tuple[int, ...],
        init: Init,
        *,
        dtype: Any = None,
        exact: bool = False,
    ) -> Param:
        """A parameter whose dims carry logical names.

        Args:
            names, shape: of the dims.
            init: fresh values.
            dtype: of storage; default: the policy's.
            exact: used in float32 by any policy.
        """
        if len(names) != len(shape):
            raise ValueError(f"parameter of shape {shape} has {len(names)} logical names: {names}")
        stored = dtype or self.policy.params
        return Param(init(rngs.params(), shape, stored), names=names, travels=stored if exact else self.policy.compute)

    def weight(self, param: nnx.Param) -> jax.Array:
        """The parameter ready for use: in the compute dtype, gathered where it is only stored in shards."""
        return self.sharder.weight(param.get_value(), param.names, self.policy.compute)

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """`x` placed by the logical names of its dims."""
        return self.sharder.constrain(x, *names)

    def whole(self, x_BT: jax.Array) -> jax.Array:
        """Small values [B, T] (documents, positions) whole on every shard of a sequence, as attention across shards
        wants them: gathered here once instead of in every layer."""
        return self.constrain(x_BT, BATCH, None)

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Moves activations from the residual stream (sharded by `sequence`) to matmuls (by `context`): an all-gather
        under sequence parallelism, whose transpose is a reduce-scatter.
        """
        stream, inside = (BATCH, SEQUENCE, None), (BATCH, CONTEXT, None)
        return self.sharder.boundary(x_BTD, (stream, inside), (stream,))

    def leave(self, x_BTD: jax.Array) -> jax.Array:
        """Back to the residual stream after a row-parallel matmul: the transpose of `enter`."""
        stream, inside = (BATCH, SEQUENCE, None), (BATCH, CONTEXT, None)
        return self.sharder.boundary(x_BTD, (stream,), (stream, inside))


def normal(std: float) -> Init:
    """Normal initialisation truncated at three standard deviations, drawn in float32."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)).astype(dtype)

    return init


def constant(value: float) -> Init:
    """Every element the same; the key is not used."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.full(shape, value, dtype)

    return init
