"""Comparison of two recordings, and a diagnosis of wrong gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from math import prod, sqrt

import numpy as np

from jaxtrain.errors import join_words

Flat = dict[str, np.ndarray]  # by path

LOSS, GRADIENT, UPDATE = 1e-5, 1e-5, 1e-3  # relative limits; an update divides by small numbers
# Fractions of the median tensor's norm: tensors below FLOOR are compared with it. Gradients below ROUNDING on both
# sides hold rounding errors alone and are not compared, such as that of the bias of keys, which softmax does not see.
FLOOR, ROUNDING = 1e-3, 1e-6
# Of replicas whose exchanges are rounded to few bits: a difference in the last bit may become one of a code.
LOSS_ROUNDED, UPDATE_ROUNDED = 1e-3, 0.05
MATCH = 1e-3  # relative difference up to which a fault explains a wrong gradient


@dataclass(frozen=True)
class Recording:
    """Result of some training steps.

    Args:
        losses: one per step.
        gradients, updates: of step 0, by path, float64.
        text: of the compiled program.
        mutable: the model's mutable variables after step 0, by path, float64.
    """

    losses: list[float]
    gradients: Flat
    updates: Flat
    text: str
    mutable: Flat = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Worst relative differences of one layout.

    Args:
        loss, gradient, update: worst differences; gradient is NaN where none was compared.
        tensor: path of the tensor with the worst gradient.
        first: the first loss, gradient, update or mutable variable that differs; None if all are equal.
        cause: diagnosis; empty if unknown.
    """

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


def relative_differences(actual: Flat, expected: Flat) -> dict[str, float]:
    """Path -> ||actual - expected|| / ||expected||; infinite if it is not finite."""
    floor = FLOOR * float(np.median([np.linalg.norm(value) for value in expected.values()]))
    differences = {}
    for path, value in expected.items():
        scale = max(float(np.linalg.norm(value)), floor, 1e-30)
        difference = float(np.linalg.norm(actual[path] - value)) / scale
        differences[path] = difference if np.isfinite(difference) else float("inf")
    return differences


def _without_rounding(actual: Flat, expected: Flat) -> list[str]:
    """Returns the paths of gradients that hold more than rounding errors."""
    limit = ROUNDING * float(np.median([np.linalg.norm(value) for value in expected.values()]))
    norms = {path: max(np.linalg.norm(actual[path]), np.linalg.norm(value)) for path, value in expected.items()}
    return [path for path, norm in norms.items() if not norm <= limit] or list(expected)


def global_norm(tree: Flat) -> float:
    """Global norm of a tree of arrays."""
    return sqrt(sum(float(np.sum(value**2)) for value in tree.values()))


def compare(actual: Recording, expected: Recording) -> Verdict:
    """Compares two recordings; tensors are in the order of the model."""
    by_step = _loss_differences(actual, expected)
    compared = _without_rounding(actual.gradients, expected.gradients)
    by_gradient = relative_differences(actual.gradients, {path: expected.gradients[path] for path in compared})
    by_update = relative_differences(actual.updates, {path: expected.updates[path] for path in compared})
    tensor = max(by_gradient, key=lambda path: by_gradient[path])
    wrong = [path for path, value in by_gradient.items() if value > GRADIENT]
    by_variable = relative_differences(actual.mutable, expected.mutable) if expected.mutable else {}
    wrong += [f"the variable {path}" for path, value in by_variable.items() if value > GRADIENT]
    wrong += [f"the update of {path}" for path, value in by_update.items() if value > UPDATE]
    wrong += [f"the loss of step {step}" for step, value in enumerate(by_step) if value > LOSS]
    return Verdict(max(by_step), by_gradient[tensor], tensor, max(by_update.values()), wrong[0] if wrong else None)


def compare_runs(actual: Recording, expected: Recording, is_rounded: bool) -> Verdict:
    """Compares two recordings by their losses and the updates of a whole run, without gradients.

    Args:
        actual, expected: the recordings.
        is_rounded: exchanges are rounded to few bits.
    """
    loss_limit, update_limit = (LOSS_ROUNDED, UPDATE_ROUNDED) if is_rounded else (LOSS, UPDATE)
    by_step = _loss_differences(actual, expected)
    by_update = relative_differences(actual.updates, expected.updates)
    tensor = max(by_update, key=lambda path: by_update[path])
    wrong = [f"the loss of step {step}" for step, value in enumerate(by_step) if value > loss_limit]
    wrong += [f"the update of {path}" for path, value in by_update.items() if value > update_limit]
    return Verdict(max(by_step), float("nan"), tensor, by_update[tensor], wrong[0] if wrong else None)


def _loss_differences(actual: Recording, expected: Recording) -> list[float]:
    """Returns the relative difference of each step's loss; infinite if it is not finite."""
    return [abs(a / b - 1) if np.isfinite(a) else float("inf") for a, b in zip(actual.losses, expected.losses)]


def diagnose(actual: Flat, expected: Flat, variants: Mapping[str, Flat], sizes: Mapping[str, int]) -> str:
    """Diagnoses wrong gradients: a fault that gives the same ones, or a tensor summed too often; else empty.

    Args:
        actual: gradients by path.
        expected: gradients of one device.
        variants: fault -> gradients of one device with it.
        sizes: of the mesh axes, to name the axis of a factor.
    """
    for fault, variant in variants.items():
        difference = global_norm({path: actual[path] - value for path, value in variant.items()})
        change = global_norm({path: variant[path] - expected[path] for path in expected})
        if difference <= MATCH * global_norm(variant) and change > MATCH * global_norm(expected):
            return fault
    for path, value in expected.items():
        square = float(np.sum(value**2))
        if square == 0 or np.allclose(actual[path], value, rtol=GRADIENT, atol=GRADIENT * sqrt(square)):
            continue
        factor = float(np.sum(actual[path] * value)) / square
        if np.linalg.norm(actual[path] - factor * value) > MATCH * sqrt(square):
            return ""
        return f"{path} is {factor:.4g} times the reference{_explain_factor(factor, sizes)}"
    return ""


def _explain_factor(factor: float, sizes: Mapping[str, int]) -> str:
    """Names the axes whose size equals a factor: all that may be it, of the fewest at a time."""
    axes = [axis for axis, size in sizes.items() if size > 1]
    for count in range(1, len(axes) + 1):
        products = {names: prod(sizes[axis] for axis in names) for names in combinations(axes, count)}
        for power, words in ((1, "summed {} times"), (-1, "divided by {}")):
            found = [names for names, size in products.items() if abs(factor / size**power - 1) < MATCH]
            if found:
                over = join_words(" x ".join(names) for names in found)
                return f": {words.format(products[found[0]])}, over {over}?"
    return ""
