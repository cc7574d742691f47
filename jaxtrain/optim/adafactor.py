"""Adafactor (Shazeer and Stern 2018, arXiv 1804.04235) for stacked layers, applied to each layer separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.param_dims import Names, map_names, num_stacked_dims

MIN_FACTORED = 128  # both dims must be at least this large


class FactoredMoments(NamedTuple):
    """State of `scale_by_adafactor`: second moments, in trees like the parameters, float32.

    A factored parameter has `v_row` without its largest dim, `v_col` without its second largest and an unused `v`;
    any other has a full `v` and an unused row and column. Unused ones have size 1 after the stacked dims.

    Attributes:
        count: int32 scalar, number of updates.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any


def factored_dims(shape: tuple[int, ...], minimum: int = MIN_FACTORED) -> tuple[int, int] | None:
    """Returns the (second largest, largest) dim of one unstacked parameter, or None if it is not factored."""
    if len(shape) < 2:
        return None
    second, first = np.argsort(shape)[-2:]
    return (int(second), int(first)) if shape[second] >= minimum else None


def scale_by_adafactor(names: Any, *, minimum: int = MIN_FACTORED, threshold: float = 1.0):
    """Divides gradients by a factored root mean square, then limits the RMS of each update to `threshold`.

    optax's transformations are applied to each layer: on a stacked [L, D, F] optax would factor over the layers if
    there are many, and take one RMS for all of them. There is no first moment, and the step does not scale with the RMS
    of the parameter, so that learning rates are similar to those of Adam (as in Zhai et al. 2022, arXiv 2106.04560).
    The second moment decays by 1 - t^-0.8.

    Args:
        names: tree of tuples of logical names; leading `layers` and `expert` dims stack parameters.
        minimum: smaller dims are not factored.
        threshold: largest RMS of an update.
    """
    rms: Any = optax.scale_by_factored_rms(min_dim_size_to_factor=minimum)
    clip: Any = optax.clip_by_block_rms(threshold)

    def init_one(p: jax.Array) -> tuple[jax.Array, ...]:
        state = rms.init(p)
        return state.v_row, state.v_col, state.v

    def init(params: Any) -> FactoredMoments:
        rows, cols, full = _unzip(
            names, map_names(lambda n, p: vmap_leading(init_one, num_stacked_dims(n))(p), names, params)
        )
        return FactoredMoments(jnp.zeros([], jnp.int32), rows, cols, full)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def update_one(g, row, col, v):
            scaled, new = rms.update(g, optax.FactoredState(state.count, row, col, v), g)
            scaled, _ = clip.update(scaled, clip.init(g))
            return scaled, new.v_row, new.v_col, new.v

        def update_stacked(n: Names, *leaves: jax.Array) -> Any:
            return vmap_leading(update_one, num_stacked_dims(n))(*leaves)

        out = map_names(update_stacked, names, updates, state.v_row, state.v_col, state.v)
        scaled, rows, cols, full = _unzip(names, out)
        return scaled, FactoredMoments(optax.safe_increment(state.count), rows, cols, full)

    return optax.GradientTransformation(init, update)


def vmap_leading(f: Callable[..., Any], dims: int) -> Callable[..., Any]:
    """Returns `f` mapped over `dims` leading dims."""
    for _ in range(dims):
        f = jax.vmap(f)
    return f


def _unzip(names: Any, tree: Any) -> tuple[Any, ...]:
    """Returns a tree of tuples as a tuple of trees; `names` gives the structure."""
    structure = jax.tree.structure(map_names(lambda n: 0, names))
    return tuple(structure.unflatten(part) for part in zip(*structure.flatten_up_to(tree)))


def factored_names(names: Names, shape: tuple[int, ...], field: str, minimum: int = MIN_FACTORED) -> Names | None:
    """Returns the logical names of `v_row`, `v_col` or `v` of a parameter; None if `field` is none of them."""
    stacked = num_stacked_dims(names)
    dims = factored_dims(shape[stacked:], minimum)
    if field not in ("v_row", "v_col", "v"):
        return None
    if (field == "v") != (dims is None):
        return (*names[:stacked], None)
    if dims is None:
        return names
    drop = stacked + dims[1 if field == "v_row" else 0]
    return names[:drop] + names[drop + 1 :]
