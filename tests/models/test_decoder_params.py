"""The decoder's parameter table against published parameter counts, and the layout check of whole configs."""

from __future__ import annotations

from math import prod

import pytest

from jaxtrain.config.load import load
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.core.layout_check import check_config
from jaxtrain.models.decoder_params import decoder_tensors, parameter_count

# Number of parameters of the published checkpoints (safetensors metadata on their model pages).
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "gemma2_9b": 9_241_705_984,
    "mixtral_8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_have_the_published_size(name: str) -> None:
    model = load(f"configs/models/{name}.yaml").model
    assert model.vocab is not None
    assert parameter_count(model, model.vocab) == PUBLISHED[name]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {
            "activation": "gelu",
            "biases": ["mlp", "output", "qkv"],
        },
        {"qk_norm": "per_head", "norm_placement": "sandwich", "tie_embeddings": True, "head_dim": 6},
        {"qk_norm": "full", "norm_placement": "post"},
        {"qk_norm": "full", "norm": "layernorm", "learned_positions": 24},
        {"moe": {"num_experts": 5, "shared_experts": 1, "bias_update_rate": 1e-3}},
    ],
)
def test_the_table_is_well_formed(options: dict) -> None:
    model = ModelConfig(embed=16, heads=4, kv_heads=2, mlp=24, layers=3, **options)
    table = decoder_tensors(model, vocab=40)
    sizes = {
        "vocab": 40,
        "embed": 16,
        "table": 16,
        "heads": 4,
        "kv_heads": 2,
        "mlp": 24,
        "layers": 3,
        "head_dim": model.head_dim or 4,
        "expert": 5,
        "balance": 5,
    }
    for path, (shape, names) in table.items():
        assert len(shape) == len(names), path
        assert all(name is None or sizes[name] == size for name, size in zip(names, shape)), path
        assert path.startswith("layers/") == (names[0] == "layers"), path
    assert parameter_count(model, 40) == sum(prod(shape) for shape, _ in table.values())


def test_options_add_and_drop_their_tensors() -> None:
    def paths(**options) -> set[str]:
        return set(decoder_tensors(ModelConfig(**options), vocab=8))

    base = paths()
    assert "head" in base
    assert base - paths(tie_embeddings=True) == {"head"}
    assert base - paths(activation="gelu") == {"layers/mlp/gate"}
    assert paths(qk_norm="per_head") - base == {"layers/attention/q_norm/scale", "layers/attention/k_norm/scale"}
    assert paths(qk_norm="full") == paths(qk_norm="per_head")
    assert decoder_tensors(ModelConfig(qk_norm="full", kv_heads=2), 8)["layers/attention/k_norm/scale"][0] == (4, 2, 64)
    assert paths(biases=["qkv"]) - base == {f"layers/attention/{x}_bias" for x in "qkv"}
    assert paths(biases=["output"]) - base == {"layers/attention/o_bias"}
    assert paths(biases=["mlp"]) - base == {f"layers/mlp/{x}_bias" for x in ("gate", "up", "down")}
    assert paths(biases=["mlp"], activation="gelu") - base == {f"layers/mlp/{x}_bias" for x in ("up", "down")}
    experts = {f"layers/moe/{x}" for x in ("router", "gate", "up", "down")}
    assert paths(moe={}) - base == experts
    assert base - paths(moe={}) == {f"layers/mlp/{x}" for x in ("gate", "up", "down")}
    assert paths(moe={"bias_update_rate": 1.0}) - base == experts | {"layers/moe/bias"}
    assert paths(moe={"shared_experts": 2}) - base == experts | {
        f"layers/moe/shared/{x}" for x in ("gate", "up", "down")
    }
    assert decoder_tensors(ModelConfig(moe={"shared_experts": 2}, mlp=7), 8)["layers/moe/shared/up"][0] == (4, 256, 14)
    norms = {path.replace("scale", "bias") for path in base if path.endswith("_norm/scale")}
    assert paths(norm="layernorm") - base == norms
    assert len(norms) == 3
    assert paths(learned_positions=8192) - base == {"positions/table"}
    assert paths(norm_placement="sandwich") - base == {"layers/attention_post_norm/scale", "layers/mlp_post_norm/scale"}
    assert paths(norm_placement="sandwich") - paths(norm_placement="post") == {
        "layers/attention_norm/scale",
        "layers/mlp_norm/scale",
    }


def keys(*overrides: str, devices: int | None = None, vocab: int | None = None) -> list[str]:
    return [problem.key for problem in check_config(load(None, *overrides), devices, vocab)]


def test_check_config_takes_devices_from_the_config_or_the_caller() -> None:
    assert keys("mesh.data=4", devices=4) == []
    assert keys("mesh.data=4", devices=8) == ["mesh"]
    assert keys("mesh.data=4", "simulate=2") == ["mesh"]
    assert keys("mesh.data=4") == []


def test_check_config_counts_sequences_of_a_microbatch() -> None:
    assert keys("data.global_batch=16", "step.microbatches=2", "simulate=8") == []
    assert keys("data.global_batch=16", "step.microbatches=4", "simulate=8") == ["rules.batch"]


def test_check_config_knows_the_vocabulary_only_when_told() -> None:
    layout = ("layout=tp", "mesh.model=4")
    assert keys(*layout) == []
    assert keys(*layout, vocab=258) == ["rules.vocab"]
    assert keys(*layout, "model.vocab=258", vocab=256) == ["rules.vocab"]
    assert keys(*layout, vocab=256) == []


MOE = ("model.moe={num_experts: 8}", "layout=ep", "simulate=8")


def test_check_config_of_experts() -> None:
    assert keys(*MOE) == []
    assert keys(*MOE, "layout=ep_tp") == []
    assert keys("layout=ep", "simulate=8") == ["mesh.expert"]
    assert keys(*MOE, "model.moe.num_experts=6") == ["rules.expert"]
    assert keys(*MOE, "rules.batch=[data, fsdp]", "rules.embed=fsdp") == ["rules.batch"]
    assert keys(*MOE, "rules.batch=[data, fsdp]", "rules.embed=fsdp", "mesh.expert=1") == []
    assert keys("model.moe={num_experts: 8}", "simulate=8", "mesh.data=1", "mesh.fsdp=8", "rules.batch=fsdp",
                "rules.expert=fsdp", "rules.embed=fsdp") == []  # fmt: skip
    (problem,) = check_config(load(None, *MOE, "rules.expert=model", "mesh.expert=1", "mesh.model=8"))
    assert "rules.batch: needs `model` of rules.expert" in str(problem)
    assert str(problem).endswith("expected [data, fsdp, expert, model]")


def test_check_config_of_a_user_model_checks_what_it_can() -> None:
    user = ("model.type='a.b:C'", "data.type='a.b:D'", "rules.hidden=model", "rules.mlp=model")
    assert keys(*user, "mesh.model=2", "simulate=8") == []
    assert keys(*user, "data.global_batch=6", "simulate=8") == ["rules.batch"]
    assert keys(*user, "rules.hidden=modle", "simulate=8") == ["rules.hidden"]


def test_an_embedding_too_narrow_for_its_shards_lies_as_a_head_does():
    model = ModelConfig(embed=16, heads=4)
    names = {shards: decoder_tensors(model, 40, table_shards=shards)["embed/table"][1] for shards in (1, 8, 32)}
    assert names == {1: (None, "table"), 8: (None, "table"), 32: ("vocab", "embed")}
    assert decoder_tensors(ModelConfig(embed=16, heads=4, tie_embeddings=True), 40)["embed/table"][1] == (
        "vocab",
        "embed",
    )


def test_only_a_decoder_takes_the_decoders_keys() -> None:
    plain = "model.type='linear_model:Linear'"
    (problem,) = check_config(load(None, plain, "model.heads=4", "model.mlp=3", "data.type='a.b:D'"))
    message = "only the decoder and its subclasses read model.heads and model.mlp; expected `model.options` for"
    assert (problem.key, problem.message) == ("model.heads", f"{message} linear_model:Linear")
    assert keys("model.type='fused_model:Fused'", "model.heads=4", "layout=tp", "mesh.model=8", "simulate=8") == [
        "rules.heads"
    ]
