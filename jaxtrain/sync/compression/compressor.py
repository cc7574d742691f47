"""Means over replicas that travel compressed: the protocol, and the one in blocks of 8, 4 or 2 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtrain.config.sections.sync import CompressConfig
from jaxtrain.sync.compression.wire import inner_devices
from jaxtrain.sync.quantized_mean import (
    BITS,
    Bits,
    Residuals,
    initial_residuals,
    quantized_mean,
    sent_bytes,
    server_specs,
)

Tree = Any


class Compressor(ABC):
    """A mean over replicas of which less travels than the values.

    Attributes:
        config: section `sync.compress`.
        replicas: number of replicas; that of the mesh, or of a state that is read only.
        mesh: its axis `replica` has the replicas, or `data` if that is 1.
        names: logical names of the dims of the tensors.
        inner: devices of a replica.
    """

    def __init__(self, config: CompressConfig, replicas: int, mesh: Mesh, names: Tree) -> None:
        self.config, self.replicas, self.mesh, self.names = config, replicas, mesh, names
        self.inner = inner_devices(mesh)

    @abstractmethod
    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns what is kept from one mean to the next, such as what was not sent yet, for tensors like `params`."""

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns PartitionSpecs of trees that `init` returns, by name, as `Strategy.specs` does: by default none."""
        return {}

    @abstractmethod
    def mean(self, own: dict[str, Tree], x: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (what is kept, the mean as all replicas receive it, without a replica dim).

        Args:
            own: what is kept.
            x: float32 [replicas, ...].
        """

    @abstractmethod
    def sent_bytes(self, params: Tree) -> int:
        """Returns the bytes that each replica sends for a mean of tensors with these shapes."""

    def zeros(self, params: Tree) -> Tree:
        """Returns float32 zeros for each replica, [replicas, ...]."""
        return jax.tree.map(lambda p: jnp.zeros((self.replicas, *p.shape), jnp.float32), params)


class QuantizedBlocks(Compressor):
    """`int8`, `fp8`, `int4`, `int2`: see `sync.quantized_mean`."""

    def init(self, params: Tree) -> dict[str, Tree]:
        """Returns residuals of the workers and the servers, with error feedback."""
        return initial_residuals(params, self.replicas, self._bits)._asdict() if self.config.error_feedback else {}

    def specs(self, params: Tree) -> dict[str, Tree]:
        """Returns those of the servers' residuals."""
        return {"server": server_specs(params, self.replicas, self._bits, self.mesh)}

    def mean(self, own: dict[str, Tree], x: Tree) -> tuple[dict[str, Tree], Tree]:
        """Returns (residuals, mean)."""
        mean, after = quantized_mean(x, Residuals(**own) if own else None, self._bits, self.mesh)
        return {} if after is None else after._asdict(), mean

    def sent_bytes(self, params: Tree) -> int:
        """Returns the bytes of codes, scales, and what is not quantised."""
        return sent_bytes(params, self._bits, self.replicas, self.inner)

    @property
    def _bits(self) -> Bits:
        return BITS[self.config.gradients]
