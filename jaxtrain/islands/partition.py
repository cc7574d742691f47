"""Parts of the parameters that each server holds: equal shares of their bytes, in whole tensors and whole layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.islands.trees import Path

STACKED = "layers"  # logical name of the dim of stacked layers, see `nn.stack`


class Spec(NamedTuple):
    """Shape, dtype and logical names of a tensor."""

    shape: tuple[int, ...]
    dtype: Any
    names: tuple[str | None, ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class Part(NamedTuple):
    """A tensor, or some layers of a stack.

    Attributes:
        start: first layer; None: the whole tensor.
        stop: layer after the last one.
    """

    start: int | None = None
    stop: int | None = None

    @property
    def layers(self) -> slice:
        """The layers as a slice of the first dim."""
        return slice(self.start, self.stop)

    def spec(self, whole: Spec) -> Spec:
        """Returns the shape of the part."""
        if self.start is None or self.stop is None:
            return whole
        return whole._replace(shape=(self.stop - self.start, *whole.shape[1:]))


Parts = dict[Path, Part]


def partition(specs: Mapping[Path, Spec], servers: int) -> list[Parts]:
    """Returns what each server holds: the sequence of tensors and layers, cut where the shares of bytes end.

    What is not cut are tensors and layers, so that optimizers that reduce over one see all of it. So a server holds at
    most one range of the layers of a stack. Some hold nothing if there are fewer tensors than servers.
    """
    total = sum(spec.nbytes for spec in specs.values())
    shares: list[Parts] = [{} for _ in range(servers)]
    done = 0
    for path, layer, nbytes in _units(specs):
        middle = done + nbytes / 2
        share = shares[min(int(middle * servers / max(total, 1)), servers - 1)]
        done += nbytes
        if layer is None:
            share[path] = Part()
        else:
            start = share[path].start if path in share else layer
            share[path] = Part(start, layer + 1)
    return shares


def _units(specs: Mapping[Path, Spec]) -> Iterator[tuple[Path, int | None, int]]:
    """Yields (path, layer or None, bytes) of all that is not cut."""
    for path, spec in specs.items():
        if not spec.names or spec.names[0] != STACKED or spec.shape[0] == 0:
            yield path, None, spec.nbytes
            continue
        layers = spec.shape[0]
        for layer in range(layers):
            yield path, layer, spec.nbytes // layers
