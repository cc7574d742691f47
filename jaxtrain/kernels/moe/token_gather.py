"""Permutation of tokens to rows of the experts and back: gathers in both directions, so no gradient is a scatter-add.

Scatter-adds of bfloat16 are slow, and on a GPU not deterministic. Here every row has one source and every choice one
row, so each map is a gather, and its transpose is a gather with the inverse map.
Shapes: T tokens, K choices of a token, A = T K choices, R rows, D embed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class RowMap(NamedTuple):
    """A partial one-to-one map between choices and rows.

    Attributes:
        row_A: int32 row of every choice; R for none.
        choice_R: int32 choice of every row; A if it is empty.
    """

    row_A: Array
    choice_R: Array


def row_map(row_A: Array, rows: int) -> RowMap:
    """Returns the map with its inverse; rows outside of [0, rows) are none."""
    A = row_A.shape[0]
    row_A = jnp.where((row_A >= 0) & (row_A < rows), row_A, rows).astype(jnp.int32)
    choice_R = jnp.full((rows,), A, jnp.int32).at[row_A].set(jnp.arange(A, dtype=jnp.int32), mode="drop")
    return RowMap(row_A, choice_R)


def rows_at(x: Array, index: Array) -> Array:
    """Returns x[index], zeros where the index is out of range."""
    return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def dispatch(x_TD: Array, rows: RowMap) -> Array:
    """Returns [R, D]: the token of every row, zeros in empty rows."""
    choices = rows.row_A.shape[0] // x_TD.shape[0]
    return rows_at(x_TD, rows.choice_R // choices)


def _dispatch_fwd(x_TD, rows):
    return dispatch(x_TD, rows), (rows, jnp.zeros((x_TD.shape[0], 0), x_TD.dtype))


def _dispatch_bwd(residuals, g_RD):
    rows, like_T0 = residuals
    g_TKD = rows_at(g_RD, rows.row_A).reshape(like_T0.shape[0], -1, g_RD.shape[-1])
    return g_TKD.astype(jnp.float32).sum(1).astype(like_T0.dtype), None


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def combine(y_RD: Array, gate_TK: Array, rows: RowMap) -> Array:
    """Returns [T, D] in the dtype of `y_RD`: the float32 sum of the rows of each token's choices times their gates."""
    y_TKD = rows_at(y_RD, rows.row_A).reshape(*gate_TK.shape, -1)
    return jnp.sum(y_TKD.astype(jnp.float32) * gate_TK[..., None], 1).astype(y_RD.dtype)


def _combine_fwd(y_RD, gate_TK, rows):
    return combine(y_RD, gate_TK, rows), (y_RD, gate_TK, rows)


def _combine_bwd(residuals, g_TD):
    y_RD, gate_TK, rows = residuals
    gate_R = rows_at(gate_TK.reshape(-1), rows.choice_R)
    from_token_RD = rows_at(g_TD, rows.choice_R // gate_TK.shape[1])
    g_RD = (from_token_RD.astype(jnp.float32) * gate_R[:, None]).astype(y_RD.dtype)
    y_TKD = rows_at(y_RD, rows.row_A).reshape(*gate_TK.shape, -1)
    return g_RD, jnp.sum(y_TKD.astype(jnp.float32) * g_TD[:, None].astype(jnp.float32), -1), None


combine.defvjp(_combine_fwd, _combine_bwd)
