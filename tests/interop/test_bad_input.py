"""Errors of import and export: one line that names the problem, and no files left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxtrain.cli.main import main
from jaxtrain.config.sections.model import ModelConfig, MoeConfig, RopeScalingConfig
from jaxtrain.errors import ModelConfigError, ModelFileError
from jaxtrain.interop.config_json import choose_export_family, from_hf_config, to_hf_config
from jaxtrain.interop.families import FAMILIES
from jaxtrain.interop.safetensors_io import open_tensors, write_tensors

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 31, "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
GPT2 = {"intermediate_size": None, "num_key_value_heads": None}
SHAPES = {
    "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    "input_layernorm": (8,), "post_attention_layernorm": (8,),
}  # fmt: skip


def weights(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Returns random tensors of LLAMA."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (31, 8), "lm_head": (31, 8), "model.norm": (8,)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in SHAPES.items()}
    return {f"{name}.weight": rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def model(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> Path:
    """Writes a folder with LLAMA; a change to None removes the tensor."""
    from safetensors.numpy import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | (config or {})))
    values = {name: value for name, value in (weights() | changes).items() if value is not None}
    save_file(values, folder / "model.safetensors")
    return folder


def error_line(capfd: pytest.CaptureFixture, tmp_path: Path, *arguments: Any) -> str:
    """Returns the error line of a command that fails and leaves no files."""
    before = sorted(tmp_path.iterdir())
    assert main([*map(str, arguments), "--to", str(tmp_path / "made")]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert sorted(tmp_path.iterdir()) == before
    return lines[0]


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({Q: None}, ["1 tensors are missing", Q]),
        ({Q: np.zeros((8, 7), np.float32)}, [Q, "[8, 7]", "[8, 8]"]),
        ({"model.layers.0.self_attn.q_proj.bias": np.zeros(8, np.float32)}, ["does not have", "q_proj.bias"]),
        ({Q: np.zeros((8, 8), np.int8)}, [Q, "I8", "quantised"]),
    ],
)
def test_wrong_tensors_are_named(changes, words, tmp_path, capfd):
    line = error_line(capfd, tmp_path, "import", model(tmp_path / "hf", **changes))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("keep", [0, 5, 200, -1, -100])
def test_a_truncated_file_is_named(keep, tmp_path, capfd):
    file = model(tmp_path / "hf") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    line = error_line(capfd, tmp_path, "import", tmp_path / "hf")
    assert "model.safetensors" in line
    assert "truncated" in line


def test_folders_without_a_model(tmp_path, capfd):
    (tmp_path / "empty").mkdir()
    assert "no config.json" in error_line(capfd, tmp_path, "import", tmp_path / "empty")
    assert "no config.json" in error_line(capfd, tmp_path, "import", tmp_path / "nowhere")
    (tmp_path / "empty/config.json").write_text("{")
    assert "not JSON" in error_line(capfd, tmp_path, "import", tmp_path / "empty")
    (tmp_path / "empty/config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "empty/pytorch_model.bin").write_text("")
    assert "pytorch_model.bin is not supported" in error_line(capfd, tmp_path, "import", tmp_path / "empty")
    (tmp_path / "empty/model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    assert "b.safetensors: no such file" in error_line(capfd, tmp_path, "import", tmp_path / "empty")


def test_a_tied_head_must_be_the_embedding(tmp_path, capfd):
    line = error_line(capfd, tmp_path, "import", model(tmp_path / "hf", {"tie_word_embeddings": True}))
    assert "lm_head.weight is not model.embed_tokens.weight" in line


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "lama"}, ["`llama`?", "supported: llama, mistral"]),
        ({"model_type": "gptj"}, ["gptj", "not supported", "phi3"]),
        ({"model_type": "gemma3"}, ['model_type "gemma3"', "not supported", "gemma3_text"]),
        ({"model_type": None}, ["no model_type"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["LlamaForSequenceClassification", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ['hidden_act "gelu"', "silu"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["yarn", "linear or llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 32}}, ["beta_fast"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"sliding_window": 16}, ["sliding_window 16"]),
        ({"attention_dropout": 0.1}, ["attention_dropout 0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier"]),
        ({"hidden_size": "8"}, ["hidden_size", '"8"']),
        ({"vocab_size": None}, ["vocab_size"]),
        ({"num_attention_heads": 3}, ["hidden_size 8", "num_attention_heads 3"]),
    ],
)
def test_unsupported_fields_are_named(config, words, tmp_path, capfd):
    line = error_line(capfd, tmp_path, "import", model(tmp_path / "hf", config))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("family", "config", "word"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 4}, "max_window_layers"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}, "layer_types"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ("mistral", {"attention_bias": True}, "attention_bias true"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters: expected full_attention and"),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "linear"),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier"),
        ("granite", {"num_local_experts": 4}, "num_local_experts 4"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt2", {}, "intermediate_size 12"),
        ("gpt2", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx true"),
        ("gpt2", {**GPT2, "scale_attn_weights": False}, "scale_attn_weights false"),
        ("gpt2", {**GPT2, "add_cross_attention": True}, "add_cross_attention true"),
        ("gpt2", {**GPT2, "activation_function": "gelu"}, "activation_function .gelu. is not supported; .* gelu_new"),
        ("gpt2", {**GPT2, "rope_theta": 1e4}, "rope_theta"),
        ("gpt2", {**GPT2, "n_positions": 0}, "n_positions"),
        ("gpt2", {**GPT2, "hidden_size": None}, "n_embd"),
        ("gpt2", {**GPT2, "num_attention_heads": 3}, "n_embd 8 is not divisible by n_head 3"),
    ],
)
def test_unsupported_fields_of_each_family(family, config, word):
    given = {**LLAMA, "architectures": [FAMILIES[family].architecture], **config, "model_type": family}
    with pytest.raises(ModelConfigError, match=word):
        from_hf_config(given, "config.json")


def test_absent_fields_have_the_defaults_of_transformers():
    _, mistral = from_hf_config({**LLAMA, "model_type": "mistral", "architectures": None}, "")
    _, mixtral = from_hf_config({**LLAMA, "model_type": "mixtral", "architectures": None}, "")
    _, gemma = from_hf_config({**LLAMA, "model_type": "gemma2", "architectures": None, "num_hidden_layers": 5}, "")
    _, gpt2 = from_hf_config({"model_type": "gpt2"}, "")
    assert (gpt2["mlp"], gpt2["learned_positions"], gpt2["tie_embeddings"]) == (3072, 1024, True)
    assert mistral["sliding_window"] == 4096
    assert (mixtral["rope_theta"], mixtral["norm_epsilon"], mixtral["moe"]["num_experts"]) == (1e6, 1e-5, 8)
    assert (gemma["sliding_window_pattern"], gemma["tie_embeddings"], gemma["logits_softcap"]) == (2, True, 30.0)


BIASES = ["qkv", "output", "mlp"]
SIZES: dict[str, Any] = {"vocab": 31, "embed": 8, "heads": 2, "mlp": 12, "layers": 4}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "llama"),
        ({"biases": ["mlp"], "rope_scaling": RopeScalingConfig(type="llama3", factor=8.0)}, "llama"),
        ({"sliding_window": 4}, "mistral"),
        ({"biases": ["qkv"]}, "qwen2"),
        ({"biases": ["qkv"], "sliding_window": 4, "sliding_window_pattern": 3}, "qwen2"),
        ({"qk_norm": "per_head"}, "qwen3"),
        ({"moe": MoeConfig(num_experts=4)}, "mixtral"),
        ({"moe": MoeConfig(num_experts=4), "qk_norm": "per_head"}, "qwen3_moe"),
        (
            {"norm": "gemma_rmsnorm", "norm_placement": "sandwich", "embed_multiplier": 8**0.5, "activation": "geglu"},
            "gemma2",
        ),
        (
            {
                "norm": "gemma_rmsnorm",
                "norm_placement": "sandwich",
                "embed_multiplier": 8**0.5,
                "activation": "geglu",
                "qk_norm": "per_head",
                "sliding_window": 4,
                "sliding_window_pattern": 3,
                "sliding_window_rope_theta": 50.0,
                "rope_scaling": RopeScalingConfig(factor=2.0),
            },
            "gemma3_text",
        ),
        ({"qk_norm": "full", "norm_placement": "post"}, "olmo2"),
        ({"residual_multiplier": 0.3, "logits_divisor": 3.0, "embed_multiplier": 5.0}, "granite"),
        (
            {"norm": "layernorm", "activation": "gelu", "learned_positions": 512, "biases": BIASES},
            "gpt2",
        ),
    ],
)
def test_the_chosen_family_round_trips(options, expected):
    wanted = ModelConfig(**SIZES, **options)
    family, config = choose_export_family(wanted, 31, None, None)
    assert family.name == expected
    again = ModelConfig.model_validate(from_hf_config(json.loads(json.dumps(config)), "")[1])
    assert choose_export_family(again, 31, expected, config)[1] == config


@pytest.mark.parametrize(
    ("options", "family", "words"),
    [
        ({"activation": "gelu"}, None, 'activation "gelu"'),
        ({"qk_norm": "per_head", "biases": ["mlp"]}, None, 'no llama has model.qk_norm "per_head"'),
        ({"moe": MoeConfig(bias_update_rate=0.01)}, None, "moe.bias_update_rate 0.01"),
        ({"moe": MoeConfig(shared_experts=1)}, None, "moe.shared_experts 1"),
        ({"biases": ["qkv"]}, "llama", "model.biases.output false"),
        ({"rope_scaling": RopeScalingConfig(factor=2.0)}, "phi3", "model.rope_scaling.type linear"),
        ({}, "mixtral", "moe"),
        ({"sliding_window": 3, "sliding_window_pattern": 2}, "mistral", "sliding_window_pattern 2"),
        ({"qk_norm": "full", "residual_multiplier": 0.5}, "olmo2", "model.residual_multiplier 0.5"),
        ({"sliding_window": 3, "sliding_window_rope_theta": 7.0}, "mistral", "model.sliding_window_rope_theta 7.0"),
        (
            {"sliding_window": 3, "rope_scaling": RopeScalingConfig(factor=2.0)},
            "gemma3_text",
            "model.sliding_window_rope_theta nothing",
        ),
        ({}, "gpt2", "model.rope_scaling.type default"),
        ({"learned_positions": 512}, "llama", "model.learned_positions 512"),
        ({"norm": "layernorm"}, None, 'no llama has model.norm "layernorm"'),
        ({"learned_positions": 512, "sliding_window": 3}, "gpt2", "model.sliding_window 3"),
    ],
)
def test_options_without_a_family_are_named(options, family, words):
    with pytest.raises(ModelConfigError) as error:
        choose_export_family(ModelConfig(**SIZES, **options), 31, family, None)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("most", [10**9, 600])
def test_safetensors_reads_our_files(dtype, most, tmp_path):
    from safetensors import safe_open

    values = weights(dtype)
    shapes = {name: value.shape for name, value in values.items()}
    total = write_tensors(tmp_path, shapes, np.dtype(dtype), most, iter(values.values()))
    assert total == sum(value.nbytes for value in values.values())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (most > total)
    seen = {}
    for file in files:
        with safe_open(file, "numpy") as opened:
            held = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            assert len(held) == 1 or file.stat().st_size < most + 1500  # and its header
        seen |= held
    assert seen == {name: list(shape) for name, shape in shapes.items()}
    for name, entry in open_tensors(tmp_path).items():
        np.testing.assert_array_equal(entry[:], values[name])


def test_a_wrong_header_is_refused(tmp_path):
    for header in (b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"[]", b"\xff"):
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ModelFileError, match=r"model\.safetensors"):
            open_tensors(tmp_path)


def test_to_hf_config_keeps_token_ids():
    before = {**LLAMA, "eos_token_id": [7, 8], "bos_token_id": 3}
    config = to_hf_config(ModelConfig.model_validate(from_hf_config(before, "")[1]), 31, FAMILIES["llama"], before)
    assert (config["eos_token_id"], config["bos_token_id"]) == ([7, 8], 3)
