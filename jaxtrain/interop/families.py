"""Hugging Face architectures that the decoder supports: the fields of their config.json.

`jaxtrain.interop.tensor_map` holds their tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """A Hugging Face architecture, as `from_hf_config` and `to_hf_config` of `jaxtrain.interop.config_json` read it.

    Attributes:
        name: `model_type` of the config.json.
        architecture: name of the class in transformers.
        fields: field of config.json -> keys of the `model` section with its value.
        defaults: default of a field, as in transformers. A field without a default is required.
        fixed: keys of the `model` section that have the same value in all models.
        window: layers with a sliding window: none; all if `sliding_window` is set (`all`) or if also
            `use_sliding_window` is (`used`); by `layer_types`, else by `max_window_layers` (`layers`) or all but every
            n-th (`period`).
        activation: field with the activation.
        activations: value of that field -> `model.activation`.
        rope: supported types of positions.
        ignored: fields without effect here.
        aliases: other name of a field -> its name.
        written: fields to export because their defaults would make PyTorch train another model.
        multiplies_by_sqrt_embed: whether embeddings are multiplied by the square root of their size.
    """

    name: str
    architecture: str
    fields: Mapping[str, tuple[str, ...]]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    window: Literal["none", "all", "used", "layers", "period"] = "none"
    activation: str = "hidden_act"
    activations: Mapping[str, str] = field(default_factory=lambda: GATED)
    rope: tuple[str, ...] = ("default", "linear", "llama3")
    ignored: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=dict)
    multiplies_by_sqrt_embed: bool = False

    def field_of(self, key: str) -> str:
        """Returns the field with the value of a key of the `model` section, or the key if there is none."""
        return next((name for name, keys in self.fields.items() if key in keys), key)


GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}

FIELDS = {
    "vocab_size": ("vocab",),
    "hidden_size": ("embed",),
    "num_hidden_layers": ("layers",),
    "num_attention_heads": ("heads",),
    "num_key_value_heads": ("kv_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("mlp",),
    "rms_norm_eps": ("norm_epsilon",),
    "tie_word_embeddings": ("tie_embeddings",),
    "initializer_range": ("init_std",),
}
BIAS = {"attention_bias": ("biases.qkv", "biases.output")}
CAPS = {"final_logit_softcapping": ("logits_softcap",), "attn_logit_softcapping": ("attention_softcap",)}
DEFAULTS = {
    "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "initializer_range": 0.02, "hidden_act": "silu", "rope_theta": 10_000.0,
}  # fmt: skip
QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28, "layer_types": None}

_FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM",
        FIELDS | BIAS | {"mlp_bias": ("biases.mlp",)}, DEFAULTS | {"attention_bias": False, "mlp_bias": False},
    ),
    Family(
        "mistral", "MistralForCausalLM", FIELDS,
        DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}, window="all",
    ),
    Family(
        "qwen2", "Qwen2ForCausalLM", FIELDS, DEFAULTS | QWEN | {"num_key_value_heads": 32},
        fixed={"biases.qkv": True}, window="layers",
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", FIELDS | BIAS,
        DEFAULTS | QWEN | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
        fixed={"qk_norm": "per_head"}, window="layers",
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM",
        FIELDS | BIAS | CAPS,
        DEFAULTS | {
            "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "layer_types": None, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        },
        fixed={"norm": "gemma_rmsnorm", "norm_placement": "sandwich"}, multiplies_by_sqrt_embed=True,
        window="period", activation="hidden_activation", ignored=("hidden_act", "sliding_window_size"),
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM",
        FIELDS | BIAS | CAPS | {"rope_local_base_freq": ("sliding_window_rope_theta",)},
        DEFAULTS | {
            "num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True, "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "layer_types": None, "sliding_window_pattern": 6, "final_logit_softcapping": None,
            "attn_logit_softcapping": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        },
        fixed={"norm": "gemma_rmsnorm", "norm_placement": "sandwich", "qk_norm": "per_head"},
        multiplies_by_sqrt_embed=True,
        window="period", activation="hidden_activation", ignored=("hidden_act", "_sliding_window_pattern"),
    ),
    Family(
        "olmo2", "Olmo2ForCausalLM", FIELDS | BIAS, DEFAULTS | {"rms_norm_eps": 1e-5, "attention_bias": False},
        fixed={"qk_norm": "full", "norm_placement": "post"},
    ),
    Family(
        "granite", "GraniteForCausalLM",
        FIELDS | BIAS | {
            "mlp_bias": ("biases.mlp",), "embedding_multiplier": ("embed_multiplier",),
            "logits_scaling": ("logits_divisor",),
            "residual_multiplier": ("residual_multiplier",), "attention_multiplier": ("attention_scale",),
        },
        DEFAULTS | {"attention_bias": False, "mlp_bias": False} | dict.fromkeys(
            ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"), 1.0
        ),
    ),
    Family(
        "mixtral", "MixtralForCausalLM",
        FIELDS | {"num_local_experts": ("moe.num_experts",), "num_experts_per_tok": ("moe.top_k",)},
        DEFAULTS | {
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
            "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        fixed={"moe.normalize_gates": True}, window="all",
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        FIELDS | BIAS | {
            "num_experts": ("moe.num_experts",), "num_experts_per_tok": ("moe.top_k",),
            "moe_intermediate_size": ("mlp",), "norm_topk_prob": ("moe.normalize_gates",),
        },
        DEFAULTS | {
            "num_key_value_heads": 4, "attention_bias": False, "sliding_window": 4096, "use_sliding_window": False,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        fixed={"qk_norm": "per_head"}, window="used",
        ignored=("max_window_layers",), aliases={"num_local_experts": "num_experts"},
    ),
    Family(
        "phi3", "Phi3ForCausalLM", FIELDS, DEFAULTS | {"rms_norm_eps": 1e-5, "sliding_window": None},
        window="all", rope=("default",), ignored=("original_max_position_embeddings", "auto_map"),
    ),
    Family(
        "gpt2", "GPT2LMHeadModel",
        {
            "vocab_size": ("vocab",), "n_embd": ("embed",), "n_layer": ("layers",), "n_head": ("heads",),
            "n_inner": ("mlp",), "n_positions": ("learned_positions",),
            "layer_norm_epsilon": ("norm_epsilon",), "tie_word_embeddings": ("tie_embeddings",),
            "initializer_range": ("init_std",),
        },
        {
            "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "n_positions": 1024,
            "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.02,
            "activation_function": "gelu_new",
        },
        fixed={
            "norm": "layernorm", "biases.qkv": True, "biases.output": True, "biases.mlp": True,
        },
        activation="activation_function", activations={"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu"},
        rope=("learned",),
        # Dropout, which is not supported; the order of a product; fields of older versions and other classes.
        ignored=(
            "resid_pdrop", "embd_pdrop", "attn_pdrop", "reorder_and_upcast_attn", "n_ctx", "n_special", "output_past",
            "predict_special_tokens", "task_specific_params", "summary_type", "summary_use_proj", "summary_activation",
            "summary_proj_to_labels", "summary_first_dropout",
        ),
        aliases={
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
        },
        written=dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _FAMILIES})
