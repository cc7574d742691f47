"""Mixture of experts in place of the feed-forward layer: Switch, top-k as in Mixtral, shared experts.

Shapes: B batch, T tokens, D embed, F mlp, E experts, K choices of a token.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.sections.model import ModelConfig, MoeConfig
from jaxtrain.kernels.moe import DOWN, INNER, run_experts
from jaxtrain.kernels.moe.routing import Load, expert_capacity, route
from jaxtrain.nn.env import Env, constant, normal
from jaxtrain.nn.mlp import GATES, HIDDEN, MLP
from jaxtrain.sharding.rules import BATCH, CONTEXT, EXPERT, SEQUENCE

BALANCE = "balance"  # dim of the selection bias, which the optimizer updates by the load of the experts


class MoE(nnx.Module):
    """Mixture of experts: sum over a token's choices of gate * expert(x), plus shared experts. Float32 router."""

    def __init__(self, model: ModelConfig, moe: MoeConfig, *, std: float, out_std: float, env: Env, rngs: nnx.Rngs):
        self.env, self.moe, self.activation = env, moe, model.activation
        D, E, F = model.embed, moe.num_experts, model.mlp
        self.router = env.param(rngs, ("embed", None), (D, E), normal(std), exact=True)
        if moe.bias_update_rate is not None:
            # Always stored in float32: bfloat16 would lose the small steps.
            self.bias = env.param(rngs, (BALANCE,), (E,), constant(0.0), dtype=jnp.float32, exact=True)
        for name in self._inner():
            setattr(self, name, env.param(rngs, INNER, (E, D, F), normal(std)))
        # `mlp` first, as the grouped matmul reads it.
        self.down = env.param(rngs, DOWN, (E, F, D), normal(out_std))
        if moe.shared_experts:
            self.shared = MLP(
                D, moe.shared_experts * F, activation=model.activation, bias=False, std=std, out_std=out_std,
                env=env, rngs=rngs,
            )  # fmt: skip

    def __call__(
        self, x_BTD: jax.Array, segments_BT: jax.Array | None, order_BT: jax.Array | None, decoding: bool
    ) -> tuple[jax.Array, Load]:
        """Returns the output [B, T, D], sharded like the residual stream, and the load of the experts.

        Args:
            x_BTD: normed residual stream.
            segments_BT: int32 document ids; segment 0 is padding. None: no padding.
            order_BT: int32, increasing with the true order of the tokens of a sequence; None: order in the array.
            decoding: drop no choice, and compute with the weights where they are stored.
        """
        moe, sharder = self.moe, self.env.sharder
        # Replicated as in attention: sharded segments here would make attention gather its mask.
        is_token_BT = (
            jnp.ones(x_BTD.shape[:2], bool) if segments_BT is None else self.env.replicate_sequence(segments_BT) > 0
        )
        factor = None if decoding else moe.capacity_factor
        routing, load = route(
            self._logits(x_BTD), self.bias.get_value() if hasattr(self, "bias") else None, is_token_BT,
            top_k=moe.top_k, normalize=moe.top_k > 1 if moe.normalize_gates is None else moe.normalize_gates,
            capacity_factor=factor, order_BT=order_BT, sharder=sharder,
        )  # fmt: skip
        if decoding:
            out_BTD = self._all_experts(x_BTD, routing.expert_BTK, routing.gate_BTK)
        else:
            capacity = None if factor is None else expert_capacity(x_BTD.shape[1], moe.num_experts, moe.top_k, factor)
            weights = tuple(self._stored(getattr(self, name)) for name in self._inner()), self._stored(self.down)
            hidden = HIDDEN[self.activation]
            out_BTD = run_experts(x_BTD, routing, weights, hidden=hidden, capacity=capacity, sharder=sharder)
            out_BTD = self.env.constrain(out_BTD, BATCH, SEQUENCE, None)
        return out_BTD + self.shared(self.env.gather_sequence(x_BTD)) if hasattr(self, "shared") else out_BTD, load

    def _inner(self) -> tuple[str, ...]:
        return ("gate", "up") if self.activation in GATES else ("up",)

    def _stored(self, param: nnx.Param) -> jax.Array:
        return self.env.sharder.gather_weight(param.get_value(), param.names, self.env.policy.compute, gather=False)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns float32 [B, T, E]: bfloat16 would change the choices of about 0.1% of the tokens."""
        router_DE = self.env.sharder.gather_weight(self.router.get_value(), self.router.names, jnp.float32)
        return jnp.einsum("btd,de->bte", x_BTD.astype(jnp.float32), router_DE, precision="highest")

    def _all_experts(self, x_BTD: jax.Array, expert_BTK: jax.Array, gate_BTK: jax.Array) -> jax.Array:
        """Computes every expert on every token, for the few tokens of decoding, without sending weights."""
        dtype = self.env.policy.compute
        gate_BTE = jnp.sum(jax.nn.one_hot(expert_BTK, self.moe.num_experts) * gate_BTK[..., None], 2)

        def columns(name: str) -> jax.Array:
            out_EBTF = jnp.einsum("btd,edf->ebtf", x_BTD, getattr(self, name).get_value().astype(dtype))
            return self.env.constrain(out_EBTF, EXPERT, BATCH, CONTEXT, "mlp")

        hidden_EBTF = HIDDEN[self.activation](*(columns(name) for name in self._inner()))
        hidden_EBTF = hidden_EBTF * gate_BTE.transpose(2, 0, 1)[..., None].astype(dtype)
        return jnp.einsum("ebtf,efd->btd", hidden_EBTF, self.down.get_value().astype(dtype))
