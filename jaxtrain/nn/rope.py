"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), in the half-split form of Hugging Face models."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config.sections.model import RopeScalingConfig


def frequencies(head_dim: int, theta: float, scaling: RopeScalingConfig | None) -> np.ndarray:
    """Returns angular frequencies [head_dim / 2] in radians per token, float64.

    `llama3` scaling keeps high frequencies, divides low ones by `factor` and interpolates between them, as the
    reference implementation of Llama 3.1 does.
    """
    inverse = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return inverse
    if scaling.type == "linear":
        return inverse / scaling.factor
    wavelength = 2 * math.pi / inverse
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = np.clip((scaling.original_length / wavelength - low) / (high - low), 0.0, 1.0)
    return (1 - blend) * inverse / scaling.factor + blend * inverse


def rotation(positions_BT: jax.Array, frequencies_K: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine [B, T, 1, K] in float32 of every position and frequency."""
    angle = positions_BT[:, :, None, None].astype(jnp.float32) * jnp.asarray(frequencies_K, jnp.float32)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHD: jax.Array, cos_BT1K: jax.Array, sin_BT1K: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + D/2) of each head in float32. Returns the same shape and dtype."""
    first, second = jnp.split(x_BTHD.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos_BT1K - second * sin_BT1K, second * cos_BT1K + first * sin_BT1K)
    return jnp.concatenate(rotated, -1).astype(x_BTHD.dtype)
