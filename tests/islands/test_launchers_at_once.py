"""Launchers that begin one new run at the same moment, as the tasks of a job do."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import yaml

from jaxtrain.config.run_dir import CONFIG
from jaxtrain.launch.islands.options import IslandsOptions
from jaxtrain.launch.islands.run import open_run

LAUNCHERS = 4


def opened(config: str, index: int) -> str:
    options = IslandsOptions(config, ("sync.strategy=diloco", "sync.every=4"), LAUNCHERS, (index,))
    return str(open_run(options)[1])


def test_all_open_the_same_run(tmp_path: Path) -> None:
    for attempt in range(3):
        config = tmp_path / "my.yaml"
        config.write_text(yaml.safe_dump({"name": f"run{attempt}", "dir": str(tmp_path), "data": {"global_batch": 8}}))
        with ProcessPoolExecutor(LAUNCHERS, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(opened, [str(config)] * LAUNCHERS, range(LAUNCHERS)))
        assert found == [str(tmp_path / f"run{attempt}")] * LAUNCHERS
        assert sorted(path.name for path in Path(found[0]).iterdir()) == [CONFIG, *(f"island-{i}" for i in range(4))]
