"""`model.from`: training from the weights of a Hugging Face folder, under any layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxtrain import load, train
from jaxtrain.cli.main import main
from jaxtrain.config import ConfigError
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.core.resolve import resolve
from jaxtrain.interop.config_json import to_hf_config
from jaxtrain.interop.families import FAMILIES
from jaxtrain.interop.safetensors_io import open_tensors, write_tensors
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.interop.tensor_slices import parameter_slices, tensor_shapes
from jaxtrain.models.decoder_params import decoder_tensors
from jaxtrain.trackers.console import ConsoleTracker

MODEL = ModelConfig(vocab=260, embed=16, layers=4, heads=4, kv_heads=2, mlp=24, qk_norm="per_head", tie_embeddings=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Writes a Qwen 3 with random weights."""
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(to_hf_config(MODEL, 260, FAMILIES["qwen3"])))
    shapes = {name: shape for name, (shape, _) in decoder_tensors(MODEL, 260).items()}
    tensors = tensor_shapes(parameter_slices(TENSOR_MAPPINGS["qwen3"], shapes))
    rng = np.random.default_rng(0)
    values = (0.2 * rng.standard_normal(shape).astype(np.float32) for shape in tensors.values())
    write_tensors(path, tensors, np.dtype(np.float32), 10**9, values)
    return path


def options(folder: Path, tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "text").mkdir(exist_ok=True)
    for name in range(12):
        (tmp_path / f"text/{name}.txt").write_text(f"{name} " * 200)
    return [
        f"model.from={folder}", f"dir={tmp_path}/runs", f"data.sources=[{{path: {tmp_path}/text}}]",
        "precision=fp32", f"data.cache_dir={tmp_path}/cache", "data.workers=1", "data.sequence=32",
        "data.validation_fraction=0",
        "steps=2", "log.tensorboard=false", "optimizer.ema_decay=0.5", *more,
    ]  # fmt: skip


def test_model_options_come_from_the_folder_and_can_be_overridden(folder: Path):
    config, origin = resolve(None, f"model.from={folder}", "model.sliding_window=8", paths=False)
    assert (config.model.vocab, config.model.heads, config.model.qk_norm) == (260, 4, "per_head")
    assert origin["model.heads"].endswith("hf/config.json")
    assert (config.model.sliding_window, origin["model.sliding_window"]) == (8, "command line")
    assert config.data.tokenizer == "bytes"
    (folder / "tokenizer.json").write_text("{}")
    config, _ = resolve(None, f"model.from={folder}", paths=False)
    assert config.data.tokenizer == f"{folder}/tokenizer.json"


def test_the_shipped_recipe_takes_any_model(folder: Path):
    config = load(
        "configs/recipes/continue.yaml", f"model.from={folder}", "layout=tp_sp", "mesh.model=2", "mesh.data=4"
    )
    assert (config.model.qk_norm, config.model.from_, config.steps) == ("per_head", str(folder), 100)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.from=./nowhere"], ["model.from", "nowhere: not a Hugging Face model"]),
        (["model.from={hf}", "model.heads=3"], ["model.kv_heads", "3 query heads"]),
        (["model.from={hf}", "model.type=linear_model:Linear"], ["model.from", "only the decoder"]),
    ],
)
def test_errors_are_raised_before_jax_starts(folder, overrides, words):
    with pytest.raises(ConfigError) as error:
        load(None, *(text.format(hf=folder) for text in overrides))
    assert all(word in str(error.value) for word in words)
    assert len(str(error.value).splitlines()) == 1


def test_layouts_start_from_the_same_weights(folder: Path, tmp_path: Path):
    """Two steps in each; the average of the weights starts from them too. A resumed run does not need the folder."""
    losses = {}
    for layout in ("layout=ddp", "layout=pp_fsdp mesh.pipeline=2 step.microbatches=2"):
        config = load(None, *options(folder, tmp_path, *layout.split(), f"name={layout[7:10]}"))
        result = train(config, console=ConsoleTracker(2, console=Console(quiet=True)))
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        losses[layout] = [json.loads(line)["loss"] for line in lines]
        table = open_tensors(folder)["model.embed_tokens.weight"][:]
        moved = np.abs(np.asarray(result.state["params"]["embed"]["table"]) - table).max()
        averaged = np.abs(np.asarray(result.state["ema"]["embed"]["table"]) - table).max()
        assert 0 < averaged < moved < 1e-3
    first, second = losses.values()
    np.testing.assert_allclose(first, second, rtol=1e-5)
    shutil.rmtree(folder)
    run = tmp_path / "runs/ddp"
    again = load(str(run / "config.yaml"), "steps=3")
    result = train(again, run_dir=run, resume=True, console=ConsoleTracker(3, console=Console(quiet=True)))
    assert result.step == 3


def test_a_run_with_only_imported_weights_cannot_be_resumed(folder: Path, tmp_path: Path, capfd):
    run = tmp_path / "run"
    assert main(["import", str(folder), "--to", str(run), *options(folder, tmp_path)[1:]]) == 0
    capfd.readouterr()
    assert main(["resume", str(run)]) == 2
    assert f"train from them with model.from={folder}" in capfd.readouterr().err
