"""Parameters with logical names, whose gradients may have another dtype than themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SplitGrad:
    """A parameter's value and its gradient proxy: an array of the same shape that it is differentiated by.

    The values of the proxy are never read; its dtype is that of the gradient. It is float32 if the gradient is added to
    a float32 Ref, or the communication dtype if gradients of layers are stacked before they are reduced. As a pytree it
    passes through `jax.lax.scan` like an array.
    """

    value: jax.Array
    proxy: jax.Array


class Param(nnx.Param):
    """A parameter that returns an array also when it holds a `SplitGrad`."""

    def get_value(self, **index: Any) -> Any:
        """Returns the array, or `index=` of it."""
        if not isinstance(self.get_raw_value(), SplitGrad):
            return super().get_value(**index)
        value = unwrap(self.get_raw_value())
        return value[index["index"]] if index else value


def unwrap(value: Any) -> Any:
    """Returns the array that a model computes with, whose gradient goes to the proxy of a `SplitGrad`."""
    return _value(value) if isinstance(value, SplitGrad) else value


def grad_proxy(param: jax.Array, dtype: Any) -> jax.Array:
    """Returns an array to differentiate by for a gradient of this dtype: the parameter if it has it, else zeros."""
    return param if param.dtype == dtype else jnp.zeros(param.shape, dtype)


def float32_grad_proxies(params: Any) -> Any:
    """Returns arrays to differentiate by for float32 gradients."""
    return jax.tree.map(lambda p: grad_proxy(p, jnp.float32), params)


def attach_grad_proxies(proxies: Any, params: Any) -> Any:
    """Returns the parameters for the model, as a function of the proxies."""
    return jax.tree.map(lambda s, p: s if s.dtype == p.dtype else SplitGrad(p, s), proxies, params)


@jax.custom_vjp
def _value(pair: SplitGrad) -> jax.Array:
    return pair.value


_value.defvjp(
    lambda pair: (pair.value, jnp.zeros((0,), pair.proxy.dtype)),  # an empty array carries the dtype
    lambda like, g: (SplitGrad(jnp.zeros_like(g), g.astype(like.dtype)),),
)
