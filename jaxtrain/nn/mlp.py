"""Feed-forward layer: SwiGLU, GeGLU (Shazeer 2020, arXiv 2002.05202) or GELU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.nn.env import Env, constant, normal
from jaxtrain.sharding.rules import BATCH, CONTEXT

GATES = {"swiglu": jax.nn.silu, "geglu": partial(jax.nn.gelu, approximate=True)}


def gated(activation: str, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns the hidden activations of a gated layer."""
    return GATES[activation](gate) * up


# Hidden activations as a function of the outputs of the first matmuls: (gate, up), or (up).
HIDDEN: dict[str, Callable[..., jax.Array]] = {name: partial(gated, name) for name in GATES}
HIDDEN["gelu"] = partial(jax.nn.gelu, approximate=True)


class MLP(nnx.Module):
    """down(act(gate x) * up x), or down(gelu(up x)); column-parallel up, row-parallel down."""

    def __init__(
        self, embed: int, mlp: int, *, activation: str, bias: bool, std: float, out_std: float, env: Env, rngs: nnx.Rngs
    ):
        self.env, self.activation = env, activation
        if activation in GATES:
            self.gate = env.param(rngs, ("embed", "mlp"), (embed, mlp), normal(std))
        self.up = env.param(rngs, ("embed", "mlp"), (embed, mlp), normal(std))
        # `embed` comes first, as in every dense weight: shards of a last dim are transposed after a gather.
        self.down = env.param(rngs, ("embed", "mlp"), (embed, mlp), normal(out_std))
        if bias:
            if activation in GATES:
                self.gate_bias = env.param(rngs, ("mlp",), (mlp,), constant(0.0))
            self.up_bias = env.param(rngs, ("mlp",), (mlp,), constant(0.0))
            self.down_bias = env.param(rngs, (None,), (embed,), constant(0.0))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D], sharded as the residual stream."""
        inner = ("gate", "up") if self.activation in GATES else ("up",)
        hidden_BTF = HIDDEN[self.activation](*(self._up_projection(x_BTD, name) for name in inner))
        out_BTD = jnp.einsum("btf,df->btd", hidden_BTF, self.env.weight(self.down))
        out_BTD = self.env.scatter_sequence(out_BTD)
        return out_BTD + self.env.weight(self.down_bias) if hasattr(self, "down_bias") else out_BTD

    def _up_projection(self, x_BTD: jax.Array, name: str) -> jax.Array:
        out_BTF = jnp.einsum("btd,df->btf", x_BTD, self.env.weight(getattr(self, name)))
        if hasattr(self, f"{name}_bias"):
            out_BTF = out_BTF + self.env.weight(getattr(self, f"{name}_bias"))
        return checkpoint_name(self.env.constrain(out_BTF, BATCH, CONTEXT, "mlp"), name)
