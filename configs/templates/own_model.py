"""A language model of your own: plain Flax, nothing of jaxtrain is imported.

A batch holds arrays [rows, sequence]: `tokens`; `targets`, the next token of each; `positions` from the start of a
document; `segments`, the number of the document in its row; `weights`, 1 where there is a target.
"""

import jax.numpy as jnp
import optax
from flax import nnx


class Block(nnx.Module):
    """Attention, then a two-layer perceptron, each added to what comes in."""

    def __init__(self, width, heads, *, rngs: nnx.Rngs):
        self.norm1 = nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=heads, in_features=width, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    """Decoder with learned positions. `model.options` of the config are its arguments."""

    def __init__(self, vocab, width, layers, heads, positions=1024, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Embed(positions, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocab, rngs=rngs)

    def __call__(self, tokens, positions, segments):
        causal = nnx.make_causal_mask(tokens)
        same_document = nnx.make_attention_mask(segments, segments, jnp.equal)
        mask = nnx.combine_masks(causal, same_document)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss(model, batch):
    """Returns {name: (sum, weight)} of the loss, and of metrics: sums, so that any split of the rows adds up."""
    logits = model(batch["tokens"], batch["positions"], batch["segments"])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    weights = batch["weights"]
    right, count = (jnp.argmax(logits, -1) == batch["targets"]) * weights, jnp.sum(weights)
    return {"cross_entropy": (jnp.sum(nats * weights), count)}, {"accuracy": (jnp.sum(right), count)}
