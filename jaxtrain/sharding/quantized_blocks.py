"""Blocks of values in 8, 4 or 2 bits or 1, with a scale each, and the bytes in which they travel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Bits = int | str
FP8 = "fp8"  # 8 bits, of which 4 are an exponent (e4m3): codes are closer near 0
HIGHEST: dict[Bits, float] = {8: 127.0, 4: 7.0, 2: 1.5, 1: 0.5, FP8: 448.0}  # largest code; integers are 1 apart
THREE = 1.0  # largest of three codes in 2 bits
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

    The gap is `scale`; of fp8 it is `scale` times 2^(e - 3) between codes of the exponent e, and 2^-9 around 0. In 2
    bits a block has the codes and the scale of least squared error, see `_encode_in_two_bits`; values beyond the
    largest code are given that. In 1 bit only signs are kept, and `scale` is twice the mean of the magnitudes, which
    stays that of the block.

    Args:
        x: blocks, float32 [..., values]; 8 / `bits` divides their number.
        bits: 8, 4, 2, 1 or "fp8". The codes of 1 are -0.5 and 0.5, those of 2 -1.5, -0.5, 0.5 and 1.5, or -1, 0 and 1;
            the others have a code for 0.

    Returns:
        codes, uint8 [..., values * bits / 8], and scales, float32 [...]; those of three codes in 2 bits are negative.
    """
    if bits == 2:
        return _encode_in_two_bits(x)
    offset, top = HIGHEST[bits], 2 * HIGHEST[bits]
    scale = (jnp.mean if bits == 1 else jnp.max)(jnp.abs(x), -1) / offset
    safe = jnp.where(scale > 0, scale, 1.0)[..., None]
    if bits == FP8:
        small = jnp.clip(x / safe, -HIGHEST[FP8], HIGHEST[FP8]).astype(jnp.float8_e4m3fn)
        return jax.lax.bitcast_convert_type(small, jnp.uint8), scale
    assert isinstance(bits, int)
    codes = jnp.clip(jnp.round(x / safe + offset), 0, top).astype(jnp.uint8)
    return _packed(codes, bits), scale


def _packed(codes: jax.Array, bits: int) -> jax.Array:
    """Returns the bytes of codes, uint8 [..., values] -> [..., values * bits / 8]."""
    per_byte = 8 // bits
    parts = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed = sum((parts[..., i] << (i * bits) for i in range(per_byte)), jnp.zeros((), jnp.uint8))
    return packed.astype(jnp.uint8)


def _encode_in_two_bits(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns packed codes and scales of blocks: four codes or three, whichever loses less.

    Four without 0 are best for values of one size, as most changes are: of normal values 0.117 of the square is lost,
    where codes up to the largest of 128 would lose 0.31. Three with 0 are best for blocks with few large values, such
    as what the others have left: they send these whole, so that residuals do not stay for many exchanges.

    Args:
        x: blocks, float32 [..., values].
    """
    largest = jnp.max(jnp.abs(x), -1)
    y = x / jnp.where(largest > 0, largest, 1.0)[..., None]  # so that squares are in range
    root = jnp.sqrt(jnp.mean(y * y, -1))
    four = _fitted(y, root, HIGHEST[2])
    three = [_fitted(y, first, THREE) for first in (1.2 * root, jnp.full_like(root, 0.75))]
    codes, scale, error = four[0], four[1], four[2]
    for other, other_scale, other_error in three:
        is_less = other_error < error
        codes = jnp.where(is_less[..., None], other, codes)
        scale, error = jnp.where(is_less, -other_scale, scale), jnp.minimum(error, other_error)
    return _packed(codes.astype(jnp.uint8), 2), scale * largest


def _fitted(y: jax.Array, scale: jax.Array, highest: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns codes, their scale and the squared error, after steps of Lloyd's method.

    A step gives each value its nearest code, and the codes the scale of least squared error (Lloyd 1982, "Least squares
    quantization in PCM").

    Args:
        y: blocks, float32 [..., values].
        scale: to begin with, float32 [...].
        highest: largest code; codes are 1 apart.
    """

    def numbers(scale: jax.Array) -> jax.Array:
        safe = jnp.where(scale > 0, scale, 1.0)[..., None]
        return jnp.clip(jnp.round(y / safe + highest), 0, 2 * highest) - highest

    for _ in range(2):
        codes = numbers(scale)
        square = jnp.sum(codes * codes, -1)
        scale = jnp.sum(y * codes, -1) / jnp.where(square > 0, square, 1.0)
    codes = numbers(scale)
    return codes + highest, scale, jnp.sum((y - codes * scale[..., None]) ** 2, -1)


def decode(codes: jax.Array, scale: jax.Array, bits: Bits) -> jax.Array:
    """Returns the values of codes, float32 [..., values]."""
    if bits == FP8:
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32) * scale[..., None]
    assert isinstance(bits, int)
    per_byte = 8 // bits
    if per_byte > 1:
        parts = jnp.stack([(codes >> (i * bits)) & (2**bits - 1) for i in range(per_byte)], -1)
        codes = parts.reshape(*codes.shape[:-1], -1)
    highest = jnp.where(scale < 0, THREE, HIGHEST[2])[..., None] if bits == 2 else HIGHEST[bits]
    return (codes.astype(jnp.float32) - highest) * jnp.abs(scale)[..., None]
