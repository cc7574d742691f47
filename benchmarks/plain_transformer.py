"""A Llama-like transformer as a Flax user writes it: of `nnx.Linear` and `nnx.Embed`, nothing of jaxtrain.

Shapes: B batch, T tokens, D embed, H heads, K kv_heads, F mlp, V vocab. Layers are created by `nnx.vmap` and run by
`nnx.scan`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

Rotation = tuple[jax.Array, jax.Array]  # cosine and sine [B, T, 1, K / 2]


def rotation(positions_BT: jax.Array, half: int) -> Rotation:
    """Returns the rotations of rotary position embeddings."""
    angles = positions_BT[..., None, None] * 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x_BTHK: jax.Array, by: Rotation) -> jax.Array:
    """Returns rotated queries or keys."""
    (cos, sin), (a, b) = by, jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x_BTHK.dtype)


class Attention(nnx.Module):
    """Causal attention within documents, with fewer heads of keys and values than of queries."""

    def __init__(self, embed: int, heads: int, kv_heads: int, kernel: str | None, *, rngs: nnx.Rngs):
        width, self.kernel = embed // heads, kernel
        linear = lambda n: nnx.LinearGeneral(embed, (n, width), use_bias=False, rngs=rngs)  # noqa: E731
        self.q, self.k, self.v = linear(heads), linear(kv_heads), linear(kv_heads)
        self.out = nnx.LinearGeneral((heads, width), embed, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, by: Rotation, mask_B1TT: jax.Array) -> jax.Array:
        q, k, v = rotated(self.q(x_BTD), by), rotated(self.k(x_BTD), by), self.v(x_BTD)
        return self.out(jax.nn.dot_product_attention(q, k, v, mask=mask_B1TT, implementation=self.kernel))


class Block(nnx.Module):
    """Attention and a gated MLP, each after a norm."""

    def __init__(self, embed: int, heads: int, kv_heads: int, mlp: int, kernel: str | None, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(embed, rngs=rngs)
        self.attention = Attention(embed, heads, kv_heads, kernel, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(embed, rngs=rngs)
        self.gate = nnx.Linear(embed, mlp, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(embed, mlp, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(mlp, embed, use_bias=False, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, by: Rotation, mask_B1TT: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), by, mask_B1TT)
        h_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.down(nnx.silu(self.gate(h_BTD)) * self.up(h_BTD))


class Transformer(nnx.Module):
    """Decoder-only language model with an untied head.

    `chunks` splits the tokens of the loss, so that only the logits of one chunk exist at a time. `kernel` is the
    `implementation` of `jax.nn.dot_product_attention`.
    """

    def __init__(
        self, vocab: int, embed: int, layers: int, heads: int, kv_heads: int, mlp: int, chunks: int = 1,
        kernel: str | None = None, *, rngs: nnx.Rngs,
    ):  # fmt: skip
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs: nnx.Rngs) -> Block:
            return Block(embed, heads, kv_heads, mlp, kernel, rngs=rngs)

        self.half, self.chunks = embed // heads // 2, chunks
        self.embed = nnx.Embed(vocab, embed, rngs=rngs)
        self.layers = create(rngs)
        self.norm = nnx.RMSNorm(embed, rngs=rngs)
        self.head = nnx.Linear(embed, vocab, use_bias=False, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Returns the last hidden state [B, T, D]."""
        by, segments_BT = rotation(batch["positions"], self.half), batch["segments"]
        is_past_TT = jnp.tri(segments_BT.shape[1], dtype=bool)
        mask_B1TT = ((segments_BT[:, :, None] == segments_BT[:, None, :]) & is_past_TT)[:, None]

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x_BTD: jax.Array, block: Block) -> jax.Array:
            return block(x_BTD, by, mask_B1TT)

        return self.norm(run(self.embed(batch["tokens"]), self.layers))

    def loss(self, batch: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns the cross-entropy as (sum, weight)."""

        def nats(head: nnx.Linear, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
            logits = head(x).astype(jnp.float32)
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights)

        inputs = (self(batch), batch["targets"], batch["weights"])
        if self.chunks == 1:
            return {"cross_entropy": (nats(self.head, *inputs), jnp.sum(batch["weights"]))}
        split = [x.reshape(len(x), self.chunks, -1, *x.shape[2:]).swapaxes(0, 1) for x in inputs]

        @nnx.scan(in_axes=(nnx.Carry, None, 0, 0, 0), out_axes=nnx.Carry)
        @nnx.remat
        def add(total: jax.Array, head: nnx.Linear, *chunk: jax.Array) -> jax.Array:
            return total + nats(head, *chunk)

        return {"cross_entropy": (add(jnp.zeros(()), self.head, *split), jnp.sum(batch["weights"]))}
