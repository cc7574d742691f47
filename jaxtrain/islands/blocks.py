"""Tensors on their way in few bits: blocks along the last dim with a scale each, see `sharding.quantized_blocks`.

They are encoded by JAX, and decoded by NumPy for islands and servers alike: what both add up is then bitwise the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.sharding.quantized_blocks import FP8, HIGHEST, SCALE_BYTES, THREE, Bits, pack, unpack
from jaxtrain.sync.quantized_mean import row_blocks


class EncodedBlock(NamedTuple):
    """A block of a tensor in few bits.

    Attributes:
        message: uint8; its last dim has the bytes of a row.
        size: values of a row.
        bits: of a value.
    """

    message: np.ndarray
    size: int
    bits: Bits

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return self.message.nbytes

    def decode(self) -> np.ndarray:
        """Returns the values, float32."""
        return decode(self.message, self.size, self.bits)


class EncodedArray(NamedTuple):
    """A device array of which every device has encoded its shard.

    Attributes:
        message: uint8; each of its shards is that of the array.
        size: values in the last dim of a shard.
        bits: of a value.
    """

    message: jax.Array
    size: int
    bits: Bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        *dims, width = self.message.shape
        return (*dims, width // self.message.sharding.shard_shape(self.message.shape)[-1] * self.size)

    @property
    def dtype(self) -> Any:
        """Dtype of the values: float32."""
        return np.dtype(np.float32)

    @property
    def nbytes(self) -> int:
        """Number of bytes that travel."""
        return self.message.nbytes


def encode(x: jax.Array, bits: Bits) -> jax.Array:
    """Returns the message of values, float32 [..., values] -> uint8 [..., bytes]."""
    count, block = row_blocks(x.shape[-1], bits)
    filled = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count * block - x.shape[-1])])
    return pack(filled.reshape(*x.shape[:-1], count, block), bits).reshape(*x.shape[:-1], -1)


def decode_on_device(message: jax.Array, size: int, bits: Bits) -> jax.Array:
    """Reverses `encode`, to rounding as `decode` does."""
    count, _ = row_blocks(size, bits)
    blocks = unpack(message.reshape(*message.shape[:-1], count, -1), bits)
    return blocks.reshape(*message.shape[:-1], -1)[..., :size]


def decode(message: np.ndarray, size: int, bits: Bits) -> np.ndarray:
    """Returns the values of a message, float32 [..., size]."""
    count, _ = row_blocks(size, bits)
    blocks = message.reshape(*message.shape[:-1], count, -1)
    scale = np.ascontiguousarray(blocks[..., -SCALE_BYTES:]).view(np.float32)
    with np.errstate(invalid="ignore"):  # a push that is not finite is left out later
        values = _numbers(np.ascontiguousarray(blocks[..., :-SCALE_BYTES]), scale, bits) * np.abs(scale)
    return np.ascontiguousarray(values.reshape(*message.shape[:-1], -1)[..., :size])


def _numbers(codes: np.ndarray, scale: np.ndarray, bits: Bits) -> np.ndarray:
    """Returns codes as numbers in units of the scale, whose sign says which codes a block in 2 bits has; float32."""
    if bits == FP8:
        return codes.view(jnp.float8_e4m3fn).astype(np.float32)
    assert isinstance(bits, int)
    per_byte = 8 // bits
    if per_byte > 1:
        parts = [(codes >> (i * bits)) & (2**bits - 1) for i in range(per_byte)]
        codes = np.stack(parts, -1).reshape(*codes.shape[:-1], -1)
    highest = np.where(scale < 0, np.float32(THREE), np.float32(HIGHEST[2])) if bits == 2 else np.float32(HIGHEST[bits])
    return codes.astype(np.float32) - highest
