"""Run directory: choice of a free one, and its config.yaml."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxtrain.config.load import resolve
from jaxtrain.config.schema import LAYOUT_KEYS, Config
from jaxtrain.config.show import diff, dump_yaml, flatten
from jaxtrain.errors import UserError
from jaxtrain.io.atomic import write_atomic

CONFIG = "config.yaml"
PLACE = ("name", "dir")  # keys that say where a run is, not what it does
MAX_DIFFERENCES, MAX_WORD = 3, 24  # of the name of a folder
WRONG_PATH = {
    errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip


def free_directory(config: Config, says_difference: bool = True) -> Path:
    """Returns DIR/NAME, or a free folder beside it, so that no run overwrites another.

    If DIR/NAME is the run of another config, the folder has in its name what differs, as in `quickstart-fsdp` and
    `quickstart-lr0.001`; a number follows where that one is not free or nothing differs: `quickstart-2`.

    Args:
        config: config of the run.
        says_difference: False: numbers alone, for launched runs, whose saved config is of the mesh of a generation.
    """
    directory, number = config.run_dir, 2
    with _named_errors(directory):
        if not _is_taken(directory):
            return directory
        name = "-".join([config.name, *(differences(directory, config) if says_difference else ())])
        directory = config.run_dir.with_name(name)
        while _is_taken(directory):
            directory = config.run_dir.with_name(f"{name}-{number}")
            number += 1
    return directory


def _is_taken(directory: Path) -> bool:
    return _exists(directory) and not (directory.is_dir() and not any(directory.iterdir()))


def differences(directory: Path, config: Config) -> list[str]:
    """Returns short names of the values in which a config differs from that of a run, the first few; for its folder."""
    try:
        saved = resolve(directory / CONFIG, paths=False)[0]
    except (UserError, OSError):  # no run, or one that this version does not read
        return []
    new = flatten(absolute(config))
    changed = {key: new[key] for key in diff(saved, absolute(config)) if key in new and key not in PLACE}
    derived = LAYOUT_KEYS if {"layout", "simulate"} & set(changed) else ()  # the mesh follows from these
    names = [_short(key, value) for key, value in changed.items() if key.partition(".")[0] not in derived]
    return [name for name in dict.fromkeys(names) if name][:MAX_DIFFERENCES]


def _short(key: str, value: Any) -> str:
    """Returns a value as part of a file name: `fsdp` for the layout, `lr0.001`, `no-ema_decay`."""
    name = key.rpartition(".")[2]
    if value is None or value is False:
        text = f"no-{name}"
    elif isinstance(value, str):
        text = value if len(value) <= MAX_WORD and re.fullmatch(r"\w[\w.]*", value, re.ASCII) else name
    elif isinstance(value, (int, float)) and value is not True:
        text = f"{name}{value:g}" if isinstance(value, float) else f"{name}{value}"
    else:
        text = name
    return re.sub(r"[^\w.-]", "", text, flags=re.ASCII)[:MAX_WORD]


def _exists(path: Path) -> bool:
    """Returns whether a path exists; unlike `Path.exists` it raises if a parent is a file."""
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def create_directory(directory: Path) -> None:
    """Creates a run directory, which may exist. Raises UserError if it cannot be created."""
    with _named_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)


@contextmanager
def _named_errors(directory: Path) -> Iterator[None]:
    """Makes one line of an error that a wrong path causes; a full disk is none."""
    try:
        yield
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        found = f"{error.strerror}: {directory}"
        raise UserError(f"dir and name: {found}; expected a folder that can be created") from error


def saved_config(directory: Path) -> Path:
    """Returns the path of a run's config.yaml. Raises UserError if there is none."""
    path = directory / CONFIG
    if not path.is_file():
        raise UserError(
            f"{directory}: not a run (no config.yaml); expected a run directory, as `jaxtrain train` prints it"
        )
    return path


def write_config(directory: Path, config: Config) -> None:
    """Replaces config.yaml atomically: after a kill it is the old one or the new one."""
    write_atomic(directory / CONFIG, dump_yaml(absolute(config)))


def absolute(config: Config) -> Config:
    """Returns the config with absolute paths, so that a run can be resumed from any folder."""

    def expand(path: str, *names: str) -> str:
        return path if path in names or "://" in path else os.path.abspath(os.path.expanduser(path))

    data, model, checkpoint = config.data, config.model, config.checkpoint
    changes: dict[str, Any] = {}
    if checkpoint.durable is not None:
        changes["checkpoint"] = checkpoint.model_copy(update={"durable": expand(checkpoint.durable)})
    if model.from_ is not None:
        model = changes["model"] = model.model_copy(update={"from_": expand(model.from_)})
    if model.weights.path is not None:
        weights = model.weights.model_copy(update={"path": expand(model.weights.path)})
        changes["model"] = model.model_copy(update={"weights": weights})
    if data.is_text:
        sources = tuple(s.model_copy(update={"path": expand(s.path, "stdlib")}) for s in data.sources)
        paths = {"tokenizer": expand(data.tokenizer, "bytes"), "cache_dir": expand(data.cache_dir)}
        sets = {name: s.model_copy(update={"path": expand(s.path, "stdlib")}) for name, s in config.eval.sets.items()}
        changes["data"] = data.model_copy(update={"sources": sources, **paths})
        changes["eval"] = config.eval.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)
