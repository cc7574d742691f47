"""A strategy whose replicas train on rows of different steps: what the trainer reads for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net

import jaxtrain
from jaxtrain.errors import DataError

READ: list[tuple[int, tuple[int, ...]]] = []


class Interleaved(jaxtrain.Strategy):
    """Replica i of two trains on the rows of step 2 n + i."""

    mixes_batches = True

    def data_steps(self, step: int) -> tuple[int, ...]:
        return 2 * step, 2 * step + 1


class Together(tiny_net.Rows):
    """What such replicas train on, as the rows of one step."""

    def batch(self, step: int, rows_of: Any = slice(None)) -> dict[str, np.ndarray]:
        first, second = (tiny_net.rows(self.first + 2 * step + i) for i in (0, 1))
        half = tiny_net.ROWS // 2
        return {name: np.concatenate([first[name][:half], second[name][half:]])[rows_of] for name in first}


def config(folder: Path, name: str, **changes: Any) -> jaxtrain.Config:
    base: dict[str, Any] = {
        "name": name, "dir": str(folder), "steps": 4, "simulate": 8, "mesh": {"replica": 2, "data": 2, "fsdp": 2},
        "log": {"tensorboard": False}, "sync": {"strategy": "test_mixed_batches:Interleaved", "every": 2},
    }  # fmt: skip
    return tiny_net.config(**(base | changes))


def test_replicas_train_on_the_rows_that_the_strategy_names(tmp_path: Path) -> None:
    mixed = jaxtrain.train(config(tmp_path, "mixed"))
    data = {"type": "test_mixed_batches:Together"}
    plain = jaxtrain.train(config(tmp_path, "plain", data=data, sync={"strategy": "local_sgd", "every": 2}))
    for ours, theirs in zip(jax.tree.leaves(mixed.state["params"]), jax.tree.leaves(plain.state["params"])):
        np.testing.assert_array_equal(ours, theirs)
    assert np.abs(np.diff(np.asarray(mixed.state["params"]["a"]), axis=0)).max() == 0  # after an exchange


def test_batches_are_skipped_by_their_own_numbers(tmp_path: Path) -> None:
    """Steps of the data from 3 on are 5 further on, whichever replica has them."""
    trainer = jaxtrain.Trainer(config(tmp_path, "skips"))
    run = trainer._opened()
    run.manifest["skips"] = [[3, 8]]
    assert [run._batches_of(step) for step in range(3)] == [[0, 1], [2, 8], [9, 10]]
    assert [run.batch_of(step) for step in range(3)] == [0, 2, 9]
    with run.batches() as feed:
        placed = jax.device_get([feed.batch_at(step) for step in range(3)])
    half = tiny_net.ROWS // 2
    for batch, (first, second) in zip(placed, [(0, 1), (2, 8), (9, 10)]):
        np.testing.assert_array_equal(batch["x"][:half], tiny_net.rows(first)["x"][:half])
        np.testing.assert_array_equal(batch["x"][half:], tiny_net.rows(second)["x"][half:])


def test_gradients_are_those_of_these_rows(tmp_path: Path) -> None:
    trainer = jaxtrain.Trainer(config(tmp_path, "gradients"))
    _, found = trainer.gradients()
    _, expected = trainer.gradients(Together("train", 0, tiny_net.ROWS).batch(0))
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(ours, theirs)


def test_an_iterable_is_refused_in_one_line(tmp_path: Path) -> None:
    said = r"data is read in order; expected data with `batch\(step, rows\)`, or arrays"
    run = config(tmp_path, "iterable", data={"type": "object"})
    with pytest.raises(DataError, match=said) as error:
        jaxtrain.train(run, data=stream)
    assert "\n" not in str(error.value)


def stream() -> Any:
    step = 0
    while True:
        yield tiny_net.rows(step)
        step += 1
