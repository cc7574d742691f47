"""The proof that rows are independent: right on both sides, and checked against the numbers of whole and split batches.

A batch has as many rows as features, tokens and classes, so that no size tells which dim is of the rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

from jaxtrain.losses.row_independence import rows_are_proven_independent
from jaxtrain.losses.terms import split_loss_output
from jaxtrain.models.model_def import NOTHING

R = 6  # rows of a batch, features, tokens, classes
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def make_batches() -> dict[str, jax.Array]:
    """Two batches, as one."""
    rng = np.random.default_rng(0)
    weight = rng.uniform(0.1, 3, 2 * R) * (np.arange(2 * R) % 5 != 1)
    return {
        "x": jnp.asarray(rng.normal(size=(2 * R, R)), jnp.float32),
        "image": jnp.asarray(rng.normal(size=(2 * R, R, R, R)), jnp.float32),
        "label": jnp.asarray(rng.permutation(2 * R) % R, jnp.int32),
        "ids": jnp.asarray(rng.integers(0, R, (2 * R, R)), jnp.int32),
        "weight": jnp.asarray(weight, jnp.float32),
    }


def make_params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {"w": (R, R), "b": (R,), "kernel": (3, 3, R, R), "table": (R, R)}
    return {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


class Case:
    """Parameters, and a loss (params, batch, key) -> (terms, counts)."""

    def __init__(self, params: Any, loss: Callable):
        self.params, self.loss = params, loss


def of_values(values: Callable[[Any, Any], jax.Array]) -> Callable:
    """Loss of (params, batch) -> values of any shape with a leading dim of rows."""
    return lambda p, batch, key: ({"loss": (values(p, batch).sum(), batch["weight"].sum())}, None)


def of_module(make: Callable[[nnx.Rngs], nnx.Module], values: Callable[[Any, Any], jax.Array]) -> Case:
    graphdef, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
    return Case(params, of_values(lambda p, batch: values(nnx.merge(graphdef, p, rest, copy=True), batch)))


CASES: dict[str, dict[str, Case]] = {"proven": {}, "mixing": {}, "unknown": {}}


def case(kind: str) -> Callable:
    """Adds a function (params, batch, key) -> (terms, counts)."""

    def add(loss: Callable) -> Callable:
        CASES[kind][loss.__name__] = Case(make_params(), loss)
        return loss

    return add


def values_case(kind: str) -> Callable:
    """Adds a function (params, batch) -> values, whose sum is the loss."""

    def add(values: Callable) -> Callable:
        CASES[kind][values.__name__] = Case(make_params(), of_values(values))
        return values

    return add


def module_case(values: Callable) -> Callable:
    """Adds a module class and its (module, batch) -> values."""

    def add(make: Any) -> Any:
        CASES["proven"][make.__name__] = of_module(make, values)
        return make

    return add


def on(name: str) -> Callable:
    """Weighted cross-entropy of the module on a field of the batch."""
    return lambda module, batch: cross_entropy(module(batch[name]), batch["label"]) * batch["weight"]


def hidden(p: Any, batch: Any) -> jax.Array:
    return jnp.tanh(batch["x"] @ p["w"] + p["b"])


# Modules


@module_case(on("x"))
class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(R, 2 * R, rngs=rngs), nnx.Linear(2 * R, R, rngs=rngs)
        self.norm = nnx.RMSNorm(2 * R, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(nnx.gelu(self.up(x.reshape(len(x), -1)))))


@module_case(on("image"))
class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(R, R, (3, 3), rngs=rngs)
        self.grouped = nnx.Conv(R, R, (3, 3), feature_group_count=R, strides=2, rngs=rngs)
        self.norm, self.head = nnx.GroupNorm(R, num_groups=2, rngs=rngs), nnx.Linear(R, R, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.norm(self.conv(x))), (2, 2))
        return self.head(nnx.avg_pool(self.grouped(x), (2, 2)).mean((1, 2)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norms = nnx.List([nnx.LayerNorm(R, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(2, R, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(R, 2 * R, rngs=rngs), nnx.Linear(2 * R, R, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attention(self.norms[0](x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


@module_case(on("image"))
class ViT(nnx.Module):
    def __init__(self, rngs):
        self.patches = nnx.Conv(R, R, (3, 3), strides=(3, 3), rngs=rngs)
        self.positions = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, 5, R)))
        self.token = nnx.Param(jnp.zeros((1, 1, R)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(R, R, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), -1, R)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, R)), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def next_token(module: Any, batch: Any) -> jax.Array:
    logits = module(batch["ids"][:, :-1])
    nats = cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["ids"][:, 1:].reshape(-1))
    return nats * jnp.repeat(batch["weight"], R - 1)


@module_case(next_token)
class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.positions = (nnx.Embed(R, R, rngs=rngs) for _ in range(2))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(R, rngs=rngs)

    def __call__(self, ids):
        x, mask = self.embed(ids) + self.positions(jnp.arange(ids.shape[1])), nnx.make_causal_mask(ids)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


@module_case(on("x"))
class Scanned(nnx.Module):
    def __init__(self, rngs):
        create = nnx.vmap(lambda rngs: nnx.Linear(R, R, rngs=rngs), in_axes=(0,), out_axes=0)
        self.layers = nnx.split_rngs(splits=3)(create)(rngs)

    def __call__(self, x):
        run = nnx.remat(lambda x, layer: x + nnx.tanh(layer(x)))
        return nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


@module_case(on("x"))
class LSTM(nnx.Module):
    def __init__(self, rngs):
        self.rnn, self.head = nnx.RNN(nnx.LSTMCell(2, R, rngs=rngs), rngs=rngs), nnx.Linear(R, R, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x.reshape(len(x), 3, 2))[:, -1])


@module_case(lambda module, batch: (module(batch["image"]) - batch["image"]) ** 2)
class UNet(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Conv(R, R, (3, 3), rngs=rngs), nnx.Conv(2 * R, R, (3, 3), rngs=rngs)
        self.down = nnx.Conv(R, R, (3, 3), strides=(2, 2), rngs=rngs)
        self.up = nnx.ConvTranspose(R, R, (2, 2), strides=(2, 2), rngs=rngs)

    def __call__(self, x):
        skip = nnx.silu(self.inner(x))
        small = self.down(skip)
        larger = self.up(small) + jax.image.resize(small, skip.shape, "bilinear")
        larger += jax.image.resize(small, skip.shape, "nearest")
        return self.outer(jnp.concatenate([skip, larger], -1))


# Losses whose rows are independent


@values_case("proven")
def one_hot_and_softmax(p, batch):
    return -jax.nn.log_softmax(hidden(p, batch)) * jax.nn.one_hot(batch["label"], R)


@values_case("proven")
def take_along_axis(p, batch):
    return jnp.take_along_axis(hidden(p, batch), batch["label"][:, None], -1)[:, 0] * batch["weight"]


@values_case("proven")
def embedding_of_every_form(p, batch):
    return p["table"][batch["ids"]] * jnp.take(p["w"], batch["ids"], axis=1).transpose(1, 2, 0)


@values_case("proven")
def einsum_over_rows_and_tokens(p, batch):
    scores = jnp.einsum("bqd,bkd->bqk", p["table"][batch["ids"]], p["w"][batch["ids"]])
    return jnp.where(jnp.tril(jnp.ones((R, R), bool)), scores, -1e9).max(-1)


@values_case("proven")
def sort_and_top_k_of_features(p, batch):
    y = hidden(p, batch)
    return jnp.sort(y)[:, ::2] + lax.top_k(y, 3)[0] + jnp.cumsum(y[:, ::-1], 1)[:, 3:]


@values_case("proven")
def slices_and_updates_of_features(p, batch):
    y = hidden(p, batch)
    y = y.at[:, 0].set(0.0).at[:, 1].add(p["b"][0])
    y = lax.dynamic_update_slice(y, y[:, :2] * p["b"][:2], (0, 3))
    return jnp.pad(lax.dynamic_slice(y, (0, 1), (len(y), 4)), ((0, 0), (1, 1)), constant_values=2.0)


@values_case("proven")
def vmap_of_a_row(p, batch):
    def row(x, image, label):
        y = lax.conv_general_dilated(
            image[None], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jnp.tanh(x @ p["w"])[label] * y.mean()) ** 2

    return jax.vmap(row)(batch["x"], batch["image"], batch["label"])


@values_case("proven")
def gradients_of_inputs(p, batch):
    return jax.grad(lambda x: hidden(p, {"x": x}).sum())(batch["x"]) ** 2


@values_case("proven")
def branch_on_a_parameter(p, batch):
    return lax.cond(p["b"][0] > 0, lambda y: y**2, lambda y: jnp.sin(y), hidden(p, batch))


@values_case("proven")
def loop_over_tokens(p, batch):
    def step(carry, ids):
        return jnp.tanh(carry @ p["w"] + p["table"][ids]), carry.sum(-1)

    carry, sums = lax.scan(step, jnp.zeros_like(batch["x"]), batch["ids"].T, reverse=True)
    fixed = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 0.5 * c[1]), (0, batch["x"]))[1]
    return jnp.concatenate([carry * fixed, sums.T], -1)


@values_case("proven")
def scan_that_carries_a_sum(p, batch):
    def step(total, w):
        return total + jnp.tanh(batch["x"] * w).sum(), None

    return lax.scan(step, 0.0, p["w"])[0]


@values_case("proven")
def weight_of_a_product_of_parameters(p, batch):
    norm = jnp.linalg.norm(p["w"] @ p["table"], axis=0, keepdims=True)
    return jnp.tanh(batch["x"] @ (p["w"] @ p["table"] / norm))


@values_case("proven")
def rematerialised_in_bfloat16(p, batch):
    run = jax.checkpoint(lambda x: jax.nn.silu(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)))
    return run(batch["x"]).astype(jnp.float32)


@values_case("proven")
def repeated_rows_in_order(p, batch):
    return jnp.repeat(hidden(p, batch), 3, axis=0) * jnp.repeat(batch["weight"], 3)[:, None]


@values_case("proven")
def constants_for_every_row(p, batch):
    rows = len(batch["x"])
    return hidden(p, batch) * np.full((rows, R), 2.0) + lax.broadcasted_iota(jnp.float32, (rows, R), 1)


@values_case("proven")
def straight_through(p, batch):
    y = hidden(p, batch)
    return (y + lax.stop_gradient(jnp.round(y) - y)) ** 2


@jax.custom_vjp
def clip_within_rows(x):
    return x


clip_within_rows.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g, axis=-1, keepdims=True),))


@values_case("proven")
def custom_gradient_within_rows(p, batch):
    return clip_within_rows(hidden(p, batch)) ** 2


@case("proven")
def dot_of_nats_and_weights(p, batch, key):
    nats = (hidden(p, batch) ** 2).sum(-1)
    return {"loss": (jnp.vdot(nats, batch["weight"]), batch["weight"].sum())}, None


@case("proven")
def weight_of_rows_or_elements(p, batch, key):
    y = hidden(p, batch)
    terms = {"rows": (y.sum(), jnp.float32(len(y))), "elements": ((y**2).sum(), float(y.size))}
    return terms | {"ones": (y.mean(-1).sum(), jnp.ones(len(y)).sum())}, None


@case("proven")
def penalty_of_weight_one(p, batch, key):
    nats = hidden(p, batch) ** 2
    return {"loss": (nats.sum(), nats.size), "penalty": ((p["w"] ** 2).mean() + (p["b"] ** 2).sum(), 1.0)}, None


@case("proven")
def counts_of_all_forms(p, batch, key):
    y = hidden(p, batch)
    load = jnp.zeros(R).at[batch["label"]].add(batch["weight"])
    right = (y.argmax(-1) == batch["label"]).sum()
    return {"loss": (y.sum(), 1.0 * len(y))}, {
        "load": load,
        "right": right,
        "top": jax.nn.one_hot(batch["ids"], R).sum((0, 1)),
    }


@case("proven")
def counts_that_are_pairs(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum(), 1.0 * len(y))}, {
        "spread": (y.std(-1).sum(), 1.0 * len(y)),
        "norm": ((p["w"] ** 2).sum(), 1.0),
    }


# Losses that mix rows


@case("mixing")
def mean_of_weight_one(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum() / len(y), 1.0)}, None


@case("mixing")
def sum_of_weight_one(p, batch, key):
    return {"loss": (hidden(p, batch).sum(), 1.0)}, None


@case("mixing")
def sum_times_rows(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum() * len(y), 1.0 * len(y))}, None


@case("mixing")
def penalty_weighted_by_rows(p, batch, key):
    return {"loss": ((p["w"] ** 2).sum(), 1.0 * len(batch["x"]))}, None


@case("mixing")
def normalised_by_weights(p, batch, key):
    y = hidden(p, batch).sum(-1) * batch["weight"]
    return {"loss": (y.sum() / batch["weight"].sum(), jnp.float32(1))}, None


@case("mixing")
def count_that_is_a_mean(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum(), 1.0 * len(y))}, {"spread": jnp.stack([y.mean(), y.std()])}


@case("mixing")
def count_that_is_a_constant(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum(), 1.0 * len(y))}, [jnp.ones(3)]


@case("mixing")
def count_of_rounded_sum(p, batch, key):
    y = hidden(p, batch)
    return {"loss": (y.sum(), 1.0 * len(y))}, [(0.3 * batch["weight"].sum()).astype(jnp.int32)]


@case("mixing")
def dropout(p, batch, key):
    y = hidden(p, batch)
    return {"loss": ((y * jax.random.bernoulli(key, 0.5, y.shape)).sum(), 1.0 * len(y))}, None


@values_case("mixing")
def batch_norm(p, batch):
    y = batch["x"] @ p["w"]
    return jnp.tanh((y - y.mean(0)) / (y.std(0) + 1e-3) * p["b"])


@values_case("mixing")
def centered(p, batch):
    y = hidden(p, batch)
    return (y - y.mean(0)) ** 2


@values_case("mixing")
def centered_by_a_constant(p, batch):
    y = hidden(p, batch)
    return (y - lax.stop_gradient(y.mean(0))) ** 2


@values_case("mixing")
def products_of_rows(p, batch):
    y = hidden(p, batch)
    return jax.nn.logsumexp(y @ y.T, -1)


@values_case("mixing")
def contrastive(p, batch):
    y = hidden(p, batch)
    return cross_entropy(y @ batch["x"].T, jnp.arange(len(y)))


@values_case("mixing")
def numbered_rows(p, batch):
    y = hidden(p, batch)
    return y * jnp.arange(len(y))[:, None]


@values_case("mixing")
def numbered_rows_from_a_constant(p, batch):
    y = hidden(p, batch)
    return y * np.arange(len(y), dtype=np.float32)[:, None]


@values_case("mixing")
def reversed_rows(p, batch):
    return hidden(p, batch) * batch["x"][::-1]


@values_case("mixing")
def rolled_rows(p, batch):
    return hidden(p, batch) * jnp.roll(batch["x"], 1, 0)


@values_case("mixing")
def permuted_rows(p, batch):
    rows = len(batch["x"])
    return hidden(p, batch) * batch["x"][jax.random.permutation(jax.random.key(3), rows)]


@values_case("mixing")
def permuted_by_labels(p, batch):
    return hidden(p, batch) * batch["x"][jnp.argsort(batch["weight"])]


@values_case("mixing")
def first_row_for_all(p, batch):
    return hidden(p, batch) * batch["x"][:1]


@values_case("mixing")
def half_of_the_rows(p, batch):
    y = hidden(p, batch)
    return y[: len(y) // 2]


@values_case("mixing")
def masked_rows(p, batch):
    return hidden(p, batch).at[0].set(0.0)


@values_case("mixing")
def shifted_into_padding(p, batch):
    return hidden(p, batch) * jnp.pad(batch["x"], ((1, 0), (0, 0)))[:-1]


@values_case("mixing")
def sorted_rows(p, batch):
    return jnp.sort(hidden(p, batch), 0) * batch["x"]


@values_case("mixing")
def hardest_rows(p, batch):
    y = hidden(p, batch).sum(-1)
    return lax.top_k(y, len(y) // 2)[0]


@values_case("mixing")
def maximum_of_rows(p, batch):
    return hidden(p, batch).max(0)


@values_case("mixing")
def softmax_over_rows(p, batch):
    return jax.nn.softmax(hidden(p, batch), 0) ** 2


@values_case("mixing")
def cumulative_rows(p, batch):
    return jnp.cumsum(hidden(p, batch), 0) ** 2


@values_case("mixing")
def scan_across_rows(p, batch):
    return lax.scan(lambda c, x: (jnp.tanh(x @ p["w"] + c), c), p["b"], batch["x"])[1]


@values_case("mixing")
def scan_that_squares_a_sum(p, batch):
    return lax.scan(lambda c, w: (c + (batch["x"] * w).mean() * c, None), 1.0, p["w"])[0]


@values_case("mixing")
def branch_on_the_batch(p, batch):
    return lax.cond(batch["weight"].sum() > 12.0, lambda y: y**2, lambda y: jnp.sin(y), hidden(p, batch))


@values_case("mixing")
def loop_until_the_batch_is_small(p, batch):
    x = lax.while_loop(lambda x: jnp.abs(x).sum() > 5.0, lambda x: 0.9 * x, batch["x"])
    return hidden(p, {"x": x})


@values_case("mixing")
def square_of_a_sum(p, batch):
    return hidden(p, batch).sum(0) ** 2


@values_case("mixing")
def pairs_of_rows(p, batch):
    y = hidden(p, batch).reshape(-1, 3, R)
    return jax.nn.softmax(y.sum(1)) - jnp.cumprod(y, 1)[:, -1] * 3.0 + y.max(1) * jnp.tanh(y.sum((0, 1)))


@values_case("mixing")
def tokens_before_rows(p, batch):
    return hidden(p, batch).T.reshape(-1, R) ** 2 * batch["x"].reshape(-1, R)


@values_case("mixing")
def tiled_rows(p, batch):
    return jnp.tile(hidden(p, batch), (3, 1)) * jnp.repeat(batch["x"], 3, 0)


@values_case("mixing")
def convolution_over_rows(p, batch):
    x = batch["image"].reshape(1, -1, R, R)
    return jax.nn.relu(
        lax.conv_general_dilated(x, p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )


@values_case("mixing")
def window_over_rows(p, batch):
    return nnx.max_pool(hidden(p, batch)[None], (2,), padding="SAME")


@values_case("mixing")
def rows_scattered_to_classes(p, batch):
    return jnp.zeros((3, R)).at[batch["label"] % 3].add(hidden(p, batch)) ** 2


@jax.custom_vjp
def center_gradients(x):
    return x


center_gradients.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))


@values_case("mixing")
def custom_gradient_over_rows(p, batch):
    return center_gradients(hidden(p, batch)) ** 2


@jax.custom_vjp
def clip_gradients(w):
    return w


clip_gradients.defvjp(lambda w: (w, None), lambda _, g: (g / (1.0 + jnp.linalg.norm(g)),))


@values_case("mixing")
def custom_gradient_of_a_parameter(p, batch):
    return hidden({**p, "w": clip_gradients(p["w"])}, batch)


@jax.custom_jvp
def center_tangents(x):
    return x


center_tangents.defjvp(lambda primals, tangents: (primals[0], tangents[0] - tangents[0].mean(0)))


@values_case("mixing")
def custom_derivative_over_rows(p, batch):
    return center_tangents(hidden(p, batch)) ** 2


@values_case("mixing")
def code_that_counts_rows(p, batch):
    y = hidden(p, batch)
    return y**2 if len(y) <= R else y


# Each of these mixes rows in one place alone

NHC = ("NHC", "HIO", "NHC")


@values_case("mixing")
def first_half_of_repeated_rows(p, batch):
    return hidden(p, batch) * jnp.repeat(batch["x"], 2, 0)[: len(batch["x"])]


@values_case("mixing")
def dynamic_half_of_repeated_rows(p, batch):
    rows = len(batch["x"])
    return hidden(p, batch) * lax.dynamic_slice(jnp.repeat(batch["x"], 2, 0), (0, 0), (rows, R))


@values_case("mixing")
def overwritten_half_of_repeated_rows(p, batch):
    return lax.dynamic_update_slice(jnp.repeat(hidden(p, batch), 2, 0), batch["x"], (0, 0))


@values_case("mixing")
def overwritten_tokens_of_all_rows(p, batch):
    y = jnp.concatenate([hidden(p, batch)] * 2, 1)
    return lax.dynamic_update_slice(y, batch["x"].T, (0, 0)) * batch["weight"][:, None]


@values_case("mixing")
def rows_shifted_by_padding(p, batch):
    return hidden(p, batch) * lax.pad(batch["x"], 0.0, [(1, -1, 0), (0, 0, 0)])


@values_case("mixing")
def scaled_by_a_sum(p, batch):
    return hidden(p, batch) * batch["x"].sum()


@values_case("mixing")
def decay_with_each_row(p, batch):
    rows = len(batch["x"])
    return hidden(p, batch) * lax.scan(lambda c, _: (0.9 * c, None), jnp.ones(()), None, length=rows)[0]


@values_case("mixing")
def smoothed_rows(p, batch):
    kernel = np.eye(R, dtype=np.float32) * np.ones((3, 1, 1), np.float32)
    return hidden(p, batch) * lax.conv_general_dilated(batch["x"][None], kernel, (1,), "SAME", dimension_numbers=NHC)[0]


@values_case("mixing")
def neighbours_of_rows(p, batch):
    return lax.reduce_window(hidden(p, batch), -jnp.inf, lax.max, (2, 1), (1, 1), "SAME") * batch["x"]


@values_case("mixing")
def direction_that_counts_rows(p, batch):
    start, is_reversed = jnp.zeros(len(batch["x"])), len(batch["x"]) <= R
    return lax.scan(lambda c, x: (jnp.tanh(c) + x, None), start, hidden(p, batch).T, reverse=is_reversed)[0]


@case("mixing")
def weight_of_a_padded_batch(p, batch, key):
    return {"loss": (hidden(p, batch).sum(), jnp.ones(len(batch["x"]) + R).sum())}, None


def add_count(count: Callable) -> Callable:
    """Adds a function (params, batch) -> array whose sum is a count. Nothing is differentiated through it."""

    def loss(p, batch, key):
        return {"loss": (hidden(p, batch).sum(), 1.0 * len(batch["x"]))}, [count(p, batch).sum()]

    CASES["mixing"][count.__name__] = Case(make_params(), loss)
    return count


@add_count
def count_of_maxima(p, batch):
    return batch["x"].max(0)


@add_count
def rows_split_over_tokens(p, batch):
    return batch["image"].reshape(R, -1).max(0).sum()


@add_count
def transposing_reshape(p, batch):
    return batch["x"] * lax.reshape(batch["image"][:, :, 0, 0], batch["x"].shape, (1, 0))


@add_count
def stride_of_almost_a_row(p, batch):
    x = jnp.concatenate([batch["x"]] * 4, 1)[:, :23] * jnp.arange(23)
    return x.reshape(-1)[::24]


@add_count
def slices_of_half_of_repeated_rows(p, batch):
    dims = lax.GatherDimensionNumbers((1, 2), collapsed_slice_dims=(), start_index_map=(0,))
    starts, sizes = np.arange(3)[:, None], batch["x"].shape
    return lax.gather(jnp.repeat(batch["x"], 2, 0), starts, dims, sizes, mode="clip").max(0)


@add_count
def rows_chosen_by_labels(p, batch):
    dims = lax.GatherDimensionNumbers((1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return batch["x"] * lax.gather(batch["x"], batch["label"][:, None], dims, (1, R))


@add_count
def rows_added_to_other_rows(p, batch):
    dims = lax.ScatterDimensionNumbers((1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,))
    return jnp.tanh(lax.scatter_add(batch["x"], batch["label"][:, None], batch["x"], dims))


@add_count
def rows_scattered_over_half_of_repeated_rows(p, batch):
    dims = lax.ScatterDimensionNumbers((0, 1), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,))
    x = batch["image"][:, 0, 0]
    return lax.scatter(jnp.repeat(batch["x"], 2, 0), np.zeros(1, np.int32), x, dims, unique_indices=True)


@add_count
def rows_in_a_buffer(p, batch):
    dims = lax.ScatterDimensionNumbers((0,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,))
    buffer = lax.scatter_add(jnp.zeros(3 * R), np.zeros(1, np.int32), batch["weight"], dims)
    return buffer.reshape(3, R)[0]


@add_count
def rows_added_to_a_parameter(p, batch):
    return p["b"].at[batch["label"]].add(batch["weight"])


@add_count
def rows_in_groups_of_a_batch(p, batch):
    x, kernel = jnp.repeat(batch["x"], 2, 0), np.ones((1, R, 2), np.float32)
    y = lax.conv_general_dilated(x[:, None], kernel, (1,), "VALID", dimension_numbers=NHC, batch_group_count=2)
    return y[:, 0, 0] * y[:, 0, 1]


@add_count
def rows_in_groups_of_features(p, batch):
    x, kernel = jnp.repeat(batch["x"], 2, 0).T[None], batch["image"][None, :, :2, 0, 0]
    return lax.conv_general_dilated(x, kernel, (1,), "VALID", dimension_numbers=NHC, feature_group_count=2)


@add_count
def correlated_rows(p, batch):
    kernel = batch["image"][:, :, 0, :2]
    return lax.conv_general_dilated(batch["x"][None], kernel, (1,), [(1, 1)], dimension_numbers=NHC)


@add_count
def power_that_counts_rows(p, batch):
    return batch["x"] ** (3 if len(batch["x"]) <= R else 5)


@add_count
def order_that_counts_rows(p, batch):
    x, y = (jnp.sin(batch["x"]), jnp.cos(batch["x"]))[:: 1 if len(batch["x"]) <= R else -1]
    return jnp.exp(x) * y


@add_count
def sum_for_every_row(p, batch):
    return jnp.full(len(batch["x"]), batch["x"].sum())


@add_count
def ratio_of_sums(p, batch):
    return batch["x"].sum(0) / batch["weight"].sum()


@add_count
def sum_and_one(p, batch):
    return batch["x"].sum() + 1.0


@add_count
def count_of_squared_sums(p, batch):
    total = batch["x"].sum(0)
    return total * total


@add_count
def count_of_products_of_rows(p, batch):
    return jax.nn.relu(batch["x"] @ batch["x"].T).sum()


@add_count
def count_of_a_loop(p, batch):
    """The second iteration squares a sum."""
    total = batch["x"].sum()
    return lax.fori_loop(0, 3, lambda _, c: (c[0] + total, c[1] + c[0] * c[0]), (0.0, 0.0))[1]


@add_count
def count_filled_with_ones(p, batch):
    return jnp.take(batch["x"].sum(0), jnp.array([0, 99]), mode="fill", fill_value=1.0)


@add_count
def count_of_the_number_of_rows_squared(p, batch):
    return jnp.full((3,), len(batch["x"]) ** 2)


# Losses whose rows are independent, which the proof does not know


@case("unknown")
def mean(p, batch, key):
    return split_loss_output((hidden(p, batch) ** 2).mean(), len(batch["x"]))


@values_case("unknown")
def maxima_of_pairs(p, batch):
    return hidden(p, batch).reshape(-1, 2, R).max(1)


@case("unknown")
def noise_on_parameters(p, batch, key):
    noise = jax.random.normal(key, p["w"].shape)
    return {"loss": ((batch["x"] @ (p["w"] + noise)).sum(), 1.0 * len(batch["x"]))}, None


@values_case("unknown")
def rows_by_number(p, batch):
    y = hidden(p, batch)
    return y[jnp.arange(len(y)), batch["label"]]


@values_case("unknown")
def all_rows_reversed(p, batch):
    return hidden(p, batch)[::-1]


@values_case("unknown")
def map_over_rows(p, batch):
    return lax.map(lambda x: jnp.tanh(x @ p["w"]), batch["x"])


@values_case("unknown")
def both_views_in_one_batch(p, batch):
    return jnp.concatenate([hidden(p, batch), hidden(p, {"x": -batch["x"]})])


@values_case("unknown")
def printed(p, batch):
    jax.debug.callback(lambda x: None, batch["x"])
    return hidden(p, batch)


def one_batch() -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: x[:R], make_batches())


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def is_proven(case: Case) -> bool:
    return rows_are_proven_independent(case.loss, shapes(case.params), shapes(one_batch()))


CONSTANTS = ("penalty", "norm")  # names of terms and counts that are the same for every batch


def split_error(case: Case) -> float:
    """Largest difference between what two batches as one give, and the sum of what each gives."""

    @jax.jit
    def compute(batch: Any) -> Any:
        def sums(params: Any) -> Any:
            terms, counts = case.loss(params, batch, jax.random.key(0))
            return {name: jnp.asarray(pair[0]) for name, pair in terms.items()}, (terms, counts)

        gradients, (terms, counts) = jax.jacrev(sums, has_aux=True)(case.params)
        counts = counts if isinstance(counts, dict) else {"counts": counts}
        return {**{name: (terms[name], gradients[name]) for name in terms}, **counts}

    parts = (slice(None), slice(R), slice(R, None))
    whole, *halves = (compute({k: x[rows] for k, x in make_batches().items()}) for rows in parts)
    errors = [0.0]
    for name, value in whole.items():
        for v, a, b in zip(*map(jax.tree.leaves, (value, *(half[name] for half in halves))), strict=True):
            expected = [a, b] if name in CONSTANTS else [a + b]
            errors += [float(np.abs(v - e).max() / (1 + np.abs(v).max())) for e in expected]
    return max(errors)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES["proven"])
def test_independent_rows_are_proven_and_sum_up(name: str):
    assert is_proven(CASES["proven"][name])
    tolerance = 2e-2 if "bfloat16" in name else 1e-5
    assert split_error(CASES["proven"][name]) < tolerance


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES["mixing"])
def test_what_mixes_rows_is_not_proven_and_does_not_sum_up(name: str):
    assert not is_proven(CASES["mixing"][name])
    assert split_error(CASES["mixing"][name]) > 1e-3


@pytest.mark.parametrize("name", CASES["unknown"])
def test_what_is_unknown_is_not_proven(name: str):
    assert not is_proven(CASES["unknown"][name])
    assert split_error(CASES["unknown"][name]) < 1e-5


def test_a_square_batch_does_not_hide_its_rows():
    """Such a loss exists only for as many rows as features."""
    square = Case(make_params(), of_values(lambda p, batch: hidden(p, batch) * batch["x"].T))
    assert not is_proven(square)


def test_two_numbers_of_rows_are_compared():
    """Code that counts rows is found if the numbers are on both sides of its threshold."""
    threshold = Case(
        make_params(), of_values(lambda p, batch: hidden(p, batch) ** (2 if len(batch["x"]) <= 2 * R else 3))
    )
    batch = shapes(one_batch())
    assert rows_are_proven_independent(threshold.loss, shapes(threshold.params), batch, factor=2)
    assert not rows_are_proven_independent(threshold.loss, shapes(threshold.params), batch, factor=3)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["CNN", "GPT", "contrastive", "first_row_for_all"])
def test_any_number_of_rows(name: str, rows: int):
    """Dims of one element are broadcast and squeezed, so that the traces of one row and of more differ."""
    case = (CASES["proven"] | CASES["mixing"])[name]
    batch = shapes({k: x[:rows] for k, x in make_batches().items()})
    expected = name in CASES["proven"] and rows > 1
    assert rows_are_proven_independent(case.loss, shapes(case.params), batch, factor=4) == expected


def broadcast_to_pairs(p, batch):
    return lax.broadcast_in_dim(batch["x"], (len(batch["x"]), 2, R), (1, 2))


def product_with_pairs(p, batch):
    return lax.broadcast_in_dim(batch["x"], (2, len(batch["x"]), R), (1, 2)) * batch["x"][:, None]


@pytest.mark.parametrize("values", [broadcast_to_pairs, product_with_pairs])
def test_a_single_row_does_not_hide_its_dim(values: Callable):
    """A dim of one row is broadcast where one of two rows is not."""
    batch = shapes({k: x[:1] for k, x in make_batches().items()})
    assert not rows_are_proven_independent(of_values(values), shapes(make_params()), batch)


def test_a_loss_that_fails_is_not_proven():
    def loss(p, batch, key):
        raise LookupError("no such field")

    assert not is_proven(Case(make_params(), loss))


def test_a_loss_for_one_number_of_rows_is_not_proven():
    def values(p, batch):
        assert len(batch["x"]) == R
        return hidden(p, batch)

    assert not is_proven(Case(make_params(), of_values(values)))


def test_an_unknown_primitive_is_not_proven():
    def values(p, batch):
        result = jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32)
        return hidden(p, batch) * jax.pure_callback(lambda x: x, result, batch["x"])

    assert not is_proven(Case(make_params(), of_values(values)))


def test_arrays_of_the_caller_are_constants():
    """The proof also runs while the caller is traced."""
    found = []

    @jax.jit
    def step(scale, row_scale):
        for factor in (scale, row_scale):
            case = Case(make_params(), of_values(lambda p, batch: hidden(p, batch) * factor))  # noqa: B023
            found.append(is_proven(case))
        return scale

    step(jnp.ones(R), jnp.ones((R, R)))
    assert found == [True, False]


# Name -> whether it is proven. The others draw from the key, or compare rows with each other.
MODULES = {
    "NamedMLP": True, "VisionTransformer": True, "ScannedMLP": True, "LSTM": True, "Mixer": True,
    "LinenTransformer": True,
    "GPT": False, "VAE": False, "Contrastive": False, "UNet": False, "LinenMLP": False,
}  # fmt: skip


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_of_users_on_a_mesh(name: str, layout: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "flax_modules")
    conformance = importlib.import_module("conformance")
    model_def = conformance.program(name, f"layout={layout}", *conformance.MODULES[name]).model_def
    batch = shapes(conformance.batch(0))

    def loss(params, batch, key):
        return model_def.loss(params, NOTHING, batch, key)[:2]

    assert rows_are_proven_independent(loss, model_def.params, batch) == MODULES[name]
