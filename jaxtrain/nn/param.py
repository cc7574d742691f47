"""Our own parameter: with logical names, and with gradients wider than itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Narrow:
    """A parameter's value in bfloat16 or float16, with a float32 gradient.

    To be differentiated by `wide`, an array of the value's shape whose own values nobody reads. Its gradient leaves
    every layer in float32, so that a float32 Ref can take it there; the value's own would be stacked over the layers
    before anybody could widen it. As a pytree it goes through `jax.lax.scan` like an array.
    """

    value: jax.Array
    wide: jax.Array


def plain(value: Any) -> Any:
    """The array that a model computes with."""
    return _value(value) if isinstance(value, Narrow) else value


def widened(params: Any) -> Any:
    """What to differentiate by: float32 parameters themselves, stand-ins for narrower ones."""
    return jax.tree.map(lambda p: p if p.dtype == jnp.float32 else jnp.zeros(p.shape, jnp.float32), params)


def narrowed(wide: Any, params: Any) -> Any:
    """`params` for the model, as a function of `widened(params)`."""
    return jax.tree.map(lambda w, p: w if p.dtype == jnp.float32 else Narrow(p, w), wide, params)


class Param(nnx.Param):
    """A parameter that hands out an array where it holds a `Narrow`."""

    def get_value(self, **index: Any) -> Any:
        """The array, or `index=` of it."""
        if not isinstance(self.get_raw_value(), Narrow):
            return super().get_value(**index)
        value = plain(self.get_raw_value())
        return value[index["index"]] if index else value


@jax.custom_vjp
def _value(narrow: Narrow) -> jax.Array:
    return narrow.value


_value.defvjp(
    lambda narrow: (narrow.value, None),
    lambda _, g: (Narrow(jnp.zeros_like(g), g.astype(jnp.float32)),),
)
