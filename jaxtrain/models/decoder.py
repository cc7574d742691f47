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

from jaxtrain.config.schema import LossConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.kernels.cross_entropy import cross_entropy
from jaxtrain.kernels.moe.routing import Load
from jaxtrain.losses.load_balancing import load_balance_loss, load_metrics, router_z_loss
from jaxtrain.models.spec import DECODER_SPEC
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
Rotation = tuple[jax.Array, jax.Array] | None  # cosine and sine of every position; None if positions are learned


def norm_of(model: ModelConfig) -> Callable[..., nnx.Module]:
    """Returns the constructor of the model's norms, which takes a size, `env` and `rngs`."""
    if model.norm == "layernorm":
        return partial(LayerNorm, epsilon=model.norm_epsilon)
    return partial(RMSNorm, epsilon=model.norm_epsilon, offset=model.norm == "gemma_rmsnorm")


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    By config the norms come after the branches, or both before and after, and branches are multiplied by a factor.
    """

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
            norm=norm if model.qk_norm != "none" else None, full_norm=model.qk_norm == "full",
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
        rotation: Rotation,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        window: int | None,
        cache: Cache | None = None,
        order_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None, Load | None]:
        """Returns the residual stream after this block, the extended cache if there is one, and the experts' load."""
        x_BTD = checkpoint_name(x_BTD, "input")
        branch = self.env.gather_sequence(self._normed(x_BTD, "attention_norm"))
        branch, cache = self.attention(branch, rotation, positions_BT, segments_BT, window, cache)
        x_BTD = self._residual(x_BTD, branch, "attention_post_norm")
        x_normed_BTD, load = self._normed(x_BTD, "mlp_norm"), None
        if hasattr(self, "moe"):
            branch, load = self.moe(x_normed_BTD, segments_BT, order_BT, decoding=cache is not None)
        else:
            branch = self.mlp(self.env.gather_sequence(x_normed_BTD))
        return self._residual(x_BTD, branch, "mlp_post_norm"), cache, load

    def _normed(self, x_BTD: jax.Array, name: str) -> jax.Array:
        return getattr(self, name)(x_BTD) if hasattr(self, name) else x_BTD

    def _residual(self, x_BTD: jax.Array, branch_BTD: jax.Array, post_norm: str) -> jax.Array:
        branch_BTD = self._normed(branch_BTD, post_norm)
        branch_BTD = branch_BTD if self.scale == 1 else branch_BTD * self.scale
        return checkpoint_name(self.env.constrain(x_BTD + branch_BTD, BATCH, SEQUENCE, None), "residual")


class Decoder(nnx.Module):
    """Decoder-only transformer: embedding, stacked blocks, final norm, head.

    `loss` is `embed_inputs`, `run_layers` and `head_loss`, the methods of pipeline stages. `decode` extends a cache.
    """

    spec = DECODER_SPEC
    rows_are_independent = True  # terms that look at other rows get them from `statistics`

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
        """Returns hidden states [B, T, D] for the head, and the cache (k and v [L, B, S, K, D], extended by T)."""
        x_BTD, cache, _ = self._run_blocks(self._embed(tokens_BT, positions_BT), positions_BT, segments_BT, cache)
        return self._normalised(x_BTD), cache

    def loss(self, batch: dict[str, Any], key: jax.Array) -> Terms | tuple[Terms, Counts]:
        """Returns the loss terms of a batch as (sum, weight), and with experts the counts of their load.

        Args:
            batch: tokens, targets, positions, segments and weights, all [B, T]; optional `statistics` of the whole
                global batch (see the method `statistics`).
            key: not used; the decoder has no dropout.
        """
        x_BTD, terms, counts = self.run_layers(self.embed_inputs(batch, key), batch, key)
        terms = self.head_loss(x_BTD, batch, key) | terms
        return (terms, counts) if counts else terms

    def embed_inputs(self, batch: dict[str, Any], key: jax.Array) -> jax.Array:
        """Embeds tokens. Returns the input of the first layer, [B, T, D]."""
        del key  # no dropout
        return self._embed(batch["tokens"], batch["positions"])

    def run_layers(
        self, x_BTD: jax.Array, batch: dict[str, Any], key: jax.Array, layers: Layers | None = None
    ) -> tuple[jax.Array, Terms, Counts]:
        """Runs the layers in `self.layers`: all of them, or those of a pipeline stage.

        Returns the input of the next layer, and the terms and counts of these layers.
        """
        del key
        x_BTD, _, load = self._run_blocks(x_BTD, batch["positions"], batch["segments"], layers=layers)
        return (x_BTD, {}, {}) if load is None else (x_BTD, *self._load_terms(load, batch, layers))

    def head_loss(self, x_BTD: jax.Array, batch: dict[str, Any], key: jax.Array) -> Terms:
        """Returns the terms of the last layer's output."""
        del key
        return cross_entropy(
            self._normalised(x_BTD), self._head(), batch["targets"], batch["weights"],
            tied=self.model.tie_embeddings, chunks=self.terms.vocab_chunks, z_loss=self.terms.z_loss,
            label_smoothing=self.terms.label_smoothing, softcap=self.model.logits_softcap, sharder=self.env.sharder,
        )  # fmt: skip

    def statistics(self, batch: dict[str, Any], key: jax.Array) -> Counts | None:
        """Returns sums that `loss` needs of the whole global batch: choices [layers, experts], for the balance loss."""
        if self.model.moe is None or not self.model.moe.load_balance_loss:
            return None
        return self.statistics_from_counts(self.run_layers(self.embed_inputs(batch, key), batch, key)[2])

    def statistics_from_counts(self, counts: Counts) -> Counts:
        """Returns the statistics from the counts of all layers over the global batch."""
        return {"chosen": counts["chosen"]}

    def metrics(self, counts: Counts) -> dict[str, jax.Array]:
        """Returns metrics of a step from the counts of `loss`, summed over the global batch."""
        return load_metrics(counts["chosen"], counts["placed"])

    def _embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        x_BTD, factor = self.embed(tokens_BT), self.model.embed_multiplier
        x_BTD = x_BTD * jnp.asarray(factor, x_BTD.dtype) if factor != 1 else x_BTD
        return x_BTD if self.model.learned_positions is None else x_BTD + self.positions(positions_BT)

    def _normalised(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.final_norm(x_BTD)
        if self.model.logits_divisor != 1:  # logits are linear in the hidden states
            x_BTD = x_BTD / self.model.logits_divisor
        return self.env.constrain(x_BTD, BATCH, SEQUENCE, None)

    @property
    def layers_per_group(self) -> int:
        """Number of layers after which the pattern of windows repeats; a pipeline stage holds whole groups."""
        return self.model.sliding_window_pattern

    def _run_blocks(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array | None,
        cache: Cache | None = None,
        layers: Layers | None = None,
    ) -> tuple[jax.Array, Any, Load | None]:
        """Runs the blocks. Returns the last one's output, the extended cache, and the load by layer."""
        model, group = self.model, self.layers_per_group
        rotation, window_rotation = self._rotations(positions_BT)
        # Order of the tokens in a row, whatever the order in memory.
        order_BT = None if segments_BT is None else segments_BT * x_BTD.shape[1] + positions_BT
        positions_BT = self.env.replicate_sequence(positions_BT)
        segments_BT = None if segments_BT is None else self.env.replicate_sequence(segments_BT)

        def step(block: Block, x_BTD: jax.Array, cache: Cache | None, index: int) -> tuple:
            is_global = group > 1 and index == group - 1
            window = None if is_global else model.sliding_window
            turn = window_rotation if window else rotation
            x_BTD, *rest = block(x_BTD, turn, positions_BT, segments_BT, window, cache, order_BT)
            return x_BTD, tuple(rest)

        x_BTD, (cache, load) = scan(self.layers, step, x_BTD, cache, env=self.env, group=group, layers=layers)
        return x_BTD, cache, load

    def _rotations(self, positions_BT: jax.Array) -> tuple[Rotation, Rotation]:
        """Returns the rotations of layers without and with a window."""
        model = self.model
        if model.learned_positions is not None:
            return None, None
        head_dim = model.head_dim or model.embed // model.heads
        everywhere = rotation(positions_BT, frequencies(head_dim, model.rope_theta, model.rope_scaling))
        if model.sliding_window_rope_theta is None:
            return everywhere, everywhere
        return everywhere, rotation(positions_BT, frequencies(head_dim, model.sliding_window_rope_theta, None))

    def _load_terms(self, load: Load, batch: dict[str, Any], layers: Layers | None) -> tuple[Terms, Counts]:
        """Returns terms and counts of the experts of these layers."""
        terms: Terms = {}
        tokens = jnp.sum(batch["segments"] > 0, dtype=jnp.int32).astype(jnp.float32)
        moe = self.model.moe
        assert moe is not None
        if moe.load_balance_loss:
            chosen_LE = batch["statistics"]["chosen"] if "statistics" in batch else load.chosen_E
            if layers is not None:
                chosen_LE = chosen_LE[layers.number]
            terms["balance"] = (moe.load_balance_loss * load_balance_loss(load, chosen_LE, self.model.layers), tokens)
        if moe.router_z_loss:
            terms["router_z"] = (moe.router_z_loss * router_z_loss(load, self.model.layers), tokens)
        return terms, {"chosen": load.chosen_E, "placed": load.placed}

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns float32 logits [B, T, V] of hidden states. For generation, on few tokens."""
        head = self._head().astype(x_BTD.dtype)
        equation = "btd,vd->btv" if self.model.tie_embeddings else "btd,dv->btv"
        logits_BTV = jnp.einsum(equation, x_BTD, head, preferred_element_type=jnp.float32)
        cap = self.model.logits_softcap
        return logits_BTV if cap is None else cap * jnp.tanh(logits_BTV / cap)

    def empty_cache(self, batch: int, length: int) -> Cache:
        """Returns a cache of `length` tokens for `batch` sequences, k and v [L, B, S, K, D] in the compute dtype."""
        model = self.model
        kv_heads, head_dim = model.kv_heads or model.heads, model.head_dim or model.embed // model.heads
        kv_heads *= kv_copies(model.heads, kv_heads, self.env.sharder.size("kv_heads"))
        zeros = jnp.zeros((model.layers, batch, length, kv_heads, head_dim), self.env.policy.compute)
        sharder = self.env.sharder
        names = ("layers", ROWS, None, "kv_heads", None)
        zeros = sharder.constrain_dims(zeros, sharder.compute_dims(names, zeros.shape))
        return Cache(zeros, zeros, jnp.zeros((model.layers, batch), jnp.int32))

    def decode(self, tokens_BT: jax.Array, cache: Cache, length: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        """Returns float32 logits [B, V] after the last of T new tokens, and the extended cache.

        Only the first `length` (int32, scalar or [B]) of right-padded tokens count: the logits are those of token
        `length - 1`, and the next call overwrites the rest. Rows do not depend on the lengths of others.
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
