"""Replacement of initial values by those of a tree, a file or a module instance."""

from __future__ import annotations

from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from jaxtrain.config.sections.model import InitialWeightsConfig
from jaxtrain.core.state import State
from jaxtrain.errors import UserError
from jaxtrain.interop.weight_matching import StoredWeights, WeightMatch, match_weights


def replace_weights(
    variables: State, abstract: State, stored: StoredWeights, config: InitialWeightsConfig
) -> tuple[State, WeightMatch]:
    """Replaces the parameters and mutable variables that are stored.

    Args:
        variables: `params`, `frozen` and `mutable` of a state; the arrays that are replaced are deleted first.
        abstract: their shapes, dtypes and shardings; may hold more.
        stored: where the values are.
        config: names, and whether all of them must be there.

    Returns:
        the variables, and their match with the stored arrays.

    Raises:
        UserError: names or shapes differ and `config.strict` is set, or no variable is stored.
    """
    kinds = {kind: flatten_dict(abstract[kind], sep="/") for kind in variables}
    leaves: dict[str, Any] = {path: leaf for kind in kinds.values() for path, leaf in kind.items()}
    match = match_weights({path: leaf.shape for path, leaf in leaves.items()}, stored.shapes, config.names)
    if config.strict and match.text:
        raise UserError(
            f"model.weights: {stored.source}: {match.text}; expected the same, or model.weights.strict=false"
        )
    if not match.found:
        raise UserError(f"model.weights: {stored.source}: {match.text}; expected names that model.weights.names maps")
    values: dict[str, Any] = {}
    for kind in kinds:
        values |= flatten_dict(variables[kind], sep="/")
    for path in match.found:
        values[path].delete()  # frees its memory
    values |= stored.load(match.found, leaves)
    return {kind: unflatten_dict({p: values[p] for p in paths}, sep="/") for kind, paths in kinds.items()}, match
