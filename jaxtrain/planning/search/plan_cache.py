"""Cache of compiled plans on disk, so that an interrupted search can be continued."""

from __future__ import annotations

import hashlib
import json
import os
from functools import cached_property
from pathlib import Path

from jaxtrain.config.schema import Config
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.packages import installed_version
from jaxtrain.planning.result import Plan

PACKAGES = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "libtpu", "jax-cuda13-plugin", "nvidia-cudnn-cu13")
IGNORED_KEYS = ("name", "dir", "layout", "log", "checkpoint", "eval")  # no compiled step depends on them
FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class PlanCache:
    """Folder with a file for each plan, named by a hash of everything that the plan depends on.

    An unreadable file counts as absent.

    Args:
        folder: default: ~/.cache/jaxtrain/plan.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(os.path.expanduser(folder or "~/.cache/jaxtrain/plan"))

    @cached_property
    def versions(self) -> dict[str, str]:
        """Versions of the packages that a plan depends on, a hash of this package's files, and compiler flags."""
        versions = {name: installed_version(name) for name in PACKAGES}
        return {**versions, "files": _source_hash(), **{name: os.environ.get(name, "") for name in FLAGS}}

    def key(self, config: Config, vocab: int | None, target: str) -> str:
        """Returns the key of a config on a target."""
        values = {key: value for key, value in config.model_dump(mode="json").items() if key not in IGNORED_KEYS}
        inputs = {"config": values, "vocab": vocab, "target": target, "versions": self.versions}
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]

    def read(self, key: str) -> Plan | None:
        """Reads a plan; None if it is absent or unreadable."""
        try:
            return Plan.from_dict(json.loads((self.folder / f"{key}.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None

    def write(self, key: str, plan: Plan) -> None:
        """Writes a plan. Raises OSError if the folder can not be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / f"{key}.json", json.dumps(plan.as_dict()))


def _source_hash() -> str:
    """Hash of the sizes and times of this package's files: a source checkout changes without its version."""
    root = Path(__file__).resolve().parents[1]
    states = [(path, path.stat()) for path in sorted(root.rglob("*.py"))]
    files = [(str(path.relative_to(root)), state.st_size, state.st_mtime_ns) for path, state in states]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
