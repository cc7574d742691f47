"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) and LayerNorm (Ba et al. 2016, arXiv 1607.06450)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.env import Env, constant
from jaxtrain.nn.param import Param

TransformScale = Callable[[jax.Array], jax.Array]


class RMSNorm(nnx.Module):
    """Normalises x / rms(x) * scale over the last dims, in float32; with `offset` the scale is 1 + weight (Gemma).

    `size` is that of the last dim, or the sizes of several dims that are normalised together, with their `names`.
    """

    def __init__(
        self,
        size: int | tuple[int, ...],
        *,
        epsilon: float,
        offset: bool = False,
        names: tuple[str | None, ...] = (None,),
        env: Env,
        rngs: nnx.Rngs,
    ):
        self.env, self.epsilon, self.offset = env, epsilon, offset
        shape = (size,) if isinstance(size, int) else size
        self.scale = env.param(rngs, names, shape, constant(0.0 if offset else 1.0), exact=True)

    def __call__(self, x: jax.Array, transform: TransformScale = lambda scale: scale) -> jax.Array:
        """Normalises x [..., *size] in its dtype; `transform` changes the scale (repeats it for copied heads)."""
        x_f32 = x.astype(jnp.float32)
        scale = transform(_exact(self.env, self.scale))
        dims = tuple(range(-scale.ndim, 0))
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), dims, keepdims=True) + self.epsilon)
        return (x_f32 * inverse * (1.0 + scale if self.offset else scale)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Normalises (x - mean) / deviation * scale + bias over the last dims, in float32; arguments as for `RMSNorm`."""

    def __init__(
        self,
        size: int | tuple[int, ...],
        *,
        epsilon: float,
        names: tuple[str | None, ...] = (None,),
        env: Env,
        rngs: nnx.Rngs,
    ):
        self.env, self.epsilon = env, epsilon
        shape = (size,) if isinstance(size, int) else size
        self.scale = env.param(rngs, names, shape, constant(1.0), exact=True)
        self.bias = env.param(rngs, names, shape, constant(0.0), exact=True)

    def __call__(self, x: jax.Array, transform: TransformScale = lambda scale: scale) -> jax.Array:
        """Normalises as `RMSNorm` does."""
        x_f32 = x.astype(jnp.float32)
        scale, bias = (transform(_exact(self.env, param)) for param in (self.scale, self.bias))
        dims = tuple(range(-scale.ndim, 0))
        x_f32 -= jnp.mean(x_f32, dims, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), dims, keepdims=True) + self.epsilon)
        return (x_f32 * inverse * scale + bias).astype(x.dtype)


def _exact(env: Env, param: Param) -> jax.Array:
    return env.sharder.gather_weight(param.get_value(), param.names, jnp.float32)
