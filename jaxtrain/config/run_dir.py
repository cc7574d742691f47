"""The folder of a run: which one is free, and its config.yaml."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtrain.config.schema import Config
from jaxtrain.config.show import dump_yaml
from jaxtrain.errors import UserError
from jaxtrain.io.atomic import write_atomic

CONFIG = "config.yaml"


def free_directory(config: Config) -> Path:
    """DIR/NAME, or the first free DIR/NAME-2, -3, ...: a run is never written over another."""
    directory, number = config.run_dir, 2
    while directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        directory = config.run_dir.with_name(f"{config.name}-{number}")
        number += 1
    return directory


def saved_config(directory: Path) -> Path:
    """config.yaml of a run's folder. Raises UserError where it is not one."""
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(f"{directory}: not a run (no config.yaml); expected the folder that `jaxtrain train` printed")
    return path


def write_config(directory: Path, config: Config) -> None:
    """Replaces config.yaml at once: a kill leaves the old one or the new one."""
    write_atomic(directory / CONFIG, dump_yaml(absolute(config)))


def absolute(config: Config) -> Config:
    """The config with its paths made absolute, so that a run can be resumed from anywhere."""

    def whole(path: str, *words: str) -> str:
        return path if path in words or "://" in path else os.path.abspath(os.path.expanduser(path))

    data, model, durable = config.data, config.model, config.checkpoint.durable
    if durable is not None:
        section = config.checkpoint.model_copy(update={"durable": whole(durable)})
        config = config.model_copy(update={"checkpoint": section})
    if model.from_ is not None:
        config = config.model_copy(update={"model": model.model_copy(update={"from_": whole(model.from_)})})
    if not data.is_text:
        return config
    sources = tuple(s.model_copy(update={"path": whole(s.path, "stdlib")}) for s in data.sources)
    paths = {"sources": sources, "tokenizer": whole(data.tokenizer, "bytes"), "cache": whole(data.cache_dir)}
    sets = {name: s.model_copy(update={"path": whole(s.path, "stdlib")}) for name, s in config.eval.sets.items()}
    sections = {"data": data.model_copy(update=paths), "eval": config.eval.model_copy(update={"sets": sets})}
    return config.model_copy(update=sections)
