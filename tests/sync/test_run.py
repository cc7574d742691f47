"""Runs whose replicas differ: resumed in the middle of a round, by other replicas, and with one that is not finite."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from rich.console import Console
from tiny import events, losses, records

import jaxtrain
from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.sync import quantized_mean
from jaxtrain.sync.outer_optimizer import outer_step
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trainer.run_training import Result

DILOCO = {"strategy": "diloco", "every": 4}
LOCAL = {"strategy": "local_sgd", "every": 4}


def config(folder: Path, name: str, sync: dict[str, Any], **changes: Any) -> jaxtrain.Config:
    base: dict[str, Any] = {
        "name": name, "dir": str(folder), "steps": 8, "simulate": 8, "mesh": {"replica": 2, "data": 2, "fsdp": 2},
        "optimizer": {"name": "adamw", "lr": 0.02, "grad_clip_norm": 0.5, "ema_decay": 0.5},
        "model": {"options": {"noise": 0.1}}, "checkpoint": {"every": 3, "keep": 10}, "log": {"tensorboard": False},
        "eval": {"every": 4, "batches": 2}, "sync": sync,
    }  # fmt: skip
    return tiny_net.config(**(base | changes))


def train(run: jaxtrain.Config, **options: Any) -> tuple[Result, str]:
    """Trains, and returns the result and what was printed."""
    file = io.StringIO()
    screen = ConsoleTracker(run.steps, console=Console(file=file, width=200), live=False)
    return jaxtrain.train(run, run_dir=run.run_dir, console=screen, **options), file.getvalue()


def resumed_bitwise(folder: Path, sync: dict[str, Any], **changes: Any) -> Result:
    """An undisturbed run, of which runs that are resumed after 3 and after 6 steps are equal, bit for bit."""
    whole, _ = train(config(folder, "whole", sync, **changes))
    for step in (3, 6):
        part, _ = train(config(folder, f"part-{step}", sync, **changes))
        cut(part.run_dir, step)
        resumed, text = train(config(folder, f"part-{step}", sync, **changes), resume=True)
        assert "losses are bitwise those of an uninterrupted run" in text
        assert losses(resumed.run_dir) == losses(whole.run_dir)
        for ours, theirs in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    return whole


def cut(run_dir: Path, step: int) -> None:
    """Leaves the run as one that ended after a step."""
    for folder in (run_dir / "checkpoints").iterdir():
        if folder.name.isdecimal() and int(folder.name) > step:
            folder.rename(run_dir / f"later-{folder.name}")


PACKED = DILOCO | {"compress": {"deltas": "int4"}}
PUSH_SUM = {
    "strategy": "gossip", "every": 2, "gossip": {"graph": "directed", "edges": [[0, 1], [1, 0]], "drop": 0.3},
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "sync", [DILOCO, {"strategy": "post_local", "every": 2, "bsp_steps": 2}, PACKED, PUSH_SUM], ids=str
)
def test_a_run_resumed_in_the_middle_of_a_round_is_the_same_bit_for_bit(
    tmp_path: Path, sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 3 and after 6 of 8 steps, which for diloco are both within a round; what it prints says so."""
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    whole = resumed_bitwise(tmp_path, sync)
    if sync is PACKED:
        assert np.abs(whole.state["sync"]["own"]["worker"]["a"]).max() > 0
    if sync is DILOCO:
        distances = [record["consensus_distance"] for record in records(whole.run_dir) if record["step"] in (4, 8)]
        assert len(distances) == 2
        assert min(distances) > 1e-3
        sent = {record["exchanged_bytes"] for record in records(whole.run_dir) if "exchanged_bytes" in record}
        assert sent == {64 * 4}  # of a ring of two: once the 64 parameters in float32


def test_validation_and_what_is_loaded_use_what_replicas_agree_on(tmp_path: Path) -> None:
    """In the middle of a round, where the outer parameters are those of the last exchange."""
    changes = {
        "optimizer": {"name": "adamw", "lr": 0.02},
        "log": {"tensorboard": False, "every": 3},
        "eval": {"batches": 2},
    }
    result, text = train(config(tmp_path, "run", DILOCO, **changes))
    assert "spread" in text
    logged = {record["step"]: record for record in records(result.run_dir)}
    assert "consensus_distance" not in logged[3]
    assert logged[6]["consensus_distance"] > 1e-3  # of step 4, which is not logged
    assert 4 not in logged
    own = result.state["sync"]["own"]["outer"]
    assert jaxtrain.evaluate(result.run_dir)["eval/loss"] == pytest.approx(result.metrics["eval/loss"], rel=1e-6)
    cut(result.run_dir, 6)
    trainer = jaxtrain.Trainer(result.program.config, run_dir=result.run_dir, resume=True)
    state = trainer.state
    assert np.abs(np.asarray(state["params"]["a"][0] - state["params"]["a"][1])).max() > 1e-3
    np.testing.assert_array_equal(trainer.model.a[...], state["sync"]["own"]["outer"]["a"])
    assert np.abs(np.asarray(trainer.model.a[...] - own["a"])).max() > 1e-3
    middle = trainer.evaluate()["eval/loss"]
    for overrides in ([], ["mesh.replica=1", "mesh.data=4"], ["mesh.replica=4", "mesh.data=1"]):
        assert jaxtrain.evaluate(result.run_dir, *overrides)["eval/loss"] == pytest.approx(middle, rel=1e-6)


@pytest.mark.parametrize("sync", [DILOCO, LOCAL], ids=["diloco", "local_sgd"])
@pytest.mark.parametrize("after", [{"replica": 1, "data": 4, "fsdp": 2}, {"replica": 4, "data": 1, "fsdp": 2}], ids=str)
def test_other_replicas_continue_from_what_those_before_agreed_on(
    tmp_path: Path, sync: dict[str, Any], after: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """After an early exchange, as the run had after step 6 with an exchange there."""
    sync_after = {"strategy": "bsp"} if after["replica"] == 1 and sync is LOCAL else sync
    first, _ = train(config(tmp_path, "run", sync))
    cut(first.run_dir, 6)
    reader, program = CheckpointReader(first.run_dir / "checkpoints"), first.program
    state = reader.restore(6, program.state)[0]
    agreed = jax.device_get(program.agreed(program.synchronizer.end_round(state))["params"])
    trainer = jaxtrain.Trainer(config(tmp_path, "run", sync_after, mesh=after), run_dir=first.run_dir, resume=True)
    now = jax.device_get(trainer.state["params"])
    for leaf, wanted in zip(jax.tree.leaves(now), jax.tree.leaves(agreed), strict=True):
        np.testing.assert_allclose(leaf, np.broadcast_to(wanted, leaf.shape), rtol=1e-6, atol=1e-7)
    counts = [x for x in jax.tree.leaves(trainer.state["opt_state"]) if x.dtype == jnp.int32]
    assert counts
    assert all(np.all(np.asarray(count) == 6) for count in counts)
    assert np.isfinite(trainer.fit().metrics["loss"])
    text = capsys.readouterr().out
    assert "guarantee the config asks for different steps from here on" in text
    assert f"replicas: 2 -> {after['replica']}, which start from what those before agreed on" in text


@pytest.mark.parametrize("after", [{"replica": 1, "data": 4, "fsdp": 2}, {"replica": 4, "data": 1, "fsdp": 2}], ids=str)
def test_a_round_in_few_bits_ends_in_float32_on_another_mesh(
    tmp_path: Path, after: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_mean, "SMALLEST", 1)
    sync = DILOCO | {"compress": {"deltas": "int4"}}
    first, _ = train(config(tmp_path, "run", sync))
    cut(first.run_dir, 6)
    state = jax.device_get(CheckpointReader(first.run_dir / "checkpoints").restore(6, first.program.state)[0])
    own, mean = state["sync"]["own"], jax.tree.map(lambda x: x.mean(0), state["params"])  # of equal numbers of tokens
    wanted = outer_step(first.program.config.sync.outer, {n: own[n] for n in ("outer", "velocity")}, mean)["outer"]
    trainer = jaxtrain.Trainer(config(tmp_path, "run", sync, mesh=after), run_dir=first.run_dir, resume=True)
    for name, now in jax.device_get(trainer.state["params"]).items():
        np.testing.assert_allclose(now, np.broadcast_to(wanted[name], now.shape), rtol=1e-5, atol=1e-7)
    assert np.isfinite(trainer.fit().metrics["loss"])


def test_bsp_becomes_diloco_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas start from the parameters and moments of bsp; bsp from the outer parameters and averaged moments."""
    bsp, _ = train(config(tmp_path, "run", {"strategy": "bsp"}, steps=4))
    start = jax.device_get((bsp.state["params"], bsp.state["opt_state"]))
    trainer = jaxtrain.Trainer(config(tmp_path, "run", DILOCO), run_dir=bsp.run_dir, resume=True)
    now = trainer.state["params"], trainer.state["opt_state"]
    for ours, theirs in zip(jax.tree.leaves(now), jax.tree.leaves(start), strict=True):
        np.testing.assert_array_equal(ours, np.broadcast_to(theirs, ours.shape))
    outer = jax.device_get(trainer.fit().state["sync"]["own"]["outer"])
    assert "config sync.strategy: bsp -> diloco" in capsys.readouterr().out
    trainer = jaxtrain.Trainer(config(tmp_path, "run", {"strategy": "bsp"}, steps=10), run_dir=bsp.run_dir, resume=True)
    np.testing.assert_array_equal(trainer.state["params"]["a"], outer["a"])
    assert "sync" not in trainer.state
    assert np.isfinite(trainer.fit().metrics["loss"])
    assert "config sync.strategy: diloco -> bsp" in capsys.readouterr().out


class BreakReplica(jaxtrain.Callback):
    """Makes a parameter of replica 1 NaN after step 5."""

    def replace_state(self, trainer: Any, state: Any, step: int) -> Any:
        if step != 5:
            return state
        a = state["params"]["a"]
        broken = jax.jit(lambda x: x.at[1, 0, 0].set(jnp.nan), out_shardings=a.sharding)(a)
        return {**state, "params": {**state["params"], "a": broken}}


@pytest.mark.parametrize("sync", [DILOCO, LOCAL], ids=["diloco", "local_sgd"])
def test_a_replica_that_is_not_finite_is_left_out_and_copies_the_others(tmp_path: Path, sync: dict[str, Any]) -> None:
    run = config(tmp_path, "run", sync, steps=12)
    result, text = train(run, callbacks=[BreakReplica()])
    (warning,) = [event for event in events(result.run_dir, "warning") if "left out" in event["text"]]
    assert warning["step"] == 8
    assert warning["text"].startswith("replica 1 left out of the exchange at step 8: parameters that are not finite")
    assert warning["text"] in text
    by_step = {record["step"]: record for record in records(result.run_dir)}
    assert [by_step[step]["skipped_replicas"] for step in (5, 6, 8, 9)] == [0, 1, 1, 0]
    assert by_step[8]["left_out/1"] == 1
    assert all(np.isfinite(record["loss"]) and not record["skipped"] for record in by_step.values())
    for part in ("params", "ema", "opt_state", "sync"):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(result.state[part])))
    np.testing.assert_array_equal(result.state["params"]["a"][0], result.state["params"]["a"][1])


def test_a_loop_of_ones_own_reads_what_replicas_log(tmp_path: Path) -> None:
    trainer = jaxtrain.Trainer(config(tmp_path, "run", LOCAL, steps=8))
    read = {step.number: step.metrics for step in trainer.steps()}
    assert [step for step, metrics in read.items() if "exchanged_bytes" in metrics] == [4, 8]
    assert all(np.isfinite(metrics["loss"]) for metrics in read.values())
    assert not any(name.startswith("left_out") for metrics in read.values() for name in metrics)
    metrics, gradients = trainer.gradients()
    assert np.isfinite(metrics["loss"])
    assert gradients["a"].shape[0] == 2
