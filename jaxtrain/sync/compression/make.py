"""The compression of a config."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxtrain.config.sections.sync import CompressConfig
from jaxtrain.sync.compression.compressor import Compressor, QuantizedBlocks
from jaxtrain.sync.compression.onebit_adam import OneBit
from jaxtrain.sync.compression.power_sgd import PowerSGD
from jaxtrain.sync.compression.top_k import TopK

OTHERS: dict[str, type[Compressor]] = {"powersgd": PowerSGD, "topk": TopK, "onebit_adam": OneBit}


def make_compressor(config: CompressConfig, replicas: int, mesh: Mesh, names: Any) -> Compressor:
    """Returns what compresses gradients.

    Args:
        config: section `sync.compress`.
        replicas: number of replicas.
        mesh: see `Compressor`.
        names: logical names of the dims of the parameters.
    """
    return OTHERS.get(config.gradients, QuantizedBlocks)(config, replicas, mesh, names)
