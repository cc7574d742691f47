"""NNX modules as their users write them: nothing of jaxtrain is imported."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def weighted_cross_entropy(model, batch, key):
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"])
    return {"cross_entropy": (jnp.sum(nats * batch["weight"]), jnp.sum(batch["weight"]))}


class ConvNet(nnx.Module):
    """A convolution with batch norm."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class ResidualBlock(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(width, width, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        y = nnx.relu(self.norm1(self.conv1(x)))
        return nnx.relu(x + self.norm2(self.conv2(y)))


class ResNet(nnx.Module):
    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.blocks = nnx.List([ResidualBlock(width, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


class NamedMLP(nnx.Module):
    """Logical names by `nnx.with_partitioning`, and dropout."""

    def __init__(self, width: int = 64, rate: float = 0.0, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(48, width, kernel_init=nnx.with_partitioning(init, ("embed", "mlp")), rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(width, 16, kernel_init=nnx.with_partitioning(init, ("mlp", "embed")), rngs=rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.drop(nnx.relu(self.up(x.reshape(len(x), -1))))
        return self.head(self.down(x))


class TransformerBlock(nnx.Module):
    def __init__(self, width: int, heads: int, rate: float, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 2 * width, rngs=rngs)
        self.down = nnx.Linear(2 * width, width, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.drop(self.attention(self.norm1(x), mask=mask))
        return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))


class VisionTransformer(nnx.Module):
    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(3, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 4, width)))
        self.blocks = nnx.List([TransformerBlock(width, 4, 0.0, rngs=rngs)])
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(len(x), -1, x.shape[-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class GPT(nnx.Module):
    """A decoder with dropout and a head that is tied to the embedding; a method `loss` without a key."""

    def __init__(self, width: int = 16, rate: float = 0.2, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(width, 2, rate, rngs=rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        mask = nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))

    def loss(self, batch):
        nats = optax.softmax_cross_entropy_with_integer_labels(self(batch["ids"][:, :-1]), batch["ids"][:, 1:])
        weight = jnp.broadcast_to(batch["weight"][:, None], nats.shape)
        return {"cross_entropy": (jnp.sum(nats * weight), jnp.sum(weight))}


class Unembed(nnx.Module):
    """Scores over a vocabulary by an embedding that another module has created."""

    def __init__(self, embedding: nnx.Param):
        self.embedding = embedding

    def __call__(self, x):
        return x @ self.embedding[...].T


class TiedLanguageModel(nnx.Module):
    """Two modules own one parameter; the weights of the loss are (rows, tokens)."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, width, rngs=rngs)
        self.mix = nnx.Linear(2 * width, width, rngs=rngs)
        self.head = Unembed(self.embed.embedding)

    def loss(self, batch):
        x = self.embed(batch["ids"])
        logits = self.head(nnx.tanh(self.mix(jnp.concatenate([x[:, :-2], x[:, 1:-1]], -1))))
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["ids"][:, 2:])
        weight = batch["weight"][:, None] * (batch["ids"][:, 2:] > 7)
        return {"cross_entropy": (jnp.sum(nats * weight), jnp.sum(weight))}


class ScannedMLP(nnx.Module):
    """Layers that are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.read = nnx.Linear(48, width, rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return nnx.Linear(width, width, rngs=rngs)

        self.layers = create(rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + nnx.tanh(layer(x))

        return self.head(run(self.read(x.reshape(len(x), -1)), self.layers))


class LSTM(nnx.Module):
    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(12, width, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x.reshape(len(x), 4, 12))[:, -1])


class BidirectionalGRU(nnx.Module):
    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        cells = [nnx.GRUCell(12, width, recurrent_kernel_init=init, rngs=rngs) for _ in range(2)]
        self.rnn = nnx.Bidirectional(*(nnx.RNN(cell, rngs=rngs) for cell in cells), rngs=rngs)
        self.head = nnx.Linear(2 * width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x.reshape(len(x), 4, 12)).mean(1))


class Ensemble(nnx.Module):
    """Members that are created and called by `nnx.vmap`, each with dropout of its own."""

    def __init__(self, width: int = 16, members: int = 3, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=members)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            layers = nnx.Linear(48, width, rngs=rngs), nnx.Dropout(0.2, rngs=rngs), nnx.Linear(width, 4, rngs=rngs)
            return nnx.Sequential(*layers)

        self.members = create(rngs)

    def __call__(self, x):
        call = nnx.vmap(lambda member, x: member(x), in_axes=(0, None))
        return call(self.members, x.reshape(len(x), -1)).mean(0)


class NormedConvNet(nnx.Module):
    """Instance and RMS norm, and a scale that is a scalar."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(3, width, (3, 3), use_bias=False, rngs=rngs)
        self.instance_norm = nnx.InstanceNorm(width, rngs=rngs)
        self.rms_norm = nnx.RMSNorm(width, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.instance_norm(self.conv(x)))
        return self.head(self.scale * self.rms_norm(x.mean((1, 2))))


class SpectralMLP(nnx.Module):
    """Spectral and weight norm, which assign to the parameters of their layers within a pass."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.read = nnx.SpectralNorm(nnx.Linear(48, width, rngs=rngs), rngs=rngs)
        self.head = nnx.WeightNorm(nnx.Linear(width, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.read(x.reshape(len(x), -1))))


class Buffered(nnx.Module):
    """Arrays of NumPy and JAX as attributes, one of which a pass changes."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(48, width, rngs=rngs)
        self.scale = np.linspace(0.5, 1, width, dtype=np.float32)
        self.center = jnp.zeros((width,))

    def loss(self, batch):
        y = self.linear(batch["image"].reshape(len(batch["image"]), -1)) * self.scale
        values = jnp.sum(nnx.softplus(y - self.center), -1)
        self.center = 0.9 * self.center + 0.1 * jax.lax.stop_gradient(y.mean(0))
        return {"soft": (jnp.sum(values * batch["weight"]), jnp.sum(batch["weight"]))}


class MixerBlock(nnx.Module):
    def __init__(self, tokens: int, width: int, *, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.tokens = nnx.Linear(tokens, tokens, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.channels = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, x):
        x = x + nnx.gelu(self.tokens(self.norm1(x).swapaxes(1, 2))).swapaxes(1, 2)
        return x + nnx.gelu(self.channels(self.norm2(x)))


class Mixer(nnx.Module):
    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.read = nnx.Linear(3, width, rngs=rngs)
        self.block = MixerBlock(16, width, rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(self.block(self.read(x.reshape(len(x), 16, 3))).mean(1))


class VAE(nnx.Module):
    """Draws noise from its own random stream; the loss has two terms and its own metric."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.encode = nnx.Linear(48, 2 * width, rngs=rngs)
        self.decode = nnx.Linear(width, 48, rngs=rngs)
        self.rngs = rngs.fork() if hasattr(rngs, "fork") else rngs

    def loss(self, batch, key):
        x = batch["image"].reshape(len(batch["image"]), -1)
        mean, log_var = jnp.split(self.encode(x), 2, -1)
        z = mean + jnp.exp(0.5 * log_var) * jax.random.normal(self.rngs.noise(), mean.shape)
        error = jnp.sum((self.decode(z) - x) ** 2, -1)
        divergence = 0.5 * jnp.sum(jnp.exp(log_var) + mean**2 - 1 - log_var, -1)
        weight = batch["weight"]
        terms = {
            "error": (jnp.sum(error * weight), jnp.sum(weight)),
            "kl": (jnp.sum(divergence * weight), jnp.sum(weight)),
        }
        return terms, {"spread": (jnp.sum(jnp.std(x, -1)), jnp.float32(len(x)))}


class Contrastive(nnx.Module):
    """InfoNCE: each row is compared with all rows of the microbatch."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.left = nnx.Linear(24, width, rngs=rngs)
        self.right = nnx.Linear(24, width, rngs=rngs)

    def loss(self, batch):
        x = batch["image"].reshape(len(batch["image"]), 2, 24)
        left, right = self.left(x[:, 0]), self.right(x[:, 1])
        normalized = [y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (left, right)]
        logits = 5.0 * normalized[0] @ normalized[1].T
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(len(x)))
        return {"info_nce": (jnp.sum(nats * batch["weight"]), jnp.sum(batch["weight"]))}


class Center(nnx.Variable):
    """A user's own kind of variable."""


class Centered(nnx.Module):
    """Subtracts a running mean of its outputs, as DINO does; it has a variable kind of its own."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(48, width, rngs=rngs)
        self.center = Center(jnp.zeros((width,)))

    def loss(self, batch):
        y = self.linear(batch["image"].reshape(len(batch["image"]), -1))
        centered = y - self.center[...]
        self.center[...] = 0.9 * self.center[...] + 0.1 * jax.lax.stop_gradient(y.mean(0))
        values = jnp.sum(nnx.softplus(centered) - 0.3 * centered, -1)
        return {"soft": (jnp.sum(values * batch["weight"]), jnp.sum(batch["weight"]))}


class FrozenBackbone(nnx.Module):
    """A backbone that the config freezes by path, under a head with low-rank adapters."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.backbone = ConvNet(width, rngs=rngs)
        self.adapter = nnx.LoRA(4, 2, 4, rngs=rngs)

    def __call__(self, x):
        y = self.backbone(x)
        return y + self.adapter(y)


class LowRank(nnx.Module):
    """`nnx.LoRA` around a layer that the config freezes by path, and that the adapter calls."""

    def __init__(self, width: int = 16, *, rngs: nnx.Rngs):
        self.adapted = nnx.LoRA(48, 4, width, base_module=nnx.Linear(48, width, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(width, 4, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.adapted(x.reshape(len(x), -1))))


class UNet(nnx.Module):
    """Predicts the noise of a noised image; the noise comes from the key that the loss gets."""

    def __init__(self, width: int = 8, *, rngs: nnx.Rngs):
        self.inner = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.down = nnx.Conv(width, width, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(width, width, (2, 2), strides=(2, 2), rngs=rngs)
        self.outer = nnx.Conv(2 * width, 3, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(width, num_groups=2, rngs=rngs)

    def __call__(self, x):
        skip = nnx.silu(self.norm(self.inner(x)))
        x = self.up(nnx.silu(self.down(skip)))
        return self.outer(jnp.concatenate([skip, x], -1))

    def loss(self, batch, key):
        image, weight = batch["image"], batch["weight"]
        level, noise = jax.random.split(key)
        t = jax.random.uniform(level, (len(image), 1, 1, 1))
        noise = jax.random.normal(noise, image.shape)
        error = jnp.mean((self(jnp.sqrt(1 - t) * image + jnp.sqrt(t) * noise) - noise) ** 2, (1, 2, 3))
        return {"noise": (jnp.sum(error * weight), jnp.sum(weight))}


class MeanLoss(ConvNet):
    """Returns a mean, as most loops do."""

    def loss(self, batch):
        return optax.softmax_cross_entropy_with_integer_labels(self(batch["image"]), batch["label"]).mean()


def make_convnet(width: int = 8, *, rngs: nnx.Rngs):
    return ConvNet(width, rngs=rngs)
