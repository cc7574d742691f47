"""Values that an island sends in few bits, with what was lost kept for the next time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtrain.islands.blocks import EncodedArray, decode_on_device, encode
from jaxtrain.islands.trees import Flat, Path
from jaxtrain.sharding.quantized_blocks import Bits
from jaxtrain.sync.compression.wire import on_each_device
from jaxtrain.sync.quantized_mean import is_sent_in_blocks


class ShardEncoder:
    """Encodes values on the devices of an island, each device its own shard, so that nothing is whole on one.

    Args:
        like: abstract arrays that are sent in few bits if they are large enough, with their shardings.
        bits: of a value.
    """

    def __init__(self, like: Flat, bits: Bits) -> None:
        self._bits = bits
        self._leaves: Mapping[Path, Any] = {
            path: leaf for path, leaf in like.items()
            if is_sent_in_blocks(leaf.shape, leaf.dtype, leaf.sharding.shard_shape(leaf.shape), bits)
        }  # fmt: skip

    def __call__(self, arrays: Flat, residual: Flat | None) -> tuple[Flat, Flat | None]:
        """Returns what travels, and the new residual: what was to be sent less what its readers decode.

        Args:
            arrays: values, and others, such as mutable variables, which travel as they are.
            residual: of the last time, float32 like the values; None: what is lost is lost.
        """
        paths = list(self._leaves)
        before = [] if residual is None else [residual[path] for path in paths]
        others = [x for path, x in arrays.items() if path not in self._leaves]
        messages, left = self._encode([arrays[path] for path in paths], before, others)
        encoded = {
            path: EncodedArray(message, self._leaves[path].sharding.shard_shape(arrays[path].shape)[-1], self._bits)
            for path, message in zip(paths, messages, strict=True)
        }
        return {**arrays, **encoded}, None if residual is None else {**residual, **dict(zip(paths, left, strict=True))}

    @cached_property
    def _encode(self) -> Any:
        """Returns (values, residuals, what travels as it is) -> (messages, residuals)."""
        leaves = list(self._leaves.values())

        def encode_all(values: list[Any], before: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
            totals = [x.astype(jnp.float32) for x in values]
            if before:
                totals = [x + residual for x, residual in zip(totals, before)]
            found = [self._on_devices(leaf)(total) for leaf, total in zip(leaves, totals)]
            messages, left = [message for message, _ in found], [rest for _, rest in found]
            # The readers leave out all that is sent if one number of it is not finite; nothing of it may stay here.
            is_finite = jnp.stack([jnp.isfinite(x).all() for x in (*left, *others, jnp.float32(0))]).all()
            left = [jnp.where(is_finite, rest, 0.0) for rest in left]
            placed = [jax.lax.with_sharding_constraint(rest, leaf.sharding) for rest, leaf in zip(left, leaves)]
            return messages, placed if before else []

        return jax.jit(encode_all)

    def _on_devices(self, leaf: Any) -> Any:
        spec = PartitionSpec(*leaf.sharding.spec, *[None] * (leaf.ndim - len(leaf.sharding.spec)))

        def own(total: jax.Array) -> tuple[jax.Array, jax.Array]:
            message = encode(total, self._bits)
            return message, total - decode_on_device(message, total.shape[-1], self._bits)

        return on_each_device(leaf.sharding.mesh, own, spec, (spec, spec))
