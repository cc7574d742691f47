"""Published config.json files of well-known models give their published numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest

from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.interop.config_json import from_hf_config
from jaxtrain.models.decoder_params import parameter_count


def sizes(vocab: int, embed: int, mlp: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": embed, "intermediate_size": mlp, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "use_cache": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0", "initializer_range": 0.02, "attention_dropout": 0.0,
    }  # fmt: skip


KNOWN = {
    "Llama 2 7B": (
        6_738_415_616,
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes(32000, 4096, 11008, 32, 32, 32),
         "hidden_act": "silu", "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
         "tie_word_embeddings": False, "max_position_embeddings": 4096},
        {"norm_epsilon": 1e-5, "rope_theta": 10_000.0},
    ),
    "Llama 3.2 1B": (
        1_235_814_400,
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes(128256, 2048, 8192, 16, 32, 8),
         "attention_bias": False, "mlp_bias": False, "head_dim": 64, "hidden_act": "silu", "rope_theta": 500000.0,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 131072,
         "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                          "original_max_position_embeddings": 8192, "rope_type": "llama3"}},
        {"rope_theta": 500_000.0, "rope_scaling.factor": 32.0, "rope_scaling.original_length": 8192},
    ),
    "Mistral 7B v0.1": (
        7_241_732_096,
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], **sizes(32000, 4096, 14336, 32, 32, 8),
         "sliding_window": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
        {"sliding_window": 4096, "sliding_window_pattern": 1},
    ),
    "Mixtral 8x7B": (
        46_702_792_704,
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **sizes(32000, 4096, 14336, 32, 32, 8),
         "num_experts_per_tok": 2, "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
         "router_aux_loss_coef": 0.02, "sliding_window": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
        {"moe.top_k": 2, "moe.normalize_gates": True, "rope_theta": 1e6, "sliding_window": None},
    ),
    "Qwen 2.5 7B": (
        7_615_616_512,
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **sizes(152064, 3584, 18944, 28, 28, 4),
         "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False, "use_mrope": False,
         "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": False},
        {"biases.qkv": True, "biases.output": False, "sliding_window": None},
    ),
    "Qwen 3 8B": (
        8_190_735_360,
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **sizes(151936, 4096, 12288, 36, 32, 8),
         "attention_bias": False, "head_dim": 128, "max_window_layers": 36, "rope_scaling": None,
         "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": False},
        {"qk_norm": "per_head", "rope_theta": 1e6},
    ),
    "Qwen 3 30B A3B": (
        30_532_122_624,
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **sizes(151936, 2048, 6144, 48, 32, 4),
         "decoder_sparse_step": 1, "head_dim": 128, "max_window_layers": 48, "mlp_only_layers": [],
         "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
         "output_router_logits": False, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
         "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "attention_bias": False},
        {"moe.normalize_gates": True, "moe.num_experts": 128, "mlp": 768},
    ),
    "Gemma 2 9B": (
        9_241_705_984,
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **sizes(256000, 3584, 14336, 42, 16, 8),
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
         "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
         "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096, "sliding_window_size": 4096},
        {"sliding_window": 4096, "sliding_window_pattern": 2, "tie_embeddings": True, "activation": "geglu"},
    ),
    "Gemma 3 1B": (
        999_885_952,
        {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **sizes(262144, 1152, 6912, 26, 4, 1),
         "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
         "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
         "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
         "sliding_window_pattern": 6},
        {"sliding_window": 512, "sliding_window_pattern": 6, "sliding_window_rope_theta": 1e4, "rope_theta": 1e6,
        "qk_norm": "per_head"},
    ),
    "OLMo 2 7B": (
        7_298_617_344,
        {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], **sizes(100352, 4096, 11008, 32, 32, 32),
         "attention_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": None,
         "rope_theta": 500000, "tie_word_embeddings": False},
        {"qk_norm": "full", "norm_placement": "post", "norm_epsilon": 1e-6},
    ),
    "Granite 3.0 2B": (
        2_533_531_648,
        {"model_type": "granite", "architectures": ["GraniteForCausalLM"], **sizes(49155, 2048, 8192, 40, 32, 8),
         "attention_bias": False, "mlp_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
         "logits_scaling": 8.0, "residual_multiplier": 0.22, "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True},
        {"attention_scale": 1 / 64, "embed_multiplier": 12.0, "logits_divisor": 8.0, "residual_multiplier": 0.22},
    ),
    "Phi 3 mini 4k": (
        3_821_079_552,
        {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], **sizes(32064, 3072, 8192, 32, 32, 32),
         "attention_bias": False, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
         "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
         "original_max_position_embeddings": 4096, "sliding_window": 2047, "tie_word_embeddings": False},
        {"sliding_window": 2047, "activation": "swiglu"},
    ),
    "GPT-2": (
        124_439_808,
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new",
         "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
         "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
         "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None,
         "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
         "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
         "vocab_size": 50257},
        {"learned_positions": 1024, "mlp": 3072, "norm": "layernorm", "tie_embeddings": True, "activation": "gelu"},
    ),
    "GPT-2 XL": (
        1_557_611_200,
        {"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "n_inner": None,
         "output_past": True, "predict_special_tokens": True, "n_special": 0,
         "scale_attn_weights": True, "vocab_size": 50257},
        {"mlp": 6400, "norm_epsilon": 1e-5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_and_options(name: str):
    count, config, expected = KNOWN[name]
    _, section = from_hf_config(config, name)
    model = ModelConfig.model_validate(section)
    assert parameter_count(model, section["vocab"]) == count
    for key, value in expected.items():
        actual: Any = model
        for part in key.split("."):
            actual = part in actual if isinstance(actual, tuple) else getattr(actual, part)
        assert actual == value, key
