"""Runs with bad steps: they go on, go back, or end in one line; resumed, they see the batches that they would have."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from faults import debug, override

from jaxtrain.callbacks import fault_injection
from jaxtrain.config import Config
from jaxtrain.config.schema import GuardConfig
from jaxtrain.data.skipped_batches import batch_index, merge_ranges
from jaxtrain.errors import DivergedError


def test_a_bad_batch_is_left_out_counted_and_logged(tmp_path):
    config = tiny.config(tmp_path, data={"options": {"broken": [5]}})
    result = tiny.train(config)
    assert result.step == 12
    values = tiny.records(result.run_dir)
    assert [record["step"] for record in values if record["skipped"]] == [6]
    assert values[5]["loss"] == "nan"
    (event,) = tiny.events(result.run_dir, "skipped")
    assert (event["step"], event["loss"]) == (6, "nan")
    assert np.isfinite(values[-1]["loss"])
    assert tiny.saved(result.run_dir) == [4, 8, 12]


@pytest.mark.parametrize("log", [1, 7])
def test_steps_that_stay_bad_end_the_run_and_are_not_saved(tmp_path, log):
    broken = list(range(6, 100))
    config = tiny.config(tmp_path, steps=60, data={"options": {"broken": broken}}, log={"every": log})
    text = (
        r"20 steps in a row made no update; loss nan, gradient norm nan at step 26; checkpoint 4 is the last good one"
    )
    with pytest.raises(DivergedError, match=text):
        tiny.train(config)
    assert tiny.saved(config.run_dir) == [4]
    assert [event["step"] for event in tiny.events(config.run_dir, "skipped")] == list(range(7, 27))
    assert tiny.events(config.run_dir, "stop")[-1]["reason"].startswith("DivergedError: 20 steps")


def test_a_short_run_of_bad_steps_alone_is_no_success(tmp_path):
    config = tiny.config(tmp_path, steps=3, data={"options": {"broken": [0, 1, 2]}})
    with pytest.raises(DivergedError, match=r"3 steps in a row .* no checkpoint was written"):
        tiny.train(config)


def test_the_batch_of_a_step_passes_over_ranges():
    skips = merge_ranges([[3, 5]], (9, 10), (5, 6))
    assert skips == ((3, 6), (9, 10))
    assert [batch_index(step, skips) for step in range(8)] == [0, 1, 2, 6, 7, 8, 10, 11]
    assert merge_ranges(skips, (0, 20)) == ((0, 20),)
    assert merge_ranges([], (4, 4)) == ()
    rng = np.random.default_rng(0)
    for _ in range(50):
        ranges = [tuple(sorted(rng.integers(0, 60, 2))) for _ in range(4)]
        left = [i for i in range(200) if not any(a <= i < b for a, b in ranges)]
        assert [batch_index(step, merge_ranges(ranges)) for step in range(100)] == left[:100]


def rollback(threshold, steps, batches):
    spike = {"action": "rollback", "threshold": threshold, "rollback_steps": steps, "skip_batches": batches}
    return {"spike": spike}


SPIKE = {"steps": 40, "guard": rollback(20.0, 4, 6), "data": {"options": {"spikes": [25]}}}
WANTED = [*range(22), *range(28, 46)]  # batches 22 to 27, three to either side of the spike, are passed over


def seen() -> list[int]:
    found, tiny.SEEN[:] = list(tiny.SEEN), []
    return found


def trained_on(run_dir, total: int = 40) -> list[float]:
    """Losses in order: what a run trained on in the end."""
    values = tiny.losses(run_dir)
    assert list(values) == list(range(1, total + 1))
    return list(values.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[float]:
    """Losses of a run that never sees the spike, because it is not in its data."""
    path = tmp_path_factory.mktemp("undisturbed")
    config = tiny.config(path, **SPIKE, name="whole")
    seen()
    result = tiny.train(config)
    (back,) = tiny.events(result.run_dir, "rollback")
    assert (back["step"], back["spike"]) == (20, 26)
    assert seen()[-20:] == WANTED[-20:]
    assert tiny.events(result.run_dir, "spike")[0]["spike"] > 20
    assert all(path.name.isdecimal() for path in (result.run_dir / "checkpoints").glob("[!.]*"))  # nor is old-24 left
    return trained_on(result.run_dir)


def test_a_rollback_gives_the_run_without_those_batches(tmp_path, undisturbed):
    """The reference knows nothing of spikes: its data has no such batches."""

    class Without(tiny.Rows):
        def batch(self, step, rows=None):
            return super().batch(WANTED[step], rows)

    tiny.Without = Without
    config = tiny.config(tmp_path, steps=40, data={"type": "tiny:Without"})
    assert trained_on(tiny.train(config).run_dir) == undisturbed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stops", [(14, 17), (20, 23), (24, 25), (28, 33)])
def test_resumed_twice_around_the_rollback_it_is_the_same_run(tmp_path, undisturbed, stops):
    """Before the spike, at the checkpoint that is gone back to, amid the batches passed over, and after."""
    config = tiny.config(tmp_path, **SPIKE, checkpoint={"every": 4, "keep": 10})
    for index, stop in enumerate((*stops, 40)):
        part = config.model_copy(update={"steps": stop})
        tiny.train(part, resume=index > 0)
    values = tiny.losses(config.run_dir)
    assert list(values.values()) == undisturbed


def test_killed_after_the_rollback_it_finds_the_spike_again(tmp_path, undisturbed, monkeypatch):
    """No checkpoint yet tells of the batches that are passed over."""

    class Killed(BaseException):
        pass

    def kill():
        if tiny.events(config.run_dir, "rollback"):
            raise Killed

    monkeypatch.setitem(fault_injection.ENDS, "kill", kill)
    config = tiny.config(tmp_path, **SPIKE, debug=debug("kill@22", "kill@22"))  # the first of them does nothing
    with pytest.raises(Killed):
        tiny.train(config)
    assert len(tiny.events(config.run_dir, "rollback")) == 1
    tiny.train(config, resume=True)
    assert len(tiny.events(config.run_dir, "rollback")) == 2
    assert trained_on(config.run_dir) == undisturbed


def test_a_spike_that_comes_back_for_ever_ends_the_run(tmp_path):
    config = tiny.config(
        tmp_path, steps=60, guard=rollback(20.0, 40, 2), data={"options": {"spikes": list(range(25, 60))}}
    )
    with pytest.raises(
        DivergedError, match=r"spikes again at step 2\d, after 3 rollbacks to checkpoint 4; that is the last"
    ):
        tiny.train(config)


def test_a_guard_can_be_taken_up_and_laid_down_on_resume(tmp_path):
    config = tiny.config(tmp_path, steps=6)
    tiny.train(config)
    more = config.model_copy(update={"steps": 8, "guard": GuardConfig(spike={"action": "skip", "threshold": 6.0})})
    assert "spikes" in tiny.train(more, resume=True).state
    again = config.model_copy(update={"steps": 10})
    assert "spikes" not in tiny.train(again, resume=True).state
    assert list(tiny.losses(config.run_dir)) == list(range(1, 11))


@pytest.mark.parametrize(
    ("key", "text", "said"),
    [
        ("guard.spike.action", "skp", "did you mean `skip`?"), ("guard.spike.action", "true", "none, skip or"),
        ("guard.spike.threshold", "0.5", "expected at least 1"),
        ("guard.spike.skip_batches", "0", "expected at least 1"),
        ("guard.spike.action", "rollback", "expected checkpoint.every to be set"),
        ("guard.replica_check_every", "0", "expected at least 1"),
        ("debug.faults.0.kind", "kil", "did you mean `kill`?"), ("debug.faults.0.at", "sav", "did you mean `save`?"),
        ("debug.faults.0.step", "0", "expected at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_one_line(key, text, said):
    from jaxtrain.config import ConfigError
    from jaxtrain.core.resolve import resolve

    base = {"debug": {"faults": [{"kind": "kill"}]}}
    with pytest.raises(ConfigError) as error:
        resolve(None, f"{key}={text}", base=base, paths=False)
    (line,) = str(error.value).splitlines()
    assert f"{key}: " in line
    assert said in line


def test_a_fault_happens_at_the_moments_of_its_kind():
    from jaxtrain.config import ConfigError
    from jaxtrain.core.resolve import resolve

    with pytest.raises(ConfigError, match=r"debug.faults.0.at: nan cannot happen at save; expected step"):
        resolve(None, override("nan@save:3"), paths=False)
    assert Config().guard.spike.action == "none"
    assert Config().debug.faults == ()
