"""Faults happen once, where they are asked for; without any nothing is touched."""

from __future__ import annotations

import os
import threading
import time

import jax
import numpy as np
import pytest
import tiny
from faults import debug, fault

from jaxtrain.callbacks import fault_injection
from jaxtrain.checkpoint import CheckpointStore, orbax
from jaxtrain.config.schema import Config, FaultConfig


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it."""


def kill() -> None:
    raise Killed


def configured(*texts):
    return tuple(FaultConfig(**fault(text)) for text in texts)


def injection(faults, run_dir):
    callback = fault_injection.FaultInjection()
    callback.program_config(Config(debug={"faults": faults}), run_dir)
    return callback


def test_names():
    names = [
        fault_injection.describe(one) for one in configured("kill@12", "kill@save:8/3", "corrupt@8", "full_disk@8")
    ]
    assert names == ["kill@step:12/0", "kill@save:8/3", "corrupt@committed:8/0", "full_disk@save:8/0"]


def test_each_is_remembered_before_it_happens_and_happens_as_often_as_it_is_listed(tmp_path):
    kill_, nan = configured("kill@3", "nan@5")
    faults = (kill_, nan, kill_)
    assert fault_injection.remaining_faults(faults, tmp_path) == faults
    fault_injection.record_fault(tmp_path, "kill@step:3/0")
    assert fault_injection.remaining_faults(faults, tmp_path) == (nan, kill_)
    with open(tmp_path / fault_injection.FILE, "a") as file:
        file.write('{"fault": "nan@')  # cut by a kill: it did not happen
    assert fault_injection.remaining_faults(faults, tmp_path) == (nan, kill_)
    hooks = injection((kill_,), tmp_path / "new")
    (tmp_path / "new").mkdir()
    hooks.trigger("step", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fault_injection.ENDS, "kill", kill)
        with pytest.raises(Killed):
            hooks.replace_state(None, {}, 3)
        hooks.replace_state(None, {}, 3)


@pytest.mark.parametrize("text", ["kill@5", "kill@eval:6", "kill@logged:8", "kill@data:7"])
def test_a_run_dies_there_once_and_goes_on_as_if_it_had_not(tmp_path, monkeypatch, text):
    monkeypatch.setitem(fault_injection.ENDS, "kill", kill)
    whole = tiny.train(tiny.config(tmp_path, name="whole", eval={"every": 6, "batches": 1}))
    config = tiny.config(tmp_path, eval={"every": 6, "batches": 1}, debug=debug(text))
    with pytest.raises(Killed):
        tiny.train(config)
    step = int(text.rpartition(":")[2].rpartition("@")[2])
    assert max(tiny.losses(config.run_dir)) in range(step - 3, step + 1)
    assert step not in tiny.saved(config.run_dir)
    assert fault_injection.past_faults(config.run_dir) == [fault_injection.describe(one) for one in configured(text)]
    assert tiny.train(config, resume=True).step == 12
    assert tiny.losses(config.run_dir) == tiny.losses(whole.run_dir)


def test_nan_gradients_come_once(tmp_path):
    config = tiny.config(tmp_path, steps=6, debug=debug("nan@3", "nan@5"))
    result = tiny.train(config)
    assert [record["step"] for record in tiny.records(result.run_dir) if record["skipped"]] == [3, 5]
    assert np.isfinite(result.metrics["loss"])
    assert fault_injection.past_faults(result.run_dir) == ["nan@step:3/0", "nan@step:5/0"]
    assert fault_injection.remaining_faults(config.debug.faults, result.run_dir) == ()


def test_a_full_disk_costs_a_save_and_a_slow_one_time(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_injection, "SLOW", 0.3)
    config = tiny.config(tmp_path, checkpoint={"every": 4, "keep": 10}, debug=debug("full_disk@4", "slow_disk@8"))
    result = tiny.train(config)
    said = [event["text"] for event in tiny.events(result.run_dir, "warning")]
    assert any("the disk is full" in text for text in said)
    seconds = {event["step"]: event["seconds"] for event in tiny.events(result.run_dir, "save")}
    assert seconds[8] > 0.3
    assert result.step == tiny.saved(result.run_dir)[-1] == 12


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    whole = tiny.train(tiny.config(tmp_path, name="whole"))
    config = tiny.config(tmp_path, debug=debug("corrupt@8"))
    tiny.train(config.model_copy(update={"steps": 8}))
    assert "has another checksum" in CheckpointStore(config.run_dir / "checkpoints").problem(8)
    tiny.train(config, resume=True)
    assert (config.run_dir / "checkpoints" / "bad-8").is_dir()
    assert tiny.losses(config.run_dir) == tiny.losses(whole.run_dir)


def test_what_writes_checkpoints_is_wrapped_only_meanwhile_and_only_where_asked(tmp_path):
    real = orbax.write, orbax.start, os.replace
    hooks = injection((), tmp_path)
    hooks.on_train_begin(None, 0)
    assert (orbax.write, orbax.start, os.replace) == real
    assert hooks.wrap_fetch(test_names) is test_names
    hooks = injection(configured("kill@save:3"), tmp_path)
    hooks.on_train_begin(None, 0)
    assert orbax.write is not real[0]
    hooks.close(None)
    assert (orbax.write, orbax.start, os.replace) == real
    injection(configured("kill@save:3/1"), tmp_path).on_train_begin(None, 0)  # another process's
    assert orbax.write is real[0]
    assert not (tmp_path / fault_injection.FILE).exists()


def test_a_flip_where_nothing_is_replicated_is_refused():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("fsdp",)), jax.sharding.PartitionSpec("fsdp"))
    with pytest.raises(
        ValueError, match="no parameter has replicas here; expected a layout with replicas, such as ddp"
    ):
        fault_injection.flip_bit({"w": jax.device_put(np.zeros(8), sharding)}, 3)


def test_the_end_of_a_save_waits_for_the_files(tmp_path):
    """A kill amid a save comes after the first file is there."""
    begun, seen = time.monotonic(), []
    folder = tmp_path / "8.orbax-checkpoint-tmp"

    def later():
        time.sleep(0.1)
        folder.mkdir()
        (folder / "data").write_text("x")

    threading.Thread(target=later).start()
    fault_injection._when_begun(tmp_path / "8", lambda: seen.append(time.monotonic() - begun))
    assert 0.1 < seen[0] < fault_injection.SLOW / 2
