"""Config sections of the model: sizes of the decoder, a user's own model, initial weights."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from jaxtrain.config.field_types import Bool, Count, NonNegative, PositiveFloat, PositiveInt
from jaxtrain.config.section import Section, TextOrSection, key, section

COMMON_MODEL_KEYS = frozenset({"type", "options", "frozen", "weights"})  # of the built-in decoder and users' models


class RopeScalingConfig(Section):
    """Frequency scaling of the rotary embedding, as in Hugging Face configs."""

    type: Literal["linear", "llama3"] = key("linear", "kind of scaling")
    factor: PositiveFloat = key(1.0, "context length multiplier")
    low_freq_factor: PositiveFloat = key(1.0, "llama3: lower frequencies are scaled by the full factor")
    high_freq_factor: PositiveFloat = key(4.0, "llama3: higher frequencies are not scaled")
    original_length: PositiveInt = key(8192, "llama3: sequence length before scaling")


class MoeConfig(Section):
    """Mixture of experts: every layer sends each token to `top_k` of `num_experts` experts, each `model.mlp` wide."""

    num_experts: PositiveInt = key(8, "experts of a layer")
    top_k: PositiveInt = key(2, "experts of each token; 1 is Switch")
    shared_experts: Count = key(
        0, "experts that every token visits in addition, computed as one layer of this multiple of the width"
    )
    capacity_factor: PositiveFloat | None = key(
        None,
        "slots per expert as a multiple of an even share of a row's tokens, for which its documents compete; null: no "
        "token is dropped, and no document changes another",
    )
    normalize_gates: Bool | None = key(None, "gates of a token sum to one (Mixtral); default: if top_k is above 1")
    bias_update_rate: PositiveFloat | None = key(
        None, "step size of a selection bias that balances the load without a loss"
    )
    load_balance_loss: NonNegative = key(0.0, "weight of the load-balancing loss, which is 1 for an even load")
    router_z_loss: NonNegative = key(0.0, "weight of log(Z)^2 of the router")


class StoredNameConfig(TextOrSection):
    """Array that a variable is loaded from; a plain string is its name."""

    name: str = key("", r"its name, with \1 for a group of the pattern, and {index} for that in the first dim")
    dims: tuple[Count, ...] | None = key(None, "its dim for each dim of the variable, e.g. [1, 0]; default: in order")


class InitialWeightsConfig(TextOrSection):
    """Initial values of a model's variables from elsewhere; a plain string is the path."""

    path: str | None = key(None, "a run, a folder that orbax wrote, or a safetensors file or folder")
    names: dict[str, StoredNameConfig] = key(
        {}, "pattern of a variable's whole path -> stored name; default: the same, with dots or slashes"
    )
    strict: Bool = key(True, "every variable must be there and nothing else; else the others keep their first values")


class ModelConfig(Section):
    """Model. Sizes are named after the logical names of their dims."""

    type: str = key(
        "decoder", "`decoder`, a user's own model as `package.module:Class`, or a name that an installed package adds"
    )
    options: dict[str, Any] = key({}, "keyword arguments of a user's own model")
    frozen: tuple[str, ...] = key((), "parameters that are not trained: patterns of whole paths, or logical names")
    weights: InitialWeightsConfig = section(InitialWeightsConfig, "initial values from elsewhere")
    from_: str | None = key(
        None, "Hugging Face folder, or name on the Hub: initial weights, and defaults of the keys below", alias="from"
    )
    vocab: PositiveInt | None = key(None, "vocabulary size; default: the tokenizer's, rounded up to 128")
    embed: PositiveInt = key(256, "width of the residual stream")
    layers: PositiveInt = key(4, "number of blocks")
    heads: PositiveInt = key(4, "query heads")
    kv_heads: PositiveInt | None = key(None, "key/value heads (GQA); default: heads")
    head_dim: PositiveInt | None = key(None, "size of a head; default: embed / heads")
    mlp: PositiveInt = key(1024, "width of the feed-forward layer")
    moe: MoeConfig | None = key(None, "mixture of experts in place of the feed-forward layer")
    activation: Literal["swiglu", "geglu", "gelu"] = key("swiglu", "feed-forward activation; *glu are gated")
    biases: tuple[Literal["qkv", "output", "mlp"], ...] = key(
        (), "layers with a bias: q, k and v projections, output projection of attention, feed-forward layer"
    )
    norm: Literal["rmsnorm", "gemma_rmsnorm", "layernorm"] = key(
        "rmsnorm", "kind of norm; gemma_rmsnorm: the scale is 1 + weight; layernorm: with mean and bias (GPT-2)"
    )
    norm_placement: Literal["pre", "post", "sandwich"] = key(
        "pre", "norms before attention and feed-forward, after them (OLMo 2), or both (Gemma 2)"
    )
    norm_epsilon: PositiveFloat = key(1e-6, "epsilon of the norms")
    qk_norm: Literal["none", "per_head", "full"] = key(
        "none", "norm of queries and keys: of each head (Qwen 3), or over all heads (OLMo 2)"
    )
    embed_multiplier: PositiveFloat = key(1.0, "factor of the embeddings (Granite); Gemma's is sqrt(embed)")
    residual_multiplier: PositiveFloat = key(1.0, "factor of the outputs of attention and feed-forward (Granite)")
    logits_divisor: PositiveFloat = key(1.0, "divisor of the output logits (Granite)")
    tie_embeddings: Bool = key(False, "use the embedding table as the output head")
    learned_positions: PositiveInt | None = key(
        None, "size of a table of learned position embeddings (GPT-2); default: rotary embeddings instead"
    )
    rope_theta: PositiveFloat = key(10_000.0, "base of the rotary frequencies")
    rope_scaling: RopeScalingConfig | None = key(None, "rotary frequency scaling for long contexts")
    sliding_window: PositiveInt | None = key(None, "sliding attention window in tokens")
    sliding_window_pattern: PositiveInt = key(1, "1: every layer has the window; n: every n-th layer attends globally")
    sliding_window_rope_theta: PositiveFloat | None = key(
        None, "rotary base of layers with the window, never scaled (Gemma 3); default: as all layers"
    )
    attention_scale: PositiveFloat | None = key(None, "softmax scale; default: head_dim ** -0.5")
    attention_softcap: PositiveFloat | None = key(None, "tanh cap of attention scores")
    logits_softcap: PositiveFloat | None = key(None, "tanh cap of the output logits")
    init_std: PositiveFloat = key(0.02, "standard deviation of weight initialisation")

    @property
    def is_builtin(self) -> bool:
        """True if the model is the built-in decoder, not a user's class."""
        return self.type == "decoder"

    @property
    def uses_decoder_keys(self) -> bool:
        """True if this section has sizes: for the decoder, and for a user's class with such keys."""
        return self.is_builtin or bool(self.decoder_keys)

    @property
    def decoder_keys(self) -> tuple[str, ...]:
        """Decoder keys that the config sets."""
        fields, given = type(self).model_fields, self.model_fields_set - COMMON_MODEL_KEYS
        return tuple(fields[name].alias or name for name in fields if name in given)

    @model_serializer(mode="wrap")
    def _read_keys(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits the defaults of the decoder for a user's class, which does not read them."""
        read = COMMON_MODEL_KEYS | set(self.decoder_keys)
        return {key: value for key, value in serialize(self).items() if self.is_builtin or key in read}
