"""Token embedding on a table sharded over vocabulary and width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.mesh.rules import BATCH, CONTEXT, SEQUENCE
from jaxtrain.nn.env import Env, normal


class Embed(nnx.Module):
    """Looks rows up where they are stored and moves the rows, not the table.

    The table is never gathered: each shard looks up its part of the width for the tokens of its whole
    fsdp group, then one all-to-all hands every device its own rows in full width.
    """

    def __init__(self, vocab: int, embed: int, *, std: float, env: Env, rngs: nnx.Rngs):
        self.env = env
        self.table = env.param(rngs, ("vocab", "embed"), (vocab, embed), normal(std))

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """int32 tokens [B, T] -> rows [B, T, D] in the compute dtype, on the residual stream's placement."""
        sharder = self.env.sharder
        width, batch, sequence = sharder.axes("embed"), sharder.axes(BATCH), sharder.axes(SEQUENCE)
        batch_left = tuple(axis for axis in batch if axis not in width)
        sequence_left = tuple(axis for axis in sequence if axis not in width)
        context_left = tuple(axis for axis in sharder.axes(CONTEXT) if axis in sequence_left)
        # float32 until the rows are out: the gradient adds up thousands of rows of a frequent token.
        table = sharder.constrain(self.table.get_value().astype(jnp.float32), "vocab", "embed")
        tokens_BT = sharder.place(tokens_BT, (batch_left, context_left))
        x_BTD = jnp.take(table, tokens_BT, axis=0, mode="clip").astype(self.env.policy.compute)
        x_BTD = sharder.place(x_BTD, (batch_left, sequence_left, width))
        return sharder.constrain(x_BTD, BATCH, SEQUENCE, None)
