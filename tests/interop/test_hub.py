"""Models by their name on the Hugging Face Hub: from its cache, else the command that downloads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxtrain.cli.main import main
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import ConfigError, ModelFileError
from jaxtrain.interop import hub
from jaxtrain.interop.hub import model_folder

LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300,
    "num_key_value_heads": 2, "intermediate_size": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    """The Hub's cache with a whole model, one that has only its config, and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)

    def refuse(*args, **kwargs):
        raise ConnectionError("no network")

    if hub.installed_version("huggingface_hub"):
        monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for name, files in (("me--tiny", ["model.safetensors"]), ("gpt2", [])):
        folder = tmp_path / "hub" / f"models--{name}"
        snapshot = folder / "snapshots" / "0a1b"
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0a1b")
        (snapshot / "config.json").write_text(json.dumps(LLAMA))
        for file in files:
            (snapshot / file).touch()
    return tmp_path / "hub"


def test_a_model_in_the_cache_is_found_by_its_name(cache: Path):
    expected = cache / "models--me--tiny" / "snapshots" / "0a1b"
    for name in ("me/tiny", "hf://me/tiny", "me/tiny@main", "me/tiny@0a1b"):
        assert model_folder(name) == expected
    assert model_folder("gpt2", weights=False) == cache / "models--gpt2" / "snapshots" / "0a1b"


def test_a_path_is_a_path(cache: Path, tmp_path: Path):
    (tmp_path / "me" / "tiny").mkdir(parents=True)
    for path in ("me/tiny", "me/other", "./tiny", "~/tiny", "/tiny", "a/b/c"):  # `me` is a folder here
        assert model_folder(path) == Path(path).expanduser()
    assert model_folder("hf://me/tiny").is_relative_to(cache)


@pytest.mark.parametrize("name", ["gpt2", "me/other", "me/tiny@v2"])
def test_without_a_network_the_command_is_printed(cache: Path, name: str):
    """The first lacks its weights, the second is not there, the third has another revision."""
    with pytest.raises(ModelFileError) as error:
        model_folder(name)
    model, _, revision = name.partition("@")
    version = f" --revision {revision}" if revision else ""
    assert f"`hf download {model}{version} --include '*.json' '*.safetensors'`" in str(error.value)
    assert str(cache) in str(error.value)
    assert "\n" not in str(error.value)


def test_sharded_weights_must_be_whole(cache: Path):
    snapshot = cache / "models--me--tiny" / "snapshots" / "0a1b"
    (snapshot / "model.safetensors").rename(snapshot / "one.safetensors")
    (snapshot / hub.INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ModelFileError):
        model_folder("me/tiny")
    (snapshot / "two.safetensors").touch()
    assert model_folder("me/tiny") == snapshot


def test_a_missing_package_is_said(cache: Path, monkeypatch):
    monkeypatch.setattr(hub, "installed_version", lambda package: "")
    with pytest.raises(
        ModelFileError, match=r"huggingface_hub.* is not installed; expected pip install 'jaxtrain\[hf\]'"
    ):
        model_folder("me/other")


def test_a_config_continues_a_model_by_its_name(cache: Path):
    config, origin = resolve("quickstart", "model.from=me/tiny", "model={}")
    assert config.model.from_ == str(cache / "models--me--tiny" / "snapshots" / "0a1b")
    assert origin["model.from"] == "command line"
    assert config.model.vocab == 300
    looked_at, _ = resolve("quickstart", "model.from=gpt2", paths=False)  # `config` and `plan` need no weights
    assert looked_at.model.from_ is not None
    with pytest.raises(ConfigError, match=r"model\.from: gpt2: no folder here"):
        resolve("quickstart", "model.from=gpt2")


@pytest.mark.parametrize("arguments", [["import", "me/other", "--to", "run"], ["generate", "other", "--prompt", "x"]])
def test_commands_take_names(arguments: list[str], cache: Path, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert "hf download" in error
    assert "\n" not in error
