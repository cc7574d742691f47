"""Llama train step in plain JAX, written by hand: the baseline that the framework is compared with.

No nnx, no config, no framework code except the two kernels (attention and cross-entropy) that both sides use. Layers
are stacked and scanned, the optimizer is optax.adamw behind a global-norm clip, the state is donated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.kernels.attention import attention
from jaxtrain.kernels.cross_entropy import cross_entropy
from jaxtrain.sharding.sharder import Sharder

State = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """Sizes and options of the hand-written model."""

    theta: float = 10_000.0
    epsilon: float = 1e-6
    chunks: int = 8
    remat: bool = False
    dtype: Any = jnp.float32


@dataclass(frozen=True)
class Optimizer:
    """AdamW after a gradient clip, at a constant rate."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float

    def make(self) -> optax.GradientTransformation:
        """Matrices are decayed; norms and the embedding table are not."""
        mask = {
            "embed": False, "head": True, "final_norm": False,
            "layers": dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), True)
            | dict.fromkeys(("norm1", "norm2"), False),
        }  # fmt: skip
        adamw = optax.adamw(self.lr, self.beta1, self.beta2, self.epsilon, weight_decay=self.weight_decay, mask=mask)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


def from_framework(params: dict[str, Any]) -> dict[str, Any]:
    """Copies the framework's initial parameters under the names of this file."""
    layers = params["layers"]
    mine = {
        "embed": params["embed"]["table"], "head": params["head"], "final_norm": params["final_norm"]["scale"],
        "layers": {name: layers["attention"][name] for name in "qkvo"}
        | {name: layers["mlp"][name] for name in ("gate", "up", "down")}
        | {"norm1": layers["attention_norm"]["scale"], "norm2": layers["mlp_norm"]["scale"]},
    }  # fmt: skip
    return jax.tree.map(jnp.copy, mine)


def make_step(shape: Shape, tx: optax.GradientTransformation, sharder: Sharder, gathered: bool) -> Callable:
    """(state, batch) -> (state, metrics), jitted with the state donated.

    Args:
        sharder: for the kernels; the model uses only its mesh.
        gathered: FSDP: a layer's weights are gathered before use.
    """
    mesh: Mesh = sharder.mesh
    rows = PartitionSpec(sharder.axes("batch") or None)

    def by_rows(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rows))

    def use(w):
        w = w.astype(shape.dtype)
        return jax.lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec())) if gathered else w

    def norm(x, scale):
        x32 = x.astype(jnp.float32)
        return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + shape.epsilon) * scale).astype(x.dtype)

    def rotate(x, cos, sin):
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1).astype(x.dtype)

    def loss(params, batch):
        half = params["layers"]["q"].shape[-1] // 2
        angle = batch["positions"][:, :, None, None].astype(jnp.float32)
        angle = angle * shape.theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
        cos, sin = jnp.cos(angle), jnp.sin(angle)

        def layer(x, w):
            h = norm(x, w["norm1"])
            q = rotate(jnp.einsum("btd,dhk->bthk", h, use(w["q"])), cos, sin)
            k = rotate(jnp.einsum("btd,dhk->bthk", h, use(w["k"])), cos, sin)
            v = jnp.einsum("btd,dhk->bthk", h, use(w["v"]))
            out = attention(q, k, v, segments_BT=batch["segments"], causal=True, sharder=sharder)
            x = by_rows(x + jnp.einsum("bthk,dhk->btd", out, use(w["o"])))
            h = norm(x, w["norm2"])
            hidden = jax.nn.silu(h @ use(w["gate"])) * (h @ use(w["up"]))
            return by_rows(x + hidden @ use(w["down"]).T), None

        x = by_rows(jnp.take(params["embed"], batch["tokens"], axis=0, mode="clip").astype(shape.dtype))
        body = jax.checkpoint(layer, prevent_cse=False) if shape.remat else layer
        x, _ = jax.lax.scan(body, x, params["layers"])
        x, head = norm(x, params["final_norm"]), params["head"].astype(shape.dtype)
        terms = cross_entropy(x, head, batch["targets"], batch["weights"], chunks=shape.chunks, sharder=sharder)
        total, weight = terms["cross_entropy"]
        return total / weight

    def step(state: State, batch):
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "grad_norm": optax.global_norm(grads)}
        return {"params": params, "opt_state": opt_state}, metrics

    return jax.jit(step, donate_argnums=0)
