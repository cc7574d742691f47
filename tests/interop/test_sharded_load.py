"""Loading under a layout of 8 simulated devices, and the import and export commands."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

import hf_loaded
import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtrain import load as load_config
from jaxtrain.cli.main import main
from jaxtrain.config import ConfigError
from jaxtrain.core.program import build_program
from jaxtrain.interop import load_weights as loading
from jaxtrain.interop import sharded_read
from jaxtrain.interop.safetensors_io import StoredTensor, open_tensors, write_tensors
from jaxtrain.interop.save_weights import save_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.interop.tensor_slices import TensorMapping, parameter_slices, tensor_shapes
from jaxtrain.models.model_def import ModelDef

SIZES = {
    "llama": ["model.mlp=48"],
    "phi3": ["model.mlp=48"],
    "olmo2": ["model.mlp=48", "model.qk_norm=full", "model.norm_placement=post"],
    "gpt2": [
        "model.mlp=48", "model.kv_heads=4", "model.activation=gelu", "model.norm=layernorm",
        "model.biases=[qkv, output, mlp]", "data.sequence=64",
        "model.learned_positions=64",
    ],
    "mixtral": ["model.mlp=32", "model.moe.num_experts=4", "model.moe.normalize_gates=true"],
}  # fmt: skip
COMMON = ["model.vocab=128", "model.embed=32", "model.layers=3", "model.heads=4", "model.kv_heads=2", "precision=fp32"]
CONFIG = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}


def program(family: str, *overrides: str) -> Any:
    """Builds the program of a tiny model."""
    return build_program(load_config(None, *COMMON, *SIZES[family], *overrides), 128, jax.devices()[:8])


def write_model(folder: Path, places: tuple[TensorMapping, ...], model_def: ModelDef) -> Path:
    """Writes random tensors to several files."""
    shapes = tensor_shapes(parameter_slices(places, {path: shape for path, (shape, _) in model_def.tensors().items()}))
    rng = np.random.default_rng(0)
    values = (rng.standard_normal(shape).astype(np.float32) for shape in shapes.values())
    folder.mkdir()
    write_tensors(folder, shapes, np.dtype(np.float32), 30_000, values)
    return folder


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "layout", "piece"),
    [
        ("llama", ["layout=fsdp_tp", "mesh.model=2"], 1 << 20),
        ("llama", ["layout=pp_fsdp", "mesh.pipeline=2", "model.layers=4"], 1000),
        ("phi3", ["layout=fsdp_tp", "mesh.model=2"], 200),
        ("phi3", ["layout=fsdp_tp", "rules.head_dim=fsdp", "rules.embed=null", "mesh.model=2"], 1),
        ("olmo2", ["layout=fsdp_tp", "mesh.model=2"], 1000),
        ("gpt2", ["layout=fsdp_tp", "mesh.model=2"], 200),
        ("mixtral", ["layout=ep_tp", "mesh.expert=2", "mesh.model=2"], 500),
    ],
)
def test_shards_equal_an_unsharded_load_and_are_read_once(family, layout, piece, tmp_path, monkeypatch):
    sharded, chosen = program(family, *layout), TENSOR_MAPPINGS[family]
    folder = write_model(tmp_path / "hf", chosen, sharded.model_def)
    blocks: collections.Counter[tuple] = collections.Counter()
    original = loading.read_block

    def read(part, index, dtype, tensors):
        blocks[part.mapping.param, tuple((one.start, one.stop) for one in index)] += 1
        block = original(part, index, dtype, tensors)
        assert block.nbytes <= max(piece, 32)  # what is behind the first dim of a group is not cut
        return block

    monkeypatch.setattr(sharded_read, "BLOCK_BYTES", piece)
    monkeypatch.setattr(loading, "read_block", read)
    params = loading.load_weights(folder, chosen, sharded.state["params"])
    assert set(blocks.values()) == {1}
    read_elements = sum(int(np.prod([stop - start for start, stop in index])) for _, index in blocks)
    assert read_elements == sum(leaf.size for leaf in jax.tree.leaves(params))  # nothing twice, replicated or not
    wanted = sharded.state["params"]
    assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(lambda x: x.sharding, wanted)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(params))

    alone = jax.devices()[0]
    whole = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=jax.sharding.SingleDeviceSharding(alone)), wanted)  # fmt: skip  # noqa: E501
    for path, value in hf_loaded.flat(loading.load_weights(folder, chosen, whole)).items():
        np.testing.assert_array_equal(np.asarray(hf_loaded.flat(params)[path]), np.asarray(value), path)

    (tmp_path / "out").mkdir()
    save_weights(tmp_path / "out", chosen, hf_loaded.flat(params), np.dtype(np.float32), 50_000)
    back, before = open_tensors(tmp_path / "out"), open_tensors(folder)
    assert back.keys() == before.keys()
    for name, entry in back.items():
        np.testing.assert_array_equal(entry[:], before[name][:], name)


def test_gpt2_files_without_the_head_and_with_masks(tmp_path):
    """Published files name tensors `h.0` and store a causal mask of any dtype for each layer."""
    one, chosen = program("gpt2", "layout=ddp", "model.tie_embeddings=true"), TENSOR_MAPPINGS["gpt2"]
    folder = write_model(tmp_path / "hf", chosen, one.model_def)
    want = loading.load_weights(folder, chosen, one.state["params"])
    held = {name: entry[:] for name, entry in open_tensors(folder).items()}
    for file in folder.iterdir():
        file.unlink()
    masks = {f"h.{layer}.attn.bias": np.tri(5, dtype=np.uint8)[None, None] for layer in range(3)}
    save_file(
        {name.removeprefix("transformer."): value for name, value in held.items()} | masks, folder / "model.safetensors"
    )
    jax.tree.map(np.testing.assert_array_equal, loading.load_weights(folder, chosen, one.state["params"]), want)


def test_a_shard_reads_only_its_values(tmp_path, monkeypatch):
    sharded, chosen = program("llama", "layout=fsdp_tp", "mesh.model=2"), TENSOR_MAPPINGS["llama"]
    folder = write_model(tmp_path / "hf", chosen, sharded.model_def)
    touched = collections.Counter()

    def read(tensor: StoredTensor, index: Any) -> np.ndarray:
        block = original(tensor, index)
        touched[tensor] += block.size
        return block

    original = StoredTensor.__getitem__
    monkeypatch.setattr(StoredTensor, "__getitem__", read)
    params = loading.load_weights(folder, chosen, sharded.state["params"])
    assert sum(touched.values()) == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_the_commands_from_end_to_end(tmp_path, capfd):
    model_def = program("llama").model_def
    folder = write_model(tmp_path / "hf", TENSOR_MAPPINGS["llama"], model_def)
    config = {"model_type": "llama", "vocab_size": 128, "intermediate_size": 48, **CONFIG, "eos_token_id": 5}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
    run, out = tmp_path / "run", tmp_path / "out"
    arguments = [
        "--to",
        str(run),
        "layout=fsdp_tp",
        "mesh.model=2",
    ]
    assert main(["import", str(folder), *arguments]) == 0
    assert "has no tokenizer.json" in capfd.readouterr().out
    assert main(["export", str(run), "--to", str(out), "--dtype", "bfloat16", "layout=fsdp"]) == 0
    assert "llama of step 0" in capfd.readouterr().out
    back = open_tensors(out)
    for name, entry in open_tensors(folder).items():
        np.testing.assert_array_equal(back[name][:], entry[:].astype(back[name][:].dtype), name)
    content = json.loads((out / "config.json").read_text())
    assert (content["eos_token_id"], content["torch_dtype"]) == (5, "bfloat16")
    assert (out / "generation_config.json").read_text() == '{"eos_token_id": 5}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "run"]

    # From files in bfloat16 and back they are the same bytes.
    assert (
        main(
            [
                "import",
                str(out),
                "--to",
                str(tmp_path / "run2"),
                "precision=bf16_pure",
            ]
        )
        == 0
    )
    assert main(["export", str(tmp_path / "run2"), "--to", str(tmp_path / "out2")]) == 0
    for file in ("model.safetensors", "config.json", "generation_config.json"):
        assert (tmp_path / "out2" / file).read_bytes() == (out / file).read_bytes(), file
    capfd.readouterr()

    for arguments, words in (
        (["export", str(run), "--to", str(out)], "out already exists"),
        (["export", str(run), "--to", str(tmp_path / "new"), "--step", "3"], "no checkpoint 3"),
        (["export", str(run), "--to", str(tmp_path / "new"), "--shard-size", "many"], "--shard-size"),
        (["export", str(tmp_path), "--to", str(tmp_path / "new")], "not a run"),
        (["import", str(folder), "--to", str(run)], "run already exists"),
    ):
        assert main(arguments) == 2
        error = capfd.readouterr().err
        assert words in error
        assert len(error.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "out2", "run", "run2"]


def test_commands_with_a_gpt2_of_few_positions(tmp_path, capfd):
    """The number of positions is the default and the maximum of the sequence length."""
    folder = write_model(
        tmp_path / "hf", TENSOR_MAPPINGS["gpt2"], program("gpt2", "model.tie_embeddings=true").model_def
    )
    config = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 64, "attn_pdrop": 0.1}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 128, **config}))
    run, out, quick = tmp_path / "run", tmp_path / "out", ["precision=fp32"]
    assert main(["import", str(folder), "--to", str(run), "layout=fsdp_tp", "mesh.model=2", *quick]) == 0
    assert load_config(run / "config.yaml").data.sequence == 64
    assert main(["export", str(run), "--to", str(out)]) == 0
    back, content = open_tensors(out), json.loads((out / "config.json").read_text())
    for name, entry in open_tensors(folder).items():
        np.testing.assert_array_equal(back[name][:], entry[:], name)
    assert {name: content[name] for name in config} == config
    capfd.readouterr()
    generate = ["generate", str(folder), "--prompt", "12345", "--temperature", "0", "data.tokenizer=bytes", *quick]
    assert main([*generate, "model.vocab=null", "--tokens", "59"]) == 0
    assert capfd.readouterr().out.startswith("12345")
    assert main([*generate, "--tokens", "60"]) == 2
    output = capfd.readouterr()
    assert (output.out, len(output.err.splitlines())) == ("", 1)
    assert "5 tokens and 60 new ones are more than the model's 64 learned positions" in output.err
    with pytest.raises(ConfigError, match=r"data.sequence: expected at most 64 tokens .* found 1024$"):
        load_config(None, f"model.from={folder}")
