"""Linen modules as their users write them: nothing of jaxtrain is imported."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from flax import linen as nn


def weighted_cross_entropy(model, batch, key, train):
    nats = optax.softmax_cross_entropy_with_integer_labels(model(batch["image"], train=train), batch["label"])
    return {"cross_entropy": (jnp.sum(nats * batch["weight"]), jnp.sum(batch["weight"]))}


class LinenConvNet(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Conv(self.width, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return nn.Dense(4)(x.mean((1, 2)))


class LinenMLP(nn.Module):
    """Names by `with_logical_partitioning` and `with_partitioning`, and dropout."""

    rate: float = 0.2

    @nn.compact
    def __call__(self, x, train: bool):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(64, kernel_init=nn.with_logical_partitioning(init, ("embed", "mlp")))(x.reshape(len(x), -1))
        x = nn.Dropout(self.rate, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(nn.Dense(16, kernel_init=nn.with_partitioning(init, ("mlp", "embed")))(x))


class LinenBlock(nn.Module):
    heads: int = 4

    @nn.compact
    def __call__(self, x):
        x = x + nn.SelfAttention(self.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(32)(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(16)(x.reshape(len(x), 4, 12))
        return nn.Dense(4)(LinenBlock()(x).mean(1))


class LinenLSTM(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        cell = nn.OptimizedLSTMCell(8, recurrent_kernel_init=nn.initializers.lecun_normal())
        return nn.Dense(4)(nn.RNN(cell)(x.reshape(len(x), 4, 12))[:, -1])


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return x + nn.tanh(nn.Dense(x.shape[-1], kernel_init=init)(x)), None


class LinenScanned(nn.Module):
    """Rematerialised layers that `nn.scan` stacks, with logical names, one of which is that of the stack."""

    @nn.compact
    def __call__(self, x, train: bool):
        names = {nn.PARTITION_NAME: "layers"}
        stack = nn.scan(
            nn.remat(LinenLayer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params=names,
        )  # fmt: skip
        return nn.Dense(4)(stack(name="layers")(nn.Dense(16)(x.reshape(len(x), -1)), None)[0])


class LinenCentered(nn.Module):
    """A method `loss`, and a collection of its own."""

    def setup(self):
        self.linear = nn.Dense(16)
        self.center = self.variable("centers", "center", jnp.zeros, (16,))

    def loss(self, batch, train: bool):
        y = self.linear(batch["image"].reshape(len(batch["image"]), -1))
        centered = y - self.center.value
        if train:
            self.center.value = 0.9 * self.center.value + 0.1 * y.mean(0)
        values = jnp.sum(nn.softplus(centered) - 0.3 * centered, -1)
        return {"soft": (jnp.sum(values * batch["weight"]), jnp.sum(batch["weight"]))}


class LinenCollections(nn.Module):
    """Three collections that a pass changes: batch statistics, spectral norm's among them, a mean and a count."""

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.SpectralNorm(nn.Dense(16, use_bias=False))(x.reshape(len(x), -1), update_stats=train)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        center = self.variable("centers", "center", jnp.zeros, (16,))
        passes = self.variable("counts", "passes", jnp.zeros, (), jnp.int32)
        logits = nn.Dense(4)(x - center.value) * (1 + 0.1 * passes.value)
        if train and not self.is_initializing():
            center.value = 0.9 * center.value + 0.1 * x.mean(0)
            passes.value += 1
        return logits
