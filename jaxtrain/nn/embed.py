"""Token embedding on a table sharded over vocabulary and width."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.mesh.rules import BATCH, CONTEXT, SEQUENCE
from jaxtrain.nn.env import Env, normal


class Embed(nnx.Module):
    """Looks rows up where they are stored and moves the rows, not the table.

    The table is never gathered: each shard looks up its part of the width for the tokens of its whole group (of the
    axes that shard the width), then all-to-alls hand every device its own rows in full width.
    """

    def __init__(self, vocab: int, embed: int, *, std: float, env: Env, rngs: nnx.Rngs):
        self.env = env
        self.table = env.param(rngs, ("vocab", "embed"), (vocab, embed), normal(std))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """int32 tokens [B, T] -> rows [B, T, D] in the compute dtype, on the residual stream's placement."""
        sharder = self.env.sharder
        width, sequence = sharder.axes("embed"), sharder.axes(SEQUENCE)
        outer, inner = _split(sequence, width)
        # float32 until the rows are out: the gradient adds up thousands of rows of a frequent token.
        table = sharder.weight(self.table.get_value(), self.table.names, jnp.float32, gather=False)
        # Tokens as [B, outer shards, rest], so that the outer axes can come to the sequence after the inner ones.
        B, T = tokens_BT.shape
        parts = math.prod(sharder.mesh.shape[axis] for axis in outer) if sharder.mesh is not None else 1
        early = tuple(axis for axis in inner if axis in sharder.axes(CONTEXT))
        tokens_BCT = sharder.place(tokens_BT.reshape(B, parts, T // parts), (self._rows(width), (), early))
        x_BCTD = jnp.take(table, tokens_BCT, axis=0, mode="clip").astype(self.env.policy.compute)
        for count in range(len(width), -1, -1):
            # One axis at a time leaves the width for its dim: an all-to-all each. All at once the partitioner gathers.
            held = width[:count]
            own = tuple(axis for axis in outer if axis not in held)
            x_BCTD = sharder.place(x_BCTD, (self._rows(held), own, inner, held))
        return sharder.constrain(x_BCTD.reshape(B, T, -1), BATCH, SEQUENCE, None)

    def _rows(self, held: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of the batch that do not hold width."""
        return tuple(axis for axis in self.env.sharder.axes(BATCH) if axis not in held)


def _split(sequence: tuple[str, ...], width: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes of the sequence up to the last that also shards the width, and those within."""
    last = max((i for i, axis in enumerate(sequence, start=1) if axis in width), default=0)
    return sequence[:last], sequence[last:]
