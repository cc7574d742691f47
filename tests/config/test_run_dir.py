"""Folder of a new run: free, and named by what differs from the run whose name it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.config import Config
from jaxtrain.config.run_dir import create_directory, free_directory, write_config
from jaxtrain.core.resolve import resolve


def taken(directory: Path, config: Config) -> None:
    create_directory(directory)
    write_config(directory, config)


def load(tmp_path: Path, *overrides: str) -> Config:
    return resolve("quickstart", f"dir={tmp_path}", *overrides)[0]


def test_the_first_run_has_its_name_and_the_same_again_a_number(tmp_path: Path):
    config = load(tmp_path)
    assert free_directory(config) == tmp_path / "quickstart"
    taken(tmp_path / "quickstart", config)
    assert free_directory(config) == tmp_path / "quickstart-2"
    taken(tmp_path / "quickstart-2", config)
    assert free_directory(config) == tmp_path / "quickstart-3"


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["layout=fsdp"], "quickstart-fsdp"),
        (["steps=20"], "quickstart-steps20"),
        (["optimizer.lr=1e-3", "optimizer.name=lion"], "quickstart-lion-lr0.001"),
        (["mesh.model=4"], "quickstart-data1-model4"),
        (["checkpoint.every=null"], "quickstart-no-every"),
        (["data.sources=stdlib"], "quickstart-2"),  # the same in other words
        (["data.sources=/tmp/some where/*.txt"], "quickstart-path"),
        (["layout=tp", "seed=1", "steps=9", "data.sequence=64"], "quickstart-seed1-steps9-tp"),
    ],
)
def test_another_run_of_the_same_name_says_what_differs(overrides: list[str], name: str, tmp_path: Path):
    taken(tmp_path / "quickstart", load(tmp_path))
    config = resolve("quickstart", f"dir={tmp_path}", *overrides, paths=False)[0]
    found = free_directory(config)
    assert found.name == name
    taken(found, config)
    again = name[: -len("2")] + "3" if name == "quickstart-2" else f"{name}-2"
    assert free_directory(config).name == again


def test_what_is_no_run_or_cannot_be_read_gets_a_number(tmp_path: Path):
    config = load(tmp_path, "steps=7")
    (tmp_path / "quickstart").mkdir()
    assert free_directory(config).name == "quickstart"  # an empty folder is free
    (tmp_path / "quickstart" / "notes").touch()
    assert free_directory(config).name == "quickstart-2"
    (tmp_path / "quickstart" / "config.yaml").write_text("steps: [")
    assert free_directory(config).name == "quickstart-2"
