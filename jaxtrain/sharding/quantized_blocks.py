"""Blocks of values in 8, 4 or 2 bits or 1, with a scale each, and the bytes in which they travel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Bits = int | str
FP8 = "fp8"  # 8 bits, of which 4 are an exponent (e4m3): codes are closer near 0
HIGHEST: dict[Bits, float] = {8: 127.0, 4: 7.0, 2: 1.5, 1: 0.5, FP8: 448.0}  # largest code; integers are 1 apart
SCALE_BYTES = 4


def pack(x: jax.Array, bits: Bits) -> jax.Array:
    """Returns the codes of blocks and the bytes of their scales: [..., values] -> uint8 [..., bytes]."""
    codes, scale = encode(x, bits)
    return jnp.concatenate([codes, jax.lax.bitcast_convert_type(scale, jnp.uint8)], -1)


def unpack(packed: jax.Array, bits: Bits) -> jax.Array:
    """Returns the values of packed blocks, float32 [..., values]."""
    codes, scale = jax.lax.split(packed, (packed.shape[-1] - SCALE_BYTES, SCALE_BYTES), axis=packed.ndim - 1)
    return decode(codes, jax.lax.bitcast_convert_type(scale, jnp.float32), bits)


def encode(x: jax.Array, bits: Bits) -> tuple[jax.Array, jax.Array]:
    """Quantises blocks by their largest value: the error is at most half the gap between two codes.

    The gap is `scale`; of fp8 it is `scale` times 2^(e - 3) between codes of the exponent e, and 2^-9 around 0. In 1
    bit only signs are kept, and `scale` is twice the mean of the magnitudes, which stays that of the block.

    Args:
        x: blocks, float32 [..., values]; 8 / `bits` divides their number.
        bits: 8, 4, 2, 1 or "fp8". The four codes of 2 are -1.5, -0.5, 0.5 and 1.5, those of 1 are -0.5 and 0.5; the
            others have a code for 0.

    Returns:
        codes, uint8 [..., values * bits / 8], and scales, float32 [...].
    """
    offset, top = HIGHEST[bits], 2 * HIGHEST[bits]
    scale = (jnp.mean if bits == 1 else jnp.max)(jnp.abs(x), -1) / offset
    safe = jnp.where(scale > 0, scale, 1.0)[..., None]
    if bits == FP8:
        small = jnp.clip(x / safe, -HIGHEST[FP8], HIGHEST[FP8]).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(small, jnp.uint8), scale
    assert isinstance(bits, int)
    codes = jnp.clip(jnp.round(x / safe + offset), 0, top).astype(jnp.uint8)
    per_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = sum((parts[..., i] << (i * bits) for i in range(per_byte)), jnp.zeros((), jnp.uint8))
    return packed.astype(jnp.uint8), scale


def decode(codes: jax.Array, scale: jax.Array, bits: Bits) -> jax.Array:
    """Returns the values of codes, float32 [..., values]."""
    if bits == FP8:
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * scale[..., None]
    assert isinstance(bits, int)
    per_byte = 8 // bits
    if per_byte > 1:
        parts = jnp.stack([(codes >> (i * bits)) & (2**bits - 1) for i in range(per_byte)], -1)
        codes = parts.reshape(*codes.shape[:-1], -1)
    return (codes.astype(jnp.float32) - HIGHEST[bits]) * scale[..., None]
