"""Compiled plans kept on disk, so that a search goes on where another one ended."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.packages import installed_version
from jaxtrain.planning.result import Plan

PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
# Keys that no compiled step depends on.
UNSEEN = ("name", "dir", "layout", "log", "checkpoint", "eval")
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Results:
    """A folder with a file for each plan, named by a hash of all that it depends on.

    Files are written whole or not at all; one that cannot be read counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | None = None) -> Results:
        """Opens the results in `folder`; default: ~/.cache/jaxtrain/plan."""
        return cls(Path(os.path.expanduser(folder or "~/.cache/jaxtrain/plan")))

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that a plan depends on, and of this package's files."""
        found = {name: installed_version(name) for name in PACKAGES}
        return {**found, "files": _files(), **{name: os.environ.get(name, "") for name in FLAGS}}

    def key(self, config: Config, vocab: int | None, target: str) -> str:
        """Returns the key of a config on a target."""
        values = {key: value for key, value in config.model_dump(mode="json").items() if key not in UNSEEN}
        asked = {"config": values, "vocab": vocab, "target": target, "versions": self.versions}
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]

    def read(self, key: str) -> Plan | None:
        """The plan, None where there is none."""
        try:
            return Plan.from_dict(json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None  # absent, or written by something else: it is made again

    def write(self, key: str, plan: Plan) -> None:
        """Keeps a plan. Raises OSError where the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{key}.json", json.dumps(plan.as_dict()))


def _files() -> str:
    """A hash of the sizes and times of this package's files: a source checkout changes without its version."""
    root = Path(__file__).resolve().parents[1]
    found: list[Any] = []
    for path in sorted(root.rglob("*.py")):
        state = path.stat()
        found.append((str(path.relative_to(root)), state.st_size, state.st_mtime_ns))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]
