"""Tiny models of transformers, one or more of each architecture, with all weights random (norms and biases too)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Without a padding token: PyTorch would not train its row of the embedding.
SMALL = {
    "vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
LACKS = {"gpt2": ("intermediate_size", "num_key_value_heads")}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
    "llama31": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 12}),
    "llama_biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_type": "linear", "factor": 3.0,
         "rope_theta": 100.0}, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral": ("mistral", {"sliding_window": 7, "head_dim": 16}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": False,
         "head_dim": 16},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 6, "attn_logit_softcapping": 3.0,
         "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5, "num_hidden_layers": 7,
         "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}},
    ),
    "olmo2": ("olmo2", {"attention_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": LLAMA3}),
    "granite": (
        "granite",
        {"embedding_multiplier": 5.0, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2,
         "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", {"sliding_window": 9, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", {"layer_norm_epsilon": 1e-3, "n_inner": 40, "reorder_and_upcast_attn": True}),
    "gpt2_untied": ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu_pytorch_tanh"}),
}  # fmt: skip


def make(case: str, folder: Path, seed: int = 0) -> Any:
    """The model of a case in float32, saved in `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    name, options = CASES[case]
    sizes = {key: value for key, value in SMALL.items() if key not in LACKS.get(name, ())}
    config = AutoConfig.for_model(name, **{**sizes, **options})
    torch.set_num_threads(1)  # for tiny matrices threads cost more than they save
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def logits(model: Any, tokens: Any) -> Any:
    """float32 [B, T, V] of a model of transformers."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.float().numpy()
