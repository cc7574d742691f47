"""Moving rows to the experts and back: gathers in both directions, so that no gradient is a scatter-add.

Scatter-adds of bfloat16 are slow, and on a GPU they add up in an order that changes from run to run. Here every row
has one source and every choice one place, so each map is a gather, and its transpose is a gather with the other map.
Shapes: T tokens, K choices of a token, A = T K choices, R rows, D embed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Places(NamedTuple):
    """A partial one-to-one map between choices and rows.

    row_A: int32 row of every choice; R where it has none.
    choice_R: int32 choice of every row; A where it is empty.
    """

    row_A: Array
    choice_R: Array


def places_of(row_A: Array, rows: int) -> Places:
    """The map with its inverse; rows outside of [0, rows) are none."""
    A = row_A.shape[0]
    row_A = jnp.where((row_A >= 0) & (row_A < rows), row_A, rows).astype(jnp.int32)
    choice_R = jnp.full((rows,), A, jnp.int32).at[row_A].set(jnp.arange(A, dtype=jnp.int32), mode="drop")
    return Places(row_A, choice_R)


def rows_at(x: Array, index: Array) -> Array:
    """x[index], zeros where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x_TD: Array, places: Places) -> Array:
    """[R, D]: the token of every row, zeros in empty rows."""
    choices = places.row_A.shape[0] // x_TD.shape[0]
    return rows_at(x_TD, places.choice_R // choices)


def _dispatch_fwd(x_TD, places):
    return dispatch(x_TD, places), (places, jnp.zeros((x_TD.shape[0], 0), x_TD.dtype))


def _dispatch_bwd(residuals, g_RD):
    places, like_T0 = residuals
    g_TKD = rows_at(g_RD, places.row_A).reshape(like_T0.shape[0], -1, g_RD.shape[-1])
    return g_TKD.astype(jnp.float32).sum(1).astype(like_T0.dtype), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine(y_RD: Array, gate_TK: Array, places: Places) -> Array:
    """[T, D]: the rows of each token's choices times their gates, added up in float32, in the dtype of `y_RD`."""
    y_TKD = rows_at(y_RD, places.row_A).reshape(*gate_TK.shape, -1)
    return jnp.sum(y_TKD.astype(jnp.float32) * gate_TK[..., None], 1).astype(y_RD.dtype)


def _combine_fwd(y_RD, gate_TK, places):
    return combine(y_RD, gate_TK, places), (y_RD, gate_TK, places)


def _combine_bwd(residuals, g_TD):
    y_RD, gate_TK, places = residuals
    gate_R = rows_at(gate_TK.reshape(-1), places.choice_R)
    from_token_RD = rows_at(g_TD, places.choice_R // gate_TK.shape[1])
    g_RD = (from_token_RD.astype(jnp.float32) * gate_R[:, None]).astype(y_RD.dtype)
    y_TKD = rows_at(y_RD, places.row_A).reshape(*gate_TK.shape, -1)
    return g_RD, jnp.sum(y_TKD.astype(jnp.float32) * g_TD[:, None].astype(jnp.float32), -1), None


combine.defvjp(_combine_fwd, _combine_bwd)
