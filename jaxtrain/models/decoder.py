"""A decoder-only transformer: Llama 2/3, Mistral, Mixtral, Qwen 2/3, Gemma 2/3, OLMo 2, Granite and GPT-2 by config.

Shapes: B batch, T tokens, D embed, H heads, K kv_heads, F mlp, V vocab, L layers. No mesh axis is named here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config.schema import LossConfig, ModelConfig
from jaxtrain.kernels.cross_entropy import cross_entropy
from jaxtrain.kernels.moe.routing import Load
from jaxtrain.losses.load_balancing import balance, load_metrics, router_z
from jaxtrain.nn.attention import Attention, Cache
from jaxtrain.nn.embed import Embed
from jaxtrain.nn.env import Env, normal
from jaxtrain.nn.mlp import MLP
from jaxtrain.nn.moe import MoE
from jaxtrain.nn.norm import LayerNorm, RMSNorm
from jaxtrain.nn.rope import frequencies, rotation
from jaxtrain.nn.stack import Layers, scan, stacked
from jaxtrain.sharding.rules import BATCH, ROWS, SEQUENCE, kv_copies

Terms = dict[str, tuple[jax.Array, jax.Array]]
Counts = dict[str, jax.Array]
Turn = tuple[jax.Array, jax.Array] | None  # cosine and sine of every position; None where positions are learned


def norm_of(model: ModelConfig) -> Callable[..., nnx.Module]:
    """The norm that a model has everywhere: called with its size, `env` and `rngs`."""
    if model.norm == "layernorm":
        return partial(LayerNorm, epsilon=model.norm_epsilon)
    return partial(RMSNorm, epsilon=model.norm_epsilon, offset=model.norm == "gemma_rmsnorm")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); norms after the branches, besides or instead, and a factor on
    them where configured."""

    def __init__(self, model: ModelConfig, *, env: Env, rngs: nnx.Rngs):
        self.env, self.scale = env, model.residual_multiplier
        kv_heads, head_dim = model.kv_heads or model.heads, model.head_dim or model.embed // model.heads
        norm = norm_of(model)
        std, out_std = model.init_std, model.init_std / math.sqrt(2 * model.layers)
        if model.norm_placement != "post":
            self.attention_norm = norm(model.embed, env=env, rngs=rngs)
        self.attention = Attention(
            model.embed, model.heads, kv_heads, head_dim,
            bias="qkv" in model.biases, output_bias="output" in model.biases,
            norm=norm if model.qk_norm != "none" else None, norm_whole=model.qk_norm == "full",
            scale=model.attention_scale, softcap=model.attention_softcap, std=std, out_std=out_std, env=env, rngs=rngs,
        )  # fmt: skip
        if model.norm_placement != "post":
            self.mlp_norm = norm(model.embed, env=env, rngs=rngs)
        if model.moe is None:
            self.mlp = MLP(
                model.embed, model.mlp,
                activation=model.activation, bias="mlp" in model.biases, std=std, out_std=out_std, env=env, rngs=rngs,
            )  # fmt: skip
        else:
            self.moe = MoE(model, model.moe, std=std, out_std=out_std, env=env, rngs=rngs)
        if model.norm_placement != "pre":
            self.attention_post_norm = norm(model.embed, env=env, rngs=rngs)
            self.mlp_post_norm = norm(model.embed, env=env, rngs=rngs)

    def __call__(
        self,
        x_BTD: jax.Array,
        turn: Turn,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        window: int | None,
        cache: Cache | None = None,
        order_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None, Load | None]:
        """The residual stream after this block, the extended cache if one came in, and the load of experts."""
        x_BTD = checkpoint_name(x_BTD, "input")
        branch = self.env.enter(self._normed(x_BTD, "attention_norm"))
        branch, cache = self.attention(branch, turn, positions_BT, segments_BT, window, cache)
        x_BTD = self._residual(x_BTD, branch, "attention_post_norm")
        x_normed_BTD, load = self._normed(x_BTD, "mlp_norm"), None
        if hasattr(self, "moe"):
            branch, load = self.moe(x_normed_BTD, segments_BT, order_BT, decoding=cache is not None)
        else:
            branch = self.mlp(self.env.enter(x_normed_BTD))
        return self._residual(x_BTD, branch, "mlp_post_norm"), cache, load

    def _normed(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return getattr(self, name)(x_BTD) if hasattr(self, name) else x_BTD

    def _residual(self, x_BTD: jax.Array, branch_BTD: jax.Array, post_norm: str) -> jax.Array:
        branch_BTD = self._normed(branch_BTD, post_norm)
        branch_BTD = branch_BTD if self.scale == 1 else branch_BTD * self.scale
        return checkpoint_name(self.env.constrain(x_BTD + branch_BTD, BATCH, SEQUENCE, None), "residual")


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm, head. `loss` trains it, `decode` extends a cache.

    `loss` is `begin`, `through` and `finish`, of which a pipeline's stages each have a part.
    """

    def __init__(self, model: ModelConfig, loss: LossConfig, vocab: int, *, env: Env, rngs: nnx.Rngs):
        self.env, self.model, self.terms, self.vocab = env, model, loss, vocab
        self.embed = Embed(vocab, model.embed, tied=model.tie_embeddings, std=model.init_std, env=env, rngs=rngs)
        if model.learned_positions is not None:
            self.positions = Embed(
                model.learned_positions, model.embed, tied=False, std=model.init_std, env=env, rngs=rngs
            )
        self.layers = stacked(lambda rngs: Block(model, env=env, rngs=rngs), model.layers, rngs)
        self.final_norm = norm_of(model)(model.embed, env=env, rngs=rngs)
        if not model.tie_embeddings:
            self.head = env.param(rngs, ("embed", "vocab"), (model.embed, vocab), normal(model.init_std))

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Any]:
        """Last hidden states [B, T, D] for the head, and the cache (k and v [L, B, S, K, D], extended by T)."""
        x_BTD, cache, _ = self._blocks(self._embedded(tokens_BT, positions_BT), positions_BT, segments_BT, cache)
        return self._normed(x_BTD), cache

    def loss(self, batch: dict[str, Any], key: jax.Array) -> Terms | tuple[Terms, Counts]:
        """Loss terms of a batch (tokens, targets, positions, segments, weights, all [B, T]) as (sum, weight).

        With experts also their load; and the batch may hold `statistics`, as of `statistics`.
        """
        x_BTD, terms, counts = self.through(self.begin(batch, key), batch, key)
        terms = self.finish(x_BTD, batch, key) | terms
        return (terms, counts) if counts else terms

    def begin(self, batch: dict[str, Any], key: jax.Array) -> jax.Array:
        """Embeds tokens: input of the first layer, [B, T, D]."""
        del key  # no dropout
        return self._embedded(batch["tokens"], batch["positions"])

    def through(
        self, x_BTD: jax.Array, batch: dict[str, Any], key: jax.Array, layers: Layers | None = None
    ) -> tuple[jax.Array, Terms, Counts]:
        """Through the layers of `self.layers`: all of them, or those that a pipeline stage has.

        Returns what goes into the next layer, and the layers' own terms and counts.
        """
        del key
        x_BTD, _, load = self._blocks(x_BTD, batch["positions"], batch["segments"], layers=layers)
        return (x_BTD, {}, {}) if load is None else (x_BTD, *self._load_terms(load, batch, layers))

    def finish(self, x_BTD: jax.Array, batch: dict[str, Any], key: jax.Array) -> Terms:
        """The terms that what comes out of the last layer has."""
        del key
        return cross_entropy(
            self._normed(x_BTD), self._head(), batch["targets"], batch["weights"],
            tied=self.model.tie_embeddings, chunks=self.terms.vocab_chunks, z_loss=self.terms.z_loss,
            label_smoothing=self.terms.label_smoothing, softcap=self.model.logits_softcap, sharder=self.env.sharder,
        )  # fmt: skip

    def statistics(self, batch: dict[str, Any], key: jax.Array) -> Counts | None:
        """Returns statistics that `loss` needs of the whole global batch: choices [layers, experts], for the balance
        loss.
        """
        if self.model.moe is None or not self.model.moe.load_balance_loss:
            return None
        return self.statistics_of(self.through(self.begin(batch, key), batch, key)[2])

    def statistics_of(self, counts: Counts) -> Counts:
        """The same from the counts of all layers over the global batch."""
        return {"chosen": counts["chosen"]}

    def metrics(self, counts: Counts) -> dict[str, jax.Array]:
        """Metrics of a step from the counts of `loss`, added up over its global batch."""
        return load_metrics(counts["chosen"], counts["placed"])

    def _embedded(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x_BTD, factor = self.embed(tokens_BT), self.model.embed_multiplier
        x_BTD = x_BTD * jnp.asarray(factor, x_BTD.dtype) if factor != 1 else x_BTD
        return x_BTD if self.model.learned_positions is None else x_BTD + self.positions(positions_BT)

    def _normed(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.final_norm(x_BTD)
        if self.model.logits_divisor != 1:  # logits are linear in it
            x_BTD = x_BTD / self.model.logits_divisor
        return self.env.constrain(x_BTD, BATCH, SEQUENCE, None)

    @property
    def period(self) -> int:
        """Layers that only go together."""
        return self.model.sliding_window_pattern

    def _blocks(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        cache: Cache | None = None,
        layers: Layers | None = None,
    ) -> tuple[jax.Array, Any, Load | None]:
        """Runs the blocks: returns the last one's output, the extended cache, and the load by layer."""
        model = self.model
        turn, near = self._turns(positions_BT)
        # Of the tokens of a row, whatever order their array is in.
        order_BT = None if segments_BT is None else segments_BT * x_BTD.shape[1] + positions_BT
        whole_BT = self.env.whole(positions_BT)
        segments_BT = None if segments_BT is None else self.env.whole(segments_BT)
        period = self.period

        def step(block: Block, x_BTD: jax.Array, cache: Cache | None, index: int) -> tuple:
            last_of_group = period > 1 and index == period - 1
            window = None if last_of_group else model.sliding_window
            x_BTD, *rest = block(x_BTD, near if window else turn, whole_BT, segments_BT, window, cache, order_BT)
            return x_BTD, tuple(rest)

        x_BTD, (cache, load) = scan(self.layers, step, x_BTD, cache, env=self.env, period=period, layers=layers)
        return x_BTD, cache, load

    def _turns(self, positions_BT: jax.Array) -> tuple[Turn, Turn]:
        """The rotations of layers without and with a window."""
        model = self.model
        if model.learned_positions is not None:
            return None, None
        head_dim = model.head_dim or model.embed // model.heads
        turn = rotation(positions_BT, frequencies(head_dim, model.rope_theta, model.rope_scaling))
        if model.sliding_window_rope_theta is None:
            return turn, turn
        return turn, rotation(positions_BT, frequencies(head_dim, model.sliding_window_rope_theta, None))

    def _load_terms(self, load: Load, batch: dict[str, Any], layers: Layers | None) -> tuple[Terms, Counts]:
        """Terms and counts of these layers' experts."""
        terms: Terms = {}
        tokens = jnp.sum(batch["segments"] > 0, dtype=jnp.int32).astype(jnp.float32)
        moe = self.model.moe
        assert moe is not None
        if moe.load_balance_loss:
            chosen_LE = batch["statistics"]["chosen"] if "statistics" in batch else load.chosen_E
            if layers is not None:
                chosen_LE = chosen_LE[layers.number]
            terms["balance"] = (moe.load_balance_loss * balance(load, chosen_LE, self.model.layers), tokens)
        if moe.router_z_loss:
            terms["router_z"] = (moe.router_z_loss * router_z(load, self.model.layers), tokens)
        return terms, {"chosen": load.chosen_E, "placed": load.placed}

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """float32 logits [B, T, V] of hidden states; for generation, on few tokens."""
        head = self._head().astype(x_BTD.dtype)
        equation = "btd,vd->btv" if self.model.tie_embeddings else "btd,dv->btv"
        logits_BTV = jnp.einsum(equation, x_BTD, head, preferred_element_type=jnp.float32)
        cap = self.model.logits_softcap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """A cache of `length` tokens for `batch` sequences, k and v [L, B, S, K, D] in the compute dtype."""
        model = self.model
        kv_heads, head_dim = model.kv_heads or model.heads, model.head_dim or model.embed // model.heads
        kv_heads *= kv_copies(model.heads, kv_heads, self.env.sharder.size("kv_heads"))
        zeros = jnp.zeros((model.layers, batch, length, kv_heads, head_dim), self.env.policy.compute)
        sharder = self.env.sharder
        zeros = sharder.place(zeros, sharder.placed(("layers", ROWS, None, "kv_heads", None), zeros.shape))
        return Cache(zeros, zeros, jnp.zeros((model.layers, batch), jnp.int32))

    def decode(self, tokens_BT: jax.Array, cache: Cache, length: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        """float32 logits [B, V] after the last of T new tokens, and the extended cache.

        Of right-padded tokens only the first `length` (int32, one or [B]) count: the logits are those of token
        `length - 1`, and the next call overwrites the rest. No row sees what another one's length is.
        """
        start = cache.length
        count, width = tokens_BT.shape
        length = jnp.broadcast_to(jnp.asarray(width if length is None else length, jnp.int32), (count,))
        positions_BT = start[0][:, None] + jnp.arange(width)
        x_BTD, longer = self.hidden(tokens_BT, positions_BT, None, cache)
        last_B1D = jnp.take_along_axis(x_BTD, length[:, None, None] - 1, axis=1)
        return self.logits(last_B1D)[:, 0], longer._replace(length=start + length)

    def _head(self) -> jax.Array:
        return self.embed.table.get_value() if self.model.tie_embeddings else self.head.get_value()
