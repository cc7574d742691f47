"""Map of Hugging Face tensors to parameters, one table for each architecture, read in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxtrain.interop.tensor_slices import TensorMapping

LAYER = "model.layers.{layer}."


def _place(path: str, name: str, dims: str, ours: str) -> TensorMapping:
    return TensorMapping(f"layers/{path}", LAYER + name, dims, f"L{ours}")


ENDS = (
    TensorMapping("embed/table", "model.embed_tokens.weight", "V D", "VD"),
    TensorMapping("final_norm/scale", "model.norm.weight", "D", "D"),
    TensorMapping("head", "lm_head.weight", "V D", "DV"),
)
NORMS = (
    _place("attention_norm/scale", "input_layernorm.weight", "D", "D"),
    _place("mlp_norm/scale", "post_attention_layernorm.weight", "D", "D"),
)
OUTPUT = (
    _place("attention/o", "self_attn.o_proj.weight", "D Hh", "DHh"),
    _place("attention/o_bias", "self_attn.o_proj.bias", "D", "D"),
)
ATTENTION = (
    _place("attention/q", "self_attn.q_proj.weight", "Hh D", "DHh"),
    _place("attention/k", "self_attn.k_proj.weight", "Kh D", "DKh"),
    _place("attention/v", "self_attn.v_proj.weight", "Kh D", "DKh"),
    _place("attention/q_bias", "self_attn.q_proj.bias", "Hh", "Hh"),
    _place("attention/k_bias", "self_attn.k_proj.bias", "Kh", "Kh"),
    _place("attention/v_bias", "self_attn.v_proj.bias", "Kh", "Kh"),
    _place("attention/q_norm/scale", "self_attn.q_norm.weight", "h", "h"),
    _place("attention/k_norm/scale", "self_attn.k_norm.weight", "h", "h"),
    *OUTPUT,
)
DOWN = (
    _place("mlp/down", "mlp.down_proj.weight", "D F", "DF"),
    _place("mlp/down_bias", "mlp.down_proj.bias", "D", "D"),
)
MLP = (
    _place("mlp/gate", "mlp.gate_proj.weight", "F D", "DF"),
    _place("mlp/up", "mlp.up_proj.weight", "F D", "DF"),
    _place("mlp/gate_bias", "mlp.gate_proj.bias", "F", "F"),
    _place("mlp/up_bias", "mlp.up_proj.bias", "F", "F"),
    *DOWN,
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    expert = f"{block}.experts.{{expert}}"
    return (
        _place("moe/router", f"{block}.gate.weight", "E D", "DE"),
        _place("moe/gate", f"{expert}.{gate}.weight", "F D", "EDF"),
        _place("moe/up", f"{expert}.{up}.weight", "F D", "EDF"),
        _place("moe/down", f"{expert}.{down}.weight", "D F", "EFD"),
    )


DENSE = (*ENDS[:1], *NORMS, *ATTENTION, *MLP, *ENDS[1:])
MIXTRAL = (*ENDS[:1], *NORMS, *ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2"), *ENDS[1:])
QWEN3_MOE = (*ENDS[:1], *NORMS, *ATTENTION, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), *ENDS[1:])
GEMMA2 = (
    ENDS[0],
    NORMS[0],
    _place("attention_post_norm/scale", "post_attention_layernorm.weight", "D", "D"),
    _place("mlp_norm/scale", "pre_feedforward_layernorm.weight", "D", "D"),
    _place("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "D"),
    *ATTENTION, *MLP, *ENDS[1:],
)  # fmt: skip
OLMO2 = (
    ENDS[0],
    _place("attention_post_norm/scale", "post_attention_layernorm.weight", "D", "D"),
    _place("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "D"),
    _place("attention/q_norm/scale", "self_attn.q_norm.weight", "Hh", "Hh"),
    _place("attention/k_norm/scale", "self_attn.k_norm.weight", "Kh", "Kh"),
    *(place for place in ATTENTION if "_norm" not in place.path), *MLP, *ENDS[1:],
)  # fmt: skip
PHI3 = (
    *ENDS[:1], *NORMS,
    _place("attention/q", "self_attn.qkv_proj.weight", "Hh D", "DHh"),
    _place("attention/k", "self_attn.qkv_proj.weight", "Kh D", "DKh"),
    _place("attention/v", "self_attn.qkv_proj.weight", "Kh D", "DKh"),
    OUTPUT[0],
    _place("mlp/gate", "mlp.gate_up_proj.weight", "F D", "DF"),
    _place("mlp/up", "mlp.gate_up_proj.weight", "F D", "DF"),
    DOWN[0], *ENDS[1:],
)  # fmt: skip


def _conv(path: str, name: str, dims: str, ours: str) -> tuple[TensorMapping, TensorMapping]:
    """Weight and bias of a Conv1D of GPT-2: weights are [in, out], so fused ones follow each other along the second."""
    block, out = "transformer.h.{layer}." + name, dims.split()[1]
    return (
        TensorMapping(f"layers/{path}", f"{block}.weight", dims, f"L{ours}", along=1),
        TensorMapping(f"layers/{path}_bias", f"{block}.bias", out, f"L{out}"),
    )


def _layer_norm(path: str, name: str) -> tuple[TensorMapping, TensorMapping]:
    stack = "L" if "{layer}" in name else ""
    weight, bias = ((f"{path}/{ours}", f"{name}.{theirs}") for ours, theirs in (("scale", "weight"), ("bias", "bias")))
    return TensorMapping(*weight, "D", f"{stack}D"), TensorMapping(*bias, "D", f"{stack}D")


GPT2 = (
    TensorMapping("embed/table", "transformer.wte.weight", "V D", "VD"),
    TensorMapping("positions/table", "transformer.wpe.weight", "P D", "PD"),
    *_layer_norm("layers/attention_norm", "transformer.h.{layer}.ln_1"),
    *_layer_norm("layers/mlp_norm", "transformer.h.{layer}.ln_2"),
    *_conv("attention/q", "attn.c_attn", "D Hh", "DHh"),
    *_conv("attention/k", "attn.c_attn", "D Kh", "DKh"),
    *_conv("attention/v", "attn.c_attn", "D Kh", "DKh"),
    *_conv("attention/o", "attn.c_proj", "Hh D", "DHh"),
    *_conv("mlp/up", "mlp.c_fc", "D F", "DF"),
    *_conv("mlp/down", "mlp.c_proj", "F D", "DF"),
    *_layer_norm("final_norm", "transformer.ln_f"),
    ENDS[2],
)

TENSOR_MAPPINGS: Mapping[str, tuple[TensorMapping, ...]] = MappingProxyType({
    "llama": DENSE, "mistral": DENSE, "qwen2": DENSE, "qwen3": DENSE, "gemma2": GEMMA2, "gemma3_text": GEMMA2,
    "olmo2": OLMO2, "granite": DENSE, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "phi3": PHI3, "gpt2": GPT2,
})  # fmt: skip
