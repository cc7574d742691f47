"""A user's own decoder whose q, k, v and whose gate, up are one weight each, and one matmul.

The parts lie on a dim of their own that no rule names, so that shards of heads and of hidden units hold whole parts:
q, k, v as [embed, kv_heads, group + 2, head_dim], gate and up as [embed, 2, mlp].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config.schema import LossConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.kernels.attention import attention
from jaxtrain.models.decoder import Decoder
from jaxtrain.nn.env import normal
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.nn.rope import rotate
from jaxtrain.nn.stack import stacked
from jaxtrain.sharding.rules import BATCH, CONTEXT


class Block(nnx.Module):
    def __init__(self, model: ModelConfig, *, env, rngs):
        self.env, self.kv_heads = env, model.kv_heads or model.heads
        D, F, K, size = model.embed, model.mlp, self.kv_heads, model.embed // model.heads
        group, init, norm = (
            model.heads // K,
            normal(0.02),
            {"epsilon": model.norm_epsilon, "offset": False, "env": env, "rngs": rngs},
        )
        self.attention_norm, self.mlp_norm = RMSNorm(D, **norm), RMSNorm(D, **norm)
        self.qkv = env.param(rngs, ("embed", "kv_heads", None, "head_dim"), (D, K, group + 2, size), init)
        self.o = env.param(rngs, ("embed", "heads", "head_dim"), (D, model.heads, size), init)
        self.gate_up = env.param(rngs, ("embed", None, "mlp"), (D, 2, F), init)
        self.down = env.param(rngs, ("embed", "mlp"), (D, F), init)

    def __call__(self, x_BTD, turn, positions_BT, segments_BT, window, cache=None, order_BT=None):
        env = self.env
        qkv_BTKGH = jnp.einsum("btd,dkgh->btkgh", env.gather_sequence(self.attention_norm(x_BTD)), env.weight(self.qkv))
        qkv_BTKGH = env.constrain(qkv_BTKGH, BATCH, CONTEXT, "kv_heads", None, None)
        q_BTHD = qkv_BTKGH[..., :-2, :].reshape(*x_BTD.shape[:2], -1, qkv_BTKGH.shape[-1])
        q_BTHD = env.constrain(q_BTHD, BATCH, CONTEXT, "heads", None)
        out_BTHD = attention(
            rotate(q_BTHD, *turn), rotate(qkv_BTKGH[..., -2, :], *turn), qkv_BTKGH[..., -1, :], causal=True,
            segments_BT=segments_BT, positions_BT=positions_BT, window=window,
            kernel=env.attention, context_parallel=env.context_parallel, sharder=env.sharder,
        )  # fmt: skip
        x_BTD = x_BTD + env.scatter_sequence(jnp.einsum("bthk,dhk->btd", out_BTHD, env.weight(self.o)))
        both_BTGF = jnp.einsum("btd,dgf->btgf", env.gather_sequence(self.mlp_norm(x_BTD)), env.weight(self.gate_up))
        both_BTGF = env.constrain(both_BTGF, BATCH, CONTEXT, None, "mlp")
        hidden_BTF = jax.nn.silu(both_BTGF[:, :, 0]) * both_BTGF[:, :, 1]
        return x_BTD + env.scatter_sequence(jnp.einsum("btf,df->btd", hidden_BTF, env.weight(self.down))), None, None


class Fused(Decoder):
    def __init__(self, vocab: int, *, env, rngs, **sizes):
        model = ModelConfig(**sizes)
        super().__init__(model, LossConfig(), vocab, env=env, rngs=rngs)
        self.layers = stacked(lambda rngs: Block(model, env=env, rngs=rngs), model.layers, rngs)
