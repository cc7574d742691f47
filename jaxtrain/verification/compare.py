"""Two observations compared, and a guess at what went wrong where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod, sqrt

import numpy as np

Flat = Mapping[str, np.ndarray]

LOSS, GRADIENT, UPDATE = 1e-5, 1e-5, 1e-3  # relative; an update divides by small numbers
# Of the median tensor's norm: a tensor with less is compared with this. A bias of keys has no gradient but roundings.
FLOOR = 1e-3
MATCH = 1e-3  # a broken gradient is explained by a cause to this, relative


@dataclass(frozen=True)
class Verdict:
    """Worst differences of one layout: relative, with the tensor's path; `first` is the first that is off."""

    loss: float
    gradient: float
    tensor: str
    update: float
    first: str | None
    cause: str = ""

    @property
    def is_equal(self) -> bool:
        """True if all differences are those of float32 rounding."""
        return self.first is None


def differences(got: Flat, want: Flat) -> dict[str, float]:
    """Path -> ||got - want|| / ||want||; infinite where it is not finite."""
    floor = FLOOR * float(np.median([np.linalg.norm(value) for value in want.values()]))
    found = {}
    for path, value in want.items():
        off = float(np.linalg.norm(got[path] - value)) / max(float(np.linalg.norm(value)), floor, 1e-30)
        found[path] = off if np.isfinite(off) else float("inf")
    return found


def norm(tree: Flat) -> float:
    """The global norm."""
    return sqrt(sum(float(np.sum(value**2)) for value in tree.values()))


def compare(
    losses: tuple[list[float], list[float]], gradients: tuple[Flat, Flat], updates: tuple[Flat, Flat]
) -> Verdict:
    """The verdict on (got, want) pairs. Tensors are taken in the model's order; a loss comes before them."""
    off = [abs(a / b - 1) if np.isfinite(a) else float("inf") for a, b in zip(*losses)]
    by_gradient, by_update = differences(*gradients), differences(*updates)
    tensor = max(by_gradient, key=lambda path: by_gradient[path])
    wrong = [path for path, value in by_gradient.items() if value > GRADIENT]
    wrong += [f"the update of {path}" for path, value in by_update.items() if value > UPDATE]
    wrong += [f"the loss of step {step}" for step, value in enumerate(off) if value > LOSS]
    first = wrong[0] if wrong else None
    return Verdict(max(off), by_gradient[tensor], tensor, max(by_update.values()), first)


def cause(got: Flat, want: Flat, variants: Mapping[str, Flat], sizes: Mapping[str, int]) -> str:
    """Returns an explanation of wrong gradients: a variant of the reference that they equal, or a tensor counted twice.

    Args:
        got, want: gradients by path.
        variants: name of a fault -> the gradients one device gives with it.
        sizes: of the mesh axes, to name the one that a factor points to.
    """
    for name, variant in variants.items():
        difference = norm({path: got[path] - value for path, value in variant.items()})
        if difference <= MATCH * norm(variant) and norm({p: variant[p] - want[p] for p in want}) > MATCH * norm(want):
            return name
    for path, value in want.items():
        square = float(np.sum(value**2))
        if square == 0 or np.allclose(got[path], value, rtol=GRADIENT, atol=GRADIENT * sqrt(square)):
            continue
        factor = float(np.sum(got[path] * value)) / square
        if np.linalg.norm(got[path] - factor * value) > MATCH * sqrt(square):
            return ""
        return f"{path} is {factor:.4g} times the reference{_axis(factor, sizes)}"
    return ""


def _axis(factor: float, sizes: Mapping[str, int]) -> str:
    """The axes whose size a factor is."""
    real = [axis for axis, size in sizes.items() if size > 1]
    for count in range(1, len(real) + 1):
        for axes in combinations(real, count):
            size = prod(sizes[axis] for axis in axes)
            if abs(factor / size - 1) < MATCH:
                return f": summed {size} times, over {' x '.join(axes)}?"
            if abs(factor * size - 1) < MATCH:
                return f": divided by {size}, over {' x '.join(axes)}?"
    return ""
