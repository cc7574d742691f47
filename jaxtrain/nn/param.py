"""Our own parameter: with logical names, and with gradients of another dtype than itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Apart:
    """A parameter's value, and what it is differentiated by: an array of its shape whose own values nobody reads.

    The gradient leaves every layer in the dtype of `other`: in float32 where a float32 Ref is to take it there, in
    bfloat16 where it came so and is to be stacked so; only what is stacked already could be cast later. As a pytree it
    goes through `jax.lax.scan` like an array.
    """

    value: jax.Array
    other: jax.Array


def plain(value: Any) -> Any:
    """The array that a model computes with."""
    return _value(value) if isinstance(value, Apart) else value


def stand_in(param: jax.Array, dtype: Any) -> jax.Array:
    """Returns a proxy to differentiate by for a gradient of this dtype: a parameter that has it itself, else zeros."""
    return param if param.dtype == dtype else jnp.zeros(param.shape, dtype)


def widened(params: Any) -> Any:
    """Returns a proxy to differentiate by for float32 gradients."""
    return jax.tree.map(lambda p: stand_in(p, jnp.float32), params)


def apart(stand_ins: Any, params: Any) -> Any:
    """`params` for the model, as a function of what to differentiate by."""
    return jax.tree.map(lambda s, p: s if s.dtype == p.dtype else Apart(p, s), stand_ins, params)


class Param(nnx.Param):
    """A parameter that hands out an array where it holds an `Apart`."""

    def get_value(self, **index: Any) -> Any:
        """The array, or `index=` of it."""
        if not isinstance(self.get_raw_value(), Apart):
            return super().get_value(**index)
        value = plain(self.get_raw_value())
        return value[index["index"]] if index else value


@jax.custom_vjp
def _value(given: Apart) -> jax.Array:
    return given.value


_value.defvjp(
    lambda given: (given.value, jnp.zeros((0,), given.other.dtype)),  # an empty array carries the dtype
    lambda like, g: (Apart(jnp.zeros_like(g), g.astype(like.dtype)),),
)
