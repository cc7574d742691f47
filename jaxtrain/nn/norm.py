"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.env import Env, constant


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dims, in float32; `offset` stores the scale less one (Gemma).

    size: of the last dim; or sizes of several dims, normed together, with their logical `names`.
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

    def __call__(self, x: jax.Array, arranged: Callable[[jax.Array], jax.Array] = lambda scale: scale) -> jax.Array:
        """[..., *size] -> the same shape and dtype; `arranged` makes the scale that of an x whose heads are copied."""
        x_f32 = x.astype(jnp.float32)
        scale = arranged(self.env.sharder.weight(self.scale.get_value(), self.scale.names, jnp.float32))
        dims = tuple(range(-scale.ndim, 0))
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), dims, keepdims=True) + self.epsilon)
        return (x_f32 * inverse * (1.0 + scale if self.offset else scale)).astype(x.dtype)
