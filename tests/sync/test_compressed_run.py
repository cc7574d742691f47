"""Runs whose gradients travel compressed: resumed, continued by other replicas, evaluated by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from test_compressed_gradients import compressed
from test_run import config, cut, train
from tiny import losses, records

import jaxtrain
from jaxtrain.config.checks import config_notes

MODEL = {"type": "test_compressed_gradients:Stacked"}
OVER_DATA = {"replica": 1, "data": 2, "fsdp": 2, "model": 2}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "mesh"), [("int4", None), ("powersgd", None), ("topk", None), ("int4", OVER_DATA), ("powersgd", OVER_DATA)]
)
def test_a_resumed_run_is_the_same_bit_for_bit_with_what_was_not_sent(
    tmp_path: Path, kind: str, mesh: dict[str, int] | None
) -> None:
    sync, changes = compressed(kind), {"model": MODEL, **({"mesh": mesh, "zero": 1} if mesh else {})}
    whole, text = train(config(tmp_path, "whole", sync, **changes))
    part, _ = train(config(tmp_path, "part", sync, **changes))
    cut(part.run_dir, 3)
    resumed, text = train(config(tmp_path, "part", sync, **changes), resume=True)
    assert "losses are bitwise those of an uninterrupted run" in text
    assert losses(resumed.run_dir) == losses(whole.run_dir)
    for ours, theirs in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert np.abs(whole.state["sync"]["own"]["worker"]["up"]).max() > 0
    assert {record["exchanged_bytes"] > 0 for record in records(whole.run_dir) if "loss" in record} == {True}
    shards = whole.state["sync"]["own"]["worker"]["up"].addressable_shards
    inner = 2 if mesh is None else 4
    assert {shard.data.size for shard in shards} == {2 * 32 * 48 // inner}  # of one replica, over its devices


@pytest.mark.parametrize(
    ("before", "after", "sync"),
    [
        ({"replica": 2, "data": 2, "fsdp": 2}, {"replica": 4, "data": 1, "fsdp": 2}, compressed("int8")),
        ({"replica": 2, "data": 2, "fsdp": 2}, {"replica": 2, "data": 2, "fsdp": 2}, {}),
        ({"data": 4, "model": 2}, {"data": 8}, compressed("int8")),
        ({"data": 4, "model": 2}, {"replica": 2, "data": 4}, compressed("int8")),
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}, {}),
    ],
    ids=["replicas", "none", "data", "data-replicas", "data-none"],
)
def test_what_was_not_sent_is_dropped_and_the_log_says_so(
    tmp_path: Path, before: Any, after: dict[str, int], sync: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Parameters and moments stay."""
    first, _ = train(config(tmp_path, "run", compressed("int8"), model=MODEL, steps=4, mesh=before))
    assert np.abs(first.state["sync"]["own"]["worker"]["up"]).max() > 0
    had = jax.device_get((first.state["params"], first.state["opt_state"]))
    now = config(tmp_path, "run", sync, model=MODEL, mesh=after)
    trainer = jaxtrain.Trainer(now, run_dir=first.run_dir, resume=True)
    jax.tree.map(
        np.testing.assert_array_equal, had, jax.device_get((trainer.state["params"], trainer.state["opt_state"]))
    )
    if sync:
        assert np.abs(trainer.state["sync"]["own"]["worker"]["up"]).max() == 0
    assert np.isfinite(trainer.fit().metrics["loss"])
    text = capsys.readouterr().out
    assert "guarantee the config asks for different steps from here on" in text
    assert ("without what compression had left to send" in text) == bool(sync)
    if not sync:
        assert "config sync.compress.gradients: int8 -> " in text


def test_what_was_not_sent_over_data_is_sent_by_as_many_replicas(tmp_path: Path) -> None:
    first, _ = train(config(tmp_path, "run", compressed("int8"), model=MODEL, steps=4, mesh={"data": 4, "model": 2}))
    left = np.asarray(first.state["sync"]["own"]["worker"]["up"])
    now = config(tmp_path, "run", compressed("int8"), model=MODEL, mesh={"replica": 4, "fsdp": 2})
    trainer = jaxtrain.Trainer(now, run_dir=first.run_dir, resume=True)
    np.testing.assert_array_equal(left, trainer.state["sync"]["own"]["worker"]["up"])
    assert np.isfinite(trainer.fit().metrics["loss"])


def test_one_replica_evaluates_a_run_and_says_that_it_compresses_nothing(tmp_path: Path) -> None:
    result, _ = train(config(tmp_path, "run", compressed("topk"), model=MODEL, optimizer={"name": "sgd", "lr": 0.05}))
    expected = result.metrics["eval/loss"]
    for overrides in ([], ["mesh.replica=1", "mesh.data=4"]):
        assert jaxtrain.evaluate(result.run_dir, *overrides)["eval/loss"] == pytest.approx(expected, rel=1e-5)
    one = config(tmp_path, "one", compressed("topk"), model=MODEL, mesh={"fsdp": 8}, steps=2)
    assert "sync" not in train(one)[0].state
    assert any("sync.compress.gradients: one replica sends nothing" in note for note in config_notes(one))
