"""Mixture of experts in place of the feed-forward layer: Switch, top-k as in Mixtral, shared experts.

Shapes: B batch, T tokens, D embed, F mlp, E experts, K choices of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.schema import ModelConfig
from jaxtrain.config.schema import MoeConfig as Options
from jaxtrain.kernels.moe import DOWN, INNER, experts
from jaxtrain.kernels.moe.routing import Load, places, route
from jaxtrain.nn.env import Env, constant, normal
from jaxtrain.nn.mlp import GATES, HIDDEN, MLP
from jaxtrain.sharding.rules import BATCH, CONTEXT, EXPERT, SEQUENCE

BALANCE = "balance"  # dim of the selection bias: marks a parameter that the optimizer moves by its load alone


class MoE(nnx.Module):
    """sum over a token's choices of gate * expert(x), plus the shared experts. The router computes in float32."""

    def __init__(self, model: ModelConfig, moe: Options, *, std: float, out_std: float, env: Env, rngs: nnx.Rngs):
        self.env, self.moe, self.activation = env, moe, model.activation
        D, E, F = model.embed, moe.num_experts, model.mlp
        self.router = env.param(rngs, ("embed", None), (D, E), normal(std), exact=True)
        if moe.bias_update_rate is not None:
            # Stored in float32 by any policy: in bfloat16 the small steps would be lost.
            self.bias = env.param(rngs, (BALANCE,), (E,), constant(0.0), dtype=jnp.float32, exact=True)
        for name in self._inner():
            setattr(self, name, env.param(rngs, INNER, (E, D, F), normal(std)))
        # As the grouped matmul reads it, `mlp` first.
        self.down = env.param(rngs, DOWN, (E, F, D), normal(out_std))
        if moe.shared_experts:
            self.shared = MLP(
                D,
                moe.shared_experts * F,
                activation=model.activation,
                bias=False,
                std=std,
                out_std=out_std,
                env=env,
                rngs=rngs,
            )

    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None, order_BT: jax.Array | None, decoding: bool
    ) -> tuple[jax.Array, Load]:
        """[B, T, D] on the residual stream's placement -> the same, and the experts' load.

        Args:
            x_BTD: normed residual stream.
            segments_BT: int32 document ids; tokens of segment 0 are padding. None: every one is a token.
            order_BT: int32, rising with the true order of the tokens of a sequence; None: that of the array.
            decoding: no choice is dropped, and the weights stay where they are stored.
        """
        moe, sharder = self.moe, self.env.sharder
        # Whole on every shard, as attention has them: routing, on shards, would have attention gather its mask.
        is_token_BT = (
            jnp.ones(x_BTD.shape[:2], bool) if segments_BT is None else self.env.replicate_sequence(segments_BT) > 0
        )
        capacity = None if decoding else moe.capacity_factor
        routing, load = route(
            self._logits(x_BTD), self.bias.get_value() if hasattr(self, "bias") else None, is_token_BT,
            top_k=moe.top_k, normalize=moe.top_k > 1 if moe.normalize_gates is None else moe.normalize_gates,
            capacity=capacity, order_BT=order_BT, sharder=sharder,
        )  # fmt: skip
        if decoding:
            out_BTD = self._everywhere(x_BTD, routing.expert_BTK, routing.gate_BTK)
        else:
            of_row = None if capacity is None else places(x_BTD.shape[1], moe.num_experts, moe.top_k, capacity)
            weights = tuple(self._shards(getattr(self, name)) for name in self._inner()), self._shards(self.down)
            hidden = HIDDEN[self.activation]
            out_BTD = experts(x_BTD, routing, weights, hidden=hidden, places=of_row, sharder=sharder)
            out_BTD = self.env.constrain(out_BTD, BATCH, SEQUENCE, None)
        return out_BTD + self.shared(self.env.gather_sequence(x_BTD)) if hasattr(self, "shared") else out_BTD, load

    def _inner(self) -> tuple[str, ...]:
        return ("gate", "up") if self.activation in GATES else ("up",)

    def _shards(self, param: nnx.Param) -> jax.Array:
        return self.env.sharder.gather_weight(param.get_value(), param.names, self.env.policy.compute, gather=False)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 [B, T, E]: bfloat16 would change the choice of some tokens in a thousand."""
        router_DE = self.env.sharder.gather_weight(self.router.get_value(), self.router.names, jnp.float32)
        return jnp.einsum("btd,de->bte", x_BTD.astype(jnp.float32), router_DE, precision="highest")

    def _everywhere(self, x_BTD: jax.Array, expert_BTK: jax.Array, gate_BTK: jax.Array) -> jax.Array:
        """Every expert on every token, for the few tokens of decoding: no weight moves, whatever the batch."""
        dtype = self.env.policy.compute
        gate_BTE = jnp.sum(jax.nn.one_hot(expert_BTK, self.moe.num_experts) * gate_BTK[..., None], 2)

        def columns(name: str) -> jax.Array:
            out_EBTF = jnp.einsum("btd,edf->ebtf", x_BTD, getattr(self, name).get_value().astype(dtype))
            return self.env.constrain(out_EBTF, EXPERT, BATCH, CONTEXT, "mlp")

        hidden_EBTF = HIDDEN[self.activation](*(columns(name) for name in self._inner()))
        hidden_EBTF = hidden_EBTF * gate_BTE.transpose(2, 0, 1)[..., None].astype(dtype)
        return jnp.einsum("ebtf,efd->btd", hidden_EBTF, self.down.get_value().astype(dtype))
