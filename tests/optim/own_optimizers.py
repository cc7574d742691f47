"""Optimizers as users write them: a factored one, a Kronecker-factored one, one with scalars and a list of norms."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class RowsAndColumns(NamedTuple):
    rows: Any
    columns: Any


def factored(learning_rate: Any, decay: float = 0.9) -> optax.GradientTransformation:
    """Second moments of rows and columns, over the last two dims."""

    def init(params: Any) -> RowsAndColumns:
        rows = jax.tree.map(lambda p: jnp.zeros(p.shape[:-1]), params)
        return RowsAndColumns(rows, jax.tree.map(lambda p: jnp.zeros((*p.shape[:-2], *p.shape[-1:])), params))

    def update(grads: Any, state: RowsAndColumns, params: Any = None) -> tuple[Any, RowsAndColumns]:
        def one(g: jax.Array, row: jax.Array, column: jax.Array) -> tuple[jax.Array, ...]:
            square = jnp.square(g) + 1e-8
            row = decay * row + (1 - decay) * square.mean(-1)
            column = decay * column + (1 - decay) * (square.mean(-2) if g.ndim > 1 else square)
            scale = row[..., None] * (column[..., None, :] if g.ndim > 1 else column) / row.mean()
            return g / jnp.sqrt(scale), row, column

        out = jax.tree.map(one, grads, state.rows, state.columns)
        parts = [jax.tree.map(lambda g, o, i=i: o[i], grads, out) for i in range(3)]
        return jax.tree.map(lambda u: -learning_rate * u, parts[0]), RowsAndColumns(*parts[1:])

    return optax.GradientTransformation(init, update)


def kronecker(learning_rate: float, decay: float = 0.9) -> optax.GradientTransformation:
    """A preconditioner for each dim of a tensor (Gupta et al. 2018, arXiv 1802.09568)."""

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: [jnp.eye(size) for size in p.shape], params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def matrices(g: jax.Array, old: list[jax.Array]) -> list[jax.Array]:
            flat = [jnp.moveaxis(g, d, 0).reshape(g.shape[d], -1) for d in range(g.ndim)]
            return [decay * m + (1 - decay) * f @ f.T for m, f in zip(old, flat)]

        def precondition(g: jax.Array, factors: list[jax.Array]) -> jax.Array:
            for d, factor in enumerate(factors):
                values, vectors = jnp.linalg.eigh(factor)
                root = (vectors * jnp.maximum(values, 1e-6) ** (-0.5 / g.ndim)) @ vectors.T
                g = jnp.moveaxis(jnp.tensordot(root, g, (1, d)), 0, d)
            return g

        state = jax.tree.map(matrices, grads, state)
        return jax.tree.map(lambda g, f: -learning_rate * precondition(g, f), grads, state), state

    return optax.GradientTransformation(init, update)


class Norms(NamedTuple):
    count: Any
    norms: list[Any]  # of all tensors
    largest: Any


def norm_scaled(learning_rate: float) -> optax.GradientTransformation:
    """Divides each tensor by an average of its norm; a Python number, scalars, and a list that no tree names."""

    def init(params: Any) -> Norms:
        return Norms(0, [jnp.ones(()) for _ in jax.tree.leaves(params)], jnp.zeros(()))

    def update(grads: Any, state: Norms, params: Any = None) -> tuple[Any, Norms]:
        leaves, structure = jax.tree.flatten(grads)
        norms = [0.9 * old + 0.1 * jnp.linalg.norm(g) for old, g in zip(state.norms, leaves)]
        largest = jnp.maximum(state.largest, jnp.stack(norms).max())
        rate = learning_rate / (1 + state.count)
        scaled = [-rate * g / (norm + 0.1 * largest) for g, norm in zip(leaves, norms)]
        return structure.unflatten(scaled), Norms(state.count + 1, norms, largest)

    return optax.GradientTransformation(init, update)
