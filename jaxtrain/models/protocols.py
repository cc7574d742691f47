"""Protocols of what a model can do beyond its loss. A model that has the methods of one gets the feature.

Every model has `loss(batch, key)`, which returns {term: (sum, weight)} or (terms, counts).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from jaxtrain.losses.terms import Terms


@runtime_checkable
class HasStages(Protocol):
    """Runs in pipeline stages. The three methods one after the other are `loss`.

    An optional attribute `layers_per_group` is the number of layers that must be in one stage; default: 1.
    """

    def embed_inputs(self, batch: dict[str, Any], key: jax.Array) -> Any:
        """Returns the input of the first layer, a pytree of arrays."""
        ...

    def run_layers(self, x: Any, batch: dict[str, Any], key: jax.Array, layers: Any = None) -> tuple[Any, Terms, Any]:
        """Runs the stacked layers that the stage holds. Returns the next input, the layers' own terms and counts.

        `layers` goes to `nn.stack.scan`; it tells which layers these are.
        """
        ...

    def head_loss(self, x: Any, batch: dict[str, Any], key: jax.Array) -> Terms:
        """Returns the terms that the output of the last layer gives."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """Computes metrics of a step from the counts that `loss` returned, summed over the global batch."""

    def metrics(self, counts: Any) -> Mapping[str, jax.Array]:
        """Returns {name: scalar}."""
        ...


@runtime_checkable
class CountsFlops(Protocol):
    """Counts the FLOPs of a train step, by a convention of its own."""

    def flops(self, shapes: dict[str, tuple[int, ...]]) -> float:
        """Returns the FLOPs of forward and backward pass on a global batch of these shapes."""
        ...
