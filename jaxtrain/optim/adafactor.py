"""Adafactor's scaling (Shazeer and Stern 2018, arXiv 1804.04235) on stacked layers, each layer by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.optim.param_dims import Names, map_names, stacking

MIN_FACTORED = 128  # both dims must be at least this large


class Factored(NamedTuple):
    """count: int32 scalar. v_row, v_col, v: trees like the parameters, float32 moments.

    A factored parameter has `v_row` without its largest dim, `v_col` without its second largest and an unused `v`;
    any other has `v` in full and unused row and column. Unused ones have size 1 after the stacking dims.
    """

    count: Any
    v_row: Any
    v_col: Any
    v: Any


def factored_dims(shape: tuple[int, ...], minimum: int = MIN_FACTORED) -> tuple[int, int] | None:
    """(second largest, largest) dim of one unstacked parameter, or None when it is kept whole."""
    if len(shape) < 2:
        return None
    second, first = np.argsort(shape)[-2:]
    return (int(second), int(first)) if shape[second] >= minimum else None


def scale_by_adafactor(names: Any, *, minimum: int = MIN_FACTORED, threshold: float = 1.0):
    """Divides gradients by a factored root mean square, then limits the RMS of each update to `threshold`.

    optax's own arithmetic is applied to each layer: on a stacked [L, D, F] optax would factor over the layers when
    they are many, and take one RMS for all of them. No first moment is kept and the step does not scale with the
    parameter's own RMS, so that a learning rate means about what it means for Adam (as in Zhai et al. 2022,
    arXiv 2106.04560). The second moment decays by 1 - t^-0.8.

    Args:
        names: tree of logical-name tuples; leading `layers` and `expert` dims are stacked parameters.
        minimum: smaller dims are not factored.
        threshold: RMS at most of an update.
    """
    inner: Any = optax.scale_by_factored_rms(min_dim_size_to_factor=minimum)
    block = optax.clip_by_block_rms(threshold)

    def init_one(p: jax.Array) -> tuple[jax.Array, ...]:
        state = inner.init(p)
        return state.v_row, state.v_col, state.v

    def init(params: Any) -> Factored:
        rows, cols, full = _unzip(names, map_names(lambda n, p: stacked(init_one, stacking(n))(p), names, params))
        return Factored(jnp.zeros([], jnp.int32), rows, cols, full)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(g, row, col, v):
            scaled, new = inner.update(g, optax.FactoredState(state.count, row, col, v), g)
            scaled, _ = block.update(scaled, block.init(g))
            return scaled, new.v_row, new.v_col, new.v

        out = map_names(
            lambda n, *leaves: stacked(one, stacking(n))(*leaves), names, updates, state.v_row, state.v_col, state.v
        )
        scaled, rows, cols, full = _unzip(names, out)
        return scaled, Factored(optax.safe_increment(state.count), rows, cols, full)

    return optax.GradientTransformation(init, update)


def stacked(f: Callable[..., Any], dims: int) -> Callable[..., Any]:
    """`f` mapped over `dims` leading dims."""
    for _ in range(dims):
        f = jax.vmap(f)
    return f


def _unzip(names: Any, tree: Any) -> tuple[Any, ...]:
    """A tree of equal tuples as a tuple of trees; `names` gives the structure."""
    parts = zip(*jax.tree.structure(map_names(lambda n: 0, names)).flatten_up_to(tree))
    structure = jax.tree.structure(map_names(lambda n: 0, names))
    return tuple(structure.unflatten(part) for part in parts)


def reduced_names(names: Names, shape: tuple[int, ...], which: str, minimum: int = MIN_FACTORED) -> Names | None:
    """Logical names of `v_row`, `v_col` or `v` of a parameter; None where `which` is none of them."""
    lead = stacking(names)
    dims = factored_dims(shape[lead:], minimum)
    if which not in ("v_row", "v_col", "v"):
        return None
    if (which == "v") != (dims is None):
        return (*names[:lead], None)
    if dims is None:
        return names
    drop = lead + dims[1 if which == "v_row" else 0]
    return names[:drop] + names[drop + 1 :]
