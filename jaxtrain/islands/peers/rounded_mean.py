"""The part of a mean that an island has summed, as it travels: in the format in which the values came."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.islands.blocks import EncodedArray, EncodedBlock, encode
from jaxtrain.islands.trees import Flat, Path
from jaxtrain.sharding.quantized_blocks import Bits

LOST = "lost"  # first name of what is lost in the message of an island to its own processes


class RoundedMean(NamedTuple):
    """A mean in few bits.

    Attributes:
        message: what the islands read: float32, or in few bits.
        lost: the mean less what they decode, of the latter; float32.
    """

    message: dict[Path, np.ndarray | EncodedBlock]
    lost: Flat


def rounded_mean(mean: Flat, arrays: Mapping[Path, Any]) -> RoundedMean:
    """Returns a mean in the formats of the arrays of which it is one, float32 [rows, ...] of each."""
    message: dict[Path, np.ndarray | EncodedBlock] = dict(mean)
    lost: Flat = {}
    for path, x in mean.items():
        if isinstance(array := arrays.get(path), EncodedArray):
            block = message[path] = EncodedBlock(np.asarray(_encode(x, array.bits)), x.shape[-1], array.bits)
            lost[path] = x - block.decode()
    return RoundedMean(message, lost)


@partial(jax.jit, static_argnums=1)
def _encode(x: jax.Array, bits: Bits) -> jax.Array:
    return encode(x, bits)
