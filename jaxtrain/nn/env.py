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
RESIDUAL = (BATCH, SEQUENCE, None)  # names of the residual stream
MATMUL = (BATCH, CONTEXT, None)  # names of activations between matmuls


@dataclass(frozen=True, eq=False)
class Env:
    """Given to every model's constructor. The default runs unsharded in float32.

    Attributes:
        sharder: mesh and rules.
        policy: dtypes.
        attention: attention kernel.
        context_parallel: how attention crosses the shards of a sequence (see `kernels.attention`).
        remat: `none`, `full`, `dots`, or the names of values to save.
        offload: names of values to save in host memory (see `nn.stack`).
        remat_modules: patterns of the paths of submodules to which `remat` applies; for models that take no env.
        unroll: layers in one iteration of the loop over layers; 0: all, without a loop.
    """

    sharder: Sharder = field(default_factory=Sharder)
    policy: Policy = POLICIES["fp32"]
    attention: str = "auto"
    context_parallel: str = "auto"
    remat: str | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    unroll: int = 1
    remat_modules: tuple[str, ...] = ()

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
        """Creates a parameter whose dims have logical names.

        Args:
            rngs: source of the initial values.
            names: logical name of each dim.
            shape: size of each dim.
            init: initialiser.
            dtype: storage dtype; default: the policy's.
            exact: True if every policy uses it in the storage dtype.

        Returns:
            the parameter.

        Raises:
            ValueError: as many names as dims are needed.
        """
        if len(names) != len(shape):
            raise ValueError(f"parameter of shape {shape} has {len(names)} logical names: {names}")
        dtype = dtype or self.policy.params
        value = init(rngs.params(), shape, dtype)
        return Param(value, names=names, gather_dtype=dtype if exact else self.policy.compute)

    def weight(self, param: nnx.Param) -> jax.Array:
        """Returns the parameter for use: in the compute dtype, gathered over the axes that only store it in shards."""
        return self.sharder.gather_weight(param.get_value(), param.names, self.policy.compute, of_layer=True)

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """Constrains the sharding of `x` by the logical names of its dims."""
        return self.sharder.constrain(x, *names)

    def replicate_sequence(self, x_BT: jax.Array) -> jax.Array:
        """Replicates small values [B, T] (documents, positions) over the shards of a sequence.

        Attention across shards needs them; this gathers them once and not in every layer.

        Returns:
            the replicated values.
        """
        return self.constrain(x_BT, BATCH, None)

    def gather_sequence(self, x_BTD: jax.Array) -> jax.Array:
        """Moves activations from the residual stream (sharded by `sequence`) to matmuls (by `context`).

        Under sequence parallelism this is an all-gather, and its transpose a reduce-scatter.

        Returns:
            the same values with the sharding of matmul inputs.
        """
        return self.sharder.reshard(x_BTD, (RESIDUAL, MATMUL), (RESIDUAL,))

    def scatter_sequence(self, x_BTD: jax.Array) -> jax.Array:
        """Moves activations back to the residual stream after a row-parallel matmul: transpose of `gather_sequence`."""
        return self.sharder.reshard(x_BTD, (RESIDUAL,), (RESIDUAL, MATMUL))


def normal(std: float) -> Init:
    """Returns a normal initialiser, truncated at three standard deviations and drawn in float32."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return (std * jax.random.truncated_normal(key, -3.0, 3.0, shape, jnp.float32)).astype(dtype)

    return init


def constant(value: float) -> Init:
    """Returns an initialiser that sets every element to `value`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        del key
        return jnp.full(shape, value, dtype)

    return init
