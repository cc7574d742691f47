"""Models of the Hugging Face Hub by name: their copy in the Hub's cache on this machine, or a new download."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from jaxtrain.errors import ModelFileError, describe_error
from jaxtrain.io.packages import installed_version

PREFIX = "hf://"
NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
CONFIG = "config.json"
FILES = (CONFIG, "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
INDEX = "model.safetensors.index.json"


def model_folder(name: str | os.PathLike[str], weights: bool = True) -> Path:
    """Returns the folder of a Hugging Face model.

    A path is returned as it is. `OWNER/NAME` or `NAME`, with `@REVISION` or not and with `hf://` or not, that is no
    path here is a model of the Hub: its newest copy in the Hub's cache, else a new one, for which `huggingface_hub`
    must be installed.

    Args:
        name: path or name.
        weights: whether the weights are needed, too, or the config alone.

    Raises:
        ModelFileError: no such folder, and the model cannot be downloaded; says with which command it can be.
    """
    text = os.fspath(name)
    path = Path(os.path.expanduser(text))
    match = NAME.fullmatch(text.removeprefix(PREFIX))
    if match is None or (not text.startswith(PREFIX) and _is_path(path)):
        return path
    model, revision = match["id"], match["revision"] or "main"
    return _cached(model, revision, weights) or _download(model, revision, weights)


def _is_path(path: Path) -> bool:
    """Returns whether it is the path of a file or folder, or of one that is missing in a folder that is there."""
    return path.exists() or path.is_absolute() or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())


def cache_folder() -> Path:
    """Returns the Hub's cache, as its own library finds it."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _cached(model: str, revision: str, weights: bool) -> Path | None:
    """Returns the copy of a model in the cache, or None if it is not there or not whole."""
    folder = cache_folder() / f"models--{model.replace('/', '--')}"
    reference = folder / "refs" / revision
    try:
        snapshot = folder / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)
        is_whole = (snapshot / CONFIG).is_file() and (not weights or _has_weights(snapshot))
    except (OSError, ValueError):
        return None
    return snapshot if is_whole else None


def _has_weights(snapshot: Path) -> bool:
    """Returns whether all files of the weights are there: one, or those that the index names."""
    index = snapshot / INDEX
    if not index.is_file():
        return any(snapshot.glob("*.safetensors"))
    names: Any = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    return all((snapshot / file).is_file() for file in set(names.values()))


def _download(model: str, revision: str, weights: bool) -> Path:
    """Downloads a model into the Hub's cache. Raises ModelFileError."""
    version = "" if revision == "main" else f" --revision {revision}"
    command = f"`hf download {model}{version} --include '*.json' '*.safetensors'`"
    where = f"which jaxtrain then finds in {cache_folder()}; or the path of its folder"
    if not installed_version("huggingface_hub"):
        problem = "and huggingface_hub, which downloads models of the Hub, is not installed"
        command = f"pip install 'jaxtrain[hf]', or on any machine {command}"
    else:
        try:
            import huggingface_hub  # pyright: ignore[reportMissingImports]

            patterns = [*FILES, *(WEIGHTS if weights else ())]
            return Path(
                huggingface_hub.snapshot_download(
                    model, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
                )
            )
        except Exception as error:  # its own classes and those of the HTTP library below it
            problem = f"and the Hub does not give it: {describe_error(error)}"
            command = f"where there is a network {command}"
    raise ModelFileError(f"{model}: no folder here, {problem}; expected {command}, {where}")
