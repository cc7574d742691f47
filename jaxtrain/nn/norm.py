"""RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.nn.env import Env, constant


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, in float32; `offset` stores the scale less one (Gemma)."""

    def __init__(self, size: int, *, epsilon: float, offset: bool = False, env: Env, rngs: nnx.Rngs):
        self.env, self.epsilon, self.offset = env, epsilon, offset
        self.scale = env.param(rngs, (None,), (size,), constant(0.0 if offset else 1.0), exact=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> the same shape and dtype."""
        x_f32 = x.astype(jnp.float32)
        scale = self.env.sharder.weight(self.scale.get_value(), self.scale.names, jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x_f32), -1, keepdims=True) + self.epsilon)
        return (x_f32 * inverse * (1.0 + scale if self.offset else scale)).astype(x.dtype)
