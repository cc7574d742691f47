"""Tables of Hugging Face tensors and parameters, one for each architecture, used for import and export."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxtrain.interop.tensor_slices import TensorMapping


def _layer(param: str, tensor: str, tensor_dims: str, param_dims: str) -> TensorMapping:
    return TensorMapping(f"layers/{param}", f"model.layers.{{layer}}.{tensor}", tensor_dims, f"L{param_dims}")


EMBED = TensorMapping("embed/table", "model.embed_tokens.weight", "V D", "VD")
FINAL_NORM = TensorMapping("final_norm/scale", "model.norm.weight", "D", "D")
HEAD = TensorMapping("head", "lm_head.weight", "V D", "DV")
NORMS = (
    _layer("attention_norm/scale", "input_layernorm.weight", "D", "D"),
    _layer("mlp_norm/scale", "post_attention_layernorm.weight", "D", "D"),
)
OUTPUT = (
    _layer("attention/o", "self_attn.o_proj.weight", "D Hh", "DHh"),
    _layer("attention/o_bias", "self_attn.o_proj.bias", "D", "D"),
)
ATTENTION = (
    _layer("attention/q", "self_attn.q_proj.weight", "Hh D", "DHh"),
    _layer("attention/k", "self_attn.k_proj.weight", "Kh D", "DKh"),
    _layer("attention/v", "self_attn.v_proj.weight", "Kh D", "DKh"),
    _layer("attention/q_bias", "self_attn.q_proj.bias", "Hh", "Hh"),
    _layer("attention/k_bias", "self_attn.k_proj.bias", "Kh", "Kh"),
    _layer("attention/v_bias", "self_attn.v_proj.bias", "Kh", "Kh"),
    _layer("attention/q_norm/scale", "self_attn.q_norm.weight", "h", "h"),
    _layer("attention/k_norm/scale", "self_attn.k_norm.weight", "h", "h"),
    *OUTPUT,
)
DOWN = (
    _layer("mlp/down", "mlp.down_proj.weight", "D F", "DF"),
    _layer("mlp/down_bias", "mlp.down_proj.bias", "D", "D"),
)
MLP = (
    _layer("mlp/gate", "mlp.gate_proj.weight", "F D", "DF"),
    _layer("mlp/up", "mlp.up_proj.weight", "F D", "DF"),
    _layer("mlp/gate_bias", "mlp.gate_proj.bias", "F", "F"),
    _layer("mlp/up_bias", "mlp.up_proj.bias", "F", "F"),
    *DOWN,
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[TensorMapping, ...]:
    expert = f"{block}.experts.{{expert}}"
    return (
        _layer("moe/router", f"{block}.gate.weight", "E D", "DE"),
        _layer("moe/gate", f"{expert}.{gate}.weight", "F D", "EDF"),
        _layer("moe/up", f"{expert}.{up}.weight", "F D", "EDF"),
        _layer("moe/down", f"{expert}.{down}.weight", "D F", "EFD"),
    )


DENSE = (EMBED, *NORMS, *ATTENTION, *MLP, FINAL_NORM, HEAD)
MIXTRAL = (EMBED, *NORMS, *ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2"), FINAL_NORM, HEAD)
QWEN3_MOE = (EMBED, *NORMS, *ATTENTION, *_experts("mlp", "gate_proj", "up_proj", "down_proj"), FINAL_NORM, HEAD)
GEMMA2 = (
    EMBED,
    NORMS[0],
    _layer("attention_post_norm/scale", "post_attention_layernorm.weight", "D", "D"),
    _layer("mlp_norm/scale", "pre_feedforward_layernorm.weight", "D", "D"),
    _layer("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "D"),
    *ATTENTION, *MLP, FINAL_NORM, HEAD,
)  # fmt: skip
OLMO2 = (
    EMBED,
    _layer("attention_post_norm/scale", "post_attention_layernorm.weight", "D", "D"),
    _layer("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "D", "D"),
    _layer("attention/q_norm/scale", "self_attn.q_norm.weight", "Hh", "Hh"),
    _layer("attention/k_norm/scale", "self_attn.k_norm.weight", "Kh", "Kh"),
    *(mapping for mapping in ATTENTION if "_norm" not in mapping.param), *MLP, FINAL_NORM, HEAD,
)  # fmt: skip
PHI3 = (
    EMBED, *NORMS,
    _layer("attention/q", "self_attn.qkv_proj.weight", "Hh D", "DHh"),
    _layer("attention/k", "self_attn.qkv_proj.weight", "Kh D", "DKh"),
    _layer("attention/v", "self_attn.qkv_proj.weight", "Kh D", "DKh"),
    OUTPUT[0],
    _layer("mlp/gate", "mlp.gate_up_proj.weight", "F D", "DF"),
    _layer("mlp/up", "mlp.gate_up_proj.weight", "F D", "DF"),
    DOWN[0], FINAL_NORM, HEAD,
)  # fmt: skip


def _conv(param: str, tensor: str, tensor_dims: str, param_dims: str) -> tuple[TensorMapping, TensorMapping]:
    """Returns weight and bias of a Conv1D of GPT-2. Its weights are [in, out], fused along the second dim."""
    block, out = f"transformer.h.{{layer}}.{tensor}", tensor_dims.split()[1]
    return (
        TensorMapping(f"layers/{param}", f"{block}.weight", tensor_dims, f"L{param_dims}", fused_dim=1),
        TensorMapping(f"layers/{param}_bias", f"{block}.bias", out, f"L{out}"),
    )


def _layer_norm(param: str, tensor: str) -> tuple[TensorMapping, TensorMapping]:
    dims = "LD" if "{layer}" in tensor else "D"
    return (
        TensorMapping(f"{param}/scale", f"{tensor}.weight", "D", dims),
        TensorMapping(f"{param}/bias", f"{tensor}.bias", "D", dims),
    )


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
    HEAD,
)

TENSOR_MAPPINGS: Mapping[str, tuple[TensorMapping, ...]] = MappingProxyType({
    "llama": DENSE, "mistral": DENSE, "qwen2": DENSE, "qwen3": DENSE, "gemma2": GEMMA2, "gemma3_text": GEMMA2,
    "olmo2": OLMO2, "granite": DENSE, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "phi3": PHI3, "gpt2": GPT2,
})  # fmt: skip
