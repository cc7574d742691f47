"""Islands that come to the others when these have done all steps: they take, validate and save what was agreed on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from local_islands import LocalServer

import jaxtrain
from jaxtrain.callbacks import default
from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.config.run_dir import create_directory, write_config
from jaxtrain.islands.callback import IslandCallback

STEPS = 8


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Islands:
    """Two islands, of which one may begin alone, as whole runs in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "texts").mkdir()
        for number in range(20):
            (folder / f"texts/{number}.txt").write_text(f"the quick brown fox jumps over {number} lazy dogs. " * 20)
        self.folder, self.time, self._patch = folder, Clock(), monkeypatch
        self.server = LocalServer(self.config(0), self.time)

    def config(self, index: int) -> Any:
        text, devices = str(self.folder / "texts"), jax.device_count()
        return jaxtrain.load(None, base={
            "name": f"island-{index}", "dir": str(self.folder), "steps": STEPS, "precision": "fp32",
            "simulate": devices, "model": {"embed": 32, "layers": 2, "mlp": 64, "heads": 2},
            "mesh": {"data": devices}, "layout": "ddp",
            "data": {
                "sources": [{"path": text}], "sequence": 32, "global_batch": 2 * devices, "validation_fraction": 0.2,
                "cache_dir": str(self.folder / "cache"),
            },
            "sync": {"strategy": "diloco", "every": 2}, "islands": {"count": 2, "quorum": 1, "grace": 60},
            "eval": {"every": STEPS, "batches": 1}, "checkpoint": {"every": STEPS},
            "log": {"tensorboard": False, "sample_tokens": 0},
        })  # fmt: skip

    def train(self, index: int, *callbacks: Callback) -> Any:
        self._patch.setattr(default, "this_island", lambda config: IslandCallback(index, lambda run: self.server.door))
        config = self.config(index)
        create_directory(config.run_dir)
        write_config(config.run_dir, config)
        return jaxtrain.resume(config.run_dir, callbacks=callbacks)  # as `jaxtrain launch islands` starts them

    def pushes(self) -> list[tuple[int, int]]:
        return [(record["island"], record["clock"]) for record in self.server.pushes()]


@pytest.fixture
def islands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Islands]:
    made = Islands(tmp_path, monkeypatch)
    with made.server:
        yield made


class OthersGoOn(Callback):
    """At a step of an island: the others take it for silent, and do all their steps."""

    def __init__(self, islands: Islands, step: int) -> None:
        self._islands, self._step = islands, step
        self.other: Any = None

    def on_step_end(self, trainer: TrainerView, step: int) -> None:
        if step == self._step and self.other is None:
            self._islands.time.now += 100.0
            self._islands.server.door.call("check_silence")
            self.other = self._islands.train(0)


def same(ours: Any, theirs: Any) -> None:
    """Checks that a run ended with what the others had agreed on."""
    assert ours.step == STEPS
    assert (ours.run_dir / f"checkpoints/{STEPS}").is_dir()
    jax.tree.map(np.testing.assert_array_equal, ours.state["params"], theirs.state["params"])
    assert ours.metrics["eval/loss"] == theirs.metrics["eval/loss"]


def test_an_island_that_comes_after_the_last_step_ends_with_what_was_agreed_on(islands: Islands) -> None:
    first = islands.train(0)
    second = islands.train(1)
    same(second, first)
    assert islands.pushes() == [(0, clock) for clock in (2, 4, 6, 8)]
    assert [record["clock"] for record in islands.server.log if record["event"] == "join"] == [0, 8]


def test_an_island_that_wakes_after_the_last_step_ends_with_what_was_agreed_on(islands: Islands) -> None:
    others = OthersGoOn(islands, 3)
    second = islands.train(1, others)
    same(second, others.other)
    # Its work of steps 3 and 4 is late, and it does none alone after the others.
    assert islands.pushes() == [(1, 2), *((0, clock) for clock in (4, 6, 8))]
    assert [record["counts"] for record in islands.server.log if record["event"] == "late"] == [False]
