"""Data of one process: each kind resumed at an odd step, going back, epochs, and what is wrong in one line."""

from __future__ import annotations

import io
import re
from pathlib import Path

import data_runs
import numpy as np
import pytest
from data_runs import KINDS, READ, ROWS, STEPS, STOP, batch_of, batches, interrupt, losses, trainer
from rich.console import Console

import jaxtrain
from jaxtrain.data.objects.iterator_state import decode, encode
from jaxtrain.planning.hardware.targets import parse
from jaxtrain.planning.target_config import config_for_target
from jaxtrain.trackers.console import ConsoleTracker

# By hand in NumPy; other kinds have their own order, and are compared with an uninterrupted run.
IN_ORDER = ("by step", "function", "generator", "list", "with state", "iterator with state", "torch loader")


def console() -> ConsoleTracker:
    return ConsoleTracker(1, console=Console(file=io.StringIO(), width=300))


def shown(tracker: ConsoleTracker, word: str = "data:") -> list[str]:
    return [line for line in tracker.console.file.getvalue().splitlines() if word in line]


def whole(count: int = STEPS) -> list[float]:
    return data_runs.plain_losses(list(batches(count)))


def saved(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_resumed_where_it_was(tmp_path: Path, kind: str):
    if package := data_runs.missing(kind):
        pytest.skip(f"needs {package}")
    make, _, said = KINDS[kind]
    run, again = trainer(tmp_path, "run", make()), console()
    interrupt(run)
    assert trainer(tmp_path, "x", make(), again, run_dir=run.run_dir, resume=True).fit().step == STEPS
    assert shown(again) == ([said] if said else [])
    expected = whole() if kind in IN_ORDER else losses(trainer(tmp_path, "whole", make()).fit().run_dir)
    np.testing.assert_allclose(losses(run.run_dir), expected, rtol=1e-5)


def test_the_state_is_that_of_the_batch_last_trained_on(tmp_path: Path):
    data = data_runs.Counting()
    run = trainer(tmp_path, "run", data)
    interrupt(run)
    assert data.read > STOP  # read ahead
    data = data_runs.Counting()
    trainer(tmp_path, "x", data, run_dir=run.run_dir, resume=True).fit()
    assert data.read == 1 + STEPS - STOP  # the first one again, whose shapes the program needs
    np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)


@pytest.mark.parametrize("data", [batches(), batches, data_runs.Counting()], ids=["generator", "function", "state"])
def test_a_second_fit_goes_on(tmp_path: Path, data):
    run = trainer(tmp_path, "run", data)
    interrupt(run)
    assert run.fit().step == STEPS
    np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)


def test_an_iterable_may_fill_the_same_array_again(tmp_path: Path):
    def make():
        buffer = batch_of(0)
        for step in range(20):
            for key, value in batch_of(step).items():
                buffer[key][...] = value
            yield buffer

    np.testing.assert_allclose(losses(trainer(tmp_path, "run", make).fit().run_dir), whole(), rtol=1e-5)


class GoBack(jaxtrain.Callback):
    def __init__(self) -> None:
        self.done, self.refused = False, None

    def on_step_end(self, trainer, step):
        if step == STOP and not self.done:
            self.done = True
            trainer.request_rewind(1)


@pytest.mark.parametrize("kind", ["by step", "function", "iterator with state"])
def test_going_back_reads_the_same_batches(tmp_path: Path, kind: str):
    run = trainer(tmp_path, "run", KINDS[kind][0](), console(), checkpoint={"every": 3}, callbacks=[GoBack()])
    assert run.fit().step == STEPS
    np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)


def test_a_generator_is_refused_before_anything_is_lost(tmp_path: Path):
    said = "its first batch was read already, and generator cannot be read twice; expected a function that returns it"
    with pytest.raises(jaxtrain.UserError, match=said):
        trainer(tmp_path, "guard", batches(), checkpoint={"every": 3},
                guard={"spike": {"action": "rollback"}}).fit()  # fmt: skip
    run = trainer(tmp_path, "run", batches(), checkpoint={"every": 3}, callbacks=[GoBack()])
    with pytest.raises(jaxtrain.UserError, match=said):
        run.fit()
    assert saved(run.run_dir) == [3]
    with pytest.raises(jaxtrain.UserError, match="eval_data: an iterator can be read once, and"):
        trainer(tmp_path, "eval", batches, eval_data=batches(2), eval={"every": 3}).fit()
    other = trainer(tmp_path, "once", batches, eval_data=list(batches(2)), eval={"every": 3})
    assert other.evaluate(batches(2)) == other.evaluate()


def test_looking_at_gradients_does_not_disturb_the_data(tmp_path: Path):
    for name, data in (("generator", batches()), ("function", batches)):
        run = trainer(tmp_path, name, data)
        for step in run.steps():
            if step.number == 3:
                seen = run.gradients()[0]["loss"]
        assert seen == pytest.approx(whole()[3], rel=1e-5)
        np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)


def raising(at: int, what):
    for step in range(20):
        yield batch_of(step) if step != at else what(batch_of(step))


def missing(batch):
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (missing, r"data: batch 6 cannot be read: KeyError: 'labels' \(test_data.py:\d+\)"),
        (lambda b: (b["x"], b["y"]), "data: batch 6 is tuple; expected a dict of arrays, such as {'x': ..., 'y': ...}"),
        (lambda b: b | {"y": b}, "data: batch 6: `y` is dict; expected an array"),
        (lambda b: b | {"z": ["a"] * ROWS}, "data: batch 6: `z` is text; expected numbers in arrays of one shape, or "),
        (lambda b: b | {"z": [[1], [2, 3]] * 4}, "data: batch 6: `z` cannot become an array: ValueError"),
        (lambda b: b | {"z": b["x"]}, "data: `z` of batch 6 is float32.8, 4., and it was absent before"),
        (lambda b: {"x": b["x"]}, "data: `y` of batch 6 is absent, and it was float32.8, 2. before; expected one sh"),
        (lambda b: b | {"x": b["x"][:4]}, r"data: `x` of batch 6 has the shape \(4, 4\); expected 8 rows"),
    ],
)  # fmt: skip
def test_a_bad_batch_ends_the_run_in_one_line_and_the_state_before_is_saved(tmp_path: Path, what, said):
    run = trainer(tmp_path, "run", lambda: raising(6, what))
    with pytest.raises(jaxtrain.UserError, match=said) as caught:
        run.fit()
    assert "\n" not in str(caught.value)
    assert saved(run.run_dir) == [6]
    assert trainer(tmp_path, "x", batches, run_dir=run.run_dir, resume=True).fit().step == STEPS
    np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)


class Raises(data_runs.ByStep):
    def batch(self, step, rows=None):
        return missing(None) if step == 6 else super().batch(step, rows)


def test_an_object_that_raises_ends_the_run_in_one_line_and_the_state_before_is_saved(tmp_path: Path):
    run = trainer(tmp_path, "run", Raises())
    with pytest.raises(jaxtrain.UserError, match=r"^data: batch 6 cannot be made: KeyError: 'labels' \(test_data.py:"):
        run.fit()
    assert saved(run.run_dir) == [6]


class Unsaved(data_runs.CountingIterator):
    """An iterator whose state is an object."""

    def get_state(self):
        return {"place": Path(str(self.next))}


class Refusing(data_runs.CountingIterator):
    def set_state(self, state):
        raise ValueError("another version")


def of_iterator(kind):
    return type("Data", (data_runs.Counting,), {"__iter__": lambda self: kind(self)})()


def test_a_state_that_cannot_be_saved_is_said_once_and_one_that_is_refused_in_one_line(tmp_path: Path):
    first, again = console(), console()
    run = trainer(tmp_path, "run", of_iterator(Unsaved), first, checkpoint={"every": 2})
    interrupt(run)
    assert len(shown(first, "its state holds PosixPath, so a resumed run reads over its batches")) == 1
    trainer(tmp_path, "x", of_iterator(Unsaved), again, run_dir=run.run_dir, resume=True).fit()
    assert shown(again, "data: resumed") == [READ]
    np.testing.assert_allclose(losses(run.run_dir), whole(), rtol=1e-5)
    run = trainer(tmp_path, "refused", of_iterator(Refusing))
    interrupt(run)
    with pytest.raises(jaxtrain.UserError, match="data: its saved state does not fit: ValueError: another version"):
        trainer(tmp_path, "x", of_iterator(Refusing), run_dir=run.run_dir, resume=True).fit()
    tracker = console()
    trainer(tmp_path, "x", batches, tracker, run_dir=run.run_dir, resume=True).fit()  # without a state it is read over
    assert shown(tracker, "data: resumed") == [READ]


def test_states_come_back_as_they_were():
    state = {"a": [1, 2.5, None, True], 3: (b"\x00\xff", "text"), "array": np.arange(6, dtype=np.uint8).reshape(2, 3)}
    found = decode(encode(state))
    np.testing.assert_array_equal(found.pop("array"), state.pop("array"))
    assert found == state
    with pytest.raises(TypeError, match="set"):
        encode({"a": {1, 2}})
    for bad in (
        {"kind": "pickle", "value": ""},
        {"kind": "array", "value": "", "dtype": 3, "shape": [1]},
        {"value": 1},
    ):
        with pytest.raises(ValueError, match=r"not the state of an iterator|cannot reshape"):
            decode(bad)


@pytest.mark.parametrize(
    ("data", "epochs", "steps"),
    [(data_runs.columns(4), 3, 12), (list(batches(5)), 2, 10), (lambda: list(batches(5)), 2, 10), (batches(4), 1, 0)],
    ids=["arrays", "list", "function", "generator"],
)  # fmt: skip
def test_epochs_are_steps_of_known_length(tmp_path: Path, data, epochs, steps):
    run = trainer(tmp_path, "run", data, epochs=epochs)
    if not steps:
        with pytest.raises(jaxtrain.UserError, match=r"epochs: this is data without a length .*; expected steps"):
            run.fit()
        return
    interrupt(run, 7)
    assert run.config.steps == steps
    resumed = trainer(tmp_path, "x", data, epochs=epochs, run_dir=run.run_dir, resume="auto").fit()
    assert (resumed.step, resumed.stopped_by) == (steps, None)
    assert resumed.resume_command.endswith(f"epochs={2 * epochs}")
    if not isinstance(data, dict):
        np.testing.assert_allclose(losses(run.run_dir), data_runs.plain_losses(list(batches(5)) * 2), rtol=1e-5)
    else:
        seen = [resumed.data.batch(step)["x"] for step in range(4)]
        assert len(np.unique(np.concatenate(seen), axis=0)) == 4 * ROWS


def test_epochs_and_steps_are_not_both(tmp_path: Path):
    with pytest.raises(jaxtrain.ConfigError, match="epochs: 2 epochs and 5 steps are both given; expected one of them"):
        jaxtrain.load(None, epochs=2, steps=5)
    assert jaxtrain.load(None, epochs=2).epochs == 2
    said = "schedule.decay_fraction: a decay over 0.5 of 8 steps does not fit after 6 of warm-up"
    keys = {"schedule": {"name": "wsd", "warmup_steps": 6, "decay_fraction": 0.5}, "name": "run", "dir": str(tmp_path)}
    with pytest.raises(jaxtrain.ConfigError, match=said):
        jaxtrain.Trainer({"data": {"global_batch": ROWS}}, model=data_runs.Linear, loss=data_runs.squares, epochs=2,
                         data=data_runs.columns(4), **keys).fit()  # fmt: skip


def test_epochs_of_text(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"number {i} " * 20)
    data = {"sources": [{"path": str(tmp_path / "text")}], "sequence": 32, "global_batch": 8, "workers": 1,
            "validation_fraction": 0, "cache_dir": str(tmp_path / "cache")}  # fmt: skip
    keys = {"data": data, "model": {"embed": 16, "layers": 1, "heads": 2, "mlp": 16}, "dir": str(tmp_path)}
    result = jaxtrain.Trainer(keys, epochs=1).fit()
    assert result.step == -(-result.data.tokens // 32 // 8) or result.data.epoch(result.step) == pytest.approx(
        1, abs=0.1
    )
    planned, _ = config_for_target(keys, target=parse("h100:1x1"), epochs=2)
    assert planned.steps == pytest.approx(2 * result.step, abs=1)
    mixture = keys | {"data": data | {"sources": data["sources"] * 2}}
    with pytest.raises(jaxtrain.UserError, match=r"epochs: this is a mixture of sources, .* expected steps"):
        jaxtrain.Trainer(mixture, epochs=1, name="mixture").fit()


def test_shards_are_known_where_data_is_read(tmp_path: Path):
    with pytest.raises(jaxtrain.UserError, match="data_shard: no run reads data here; expected a call within the"):
        jaxtrain.data_shard()
    assert jaxtrain.data_shard({"data": {"global_batch": ROWS}}, simulate=8, mesh={"data": 8}) == (0, 1)
    seen = []

    def make():
        seen.append(jaxtrain.data_shard())
        return batches()

    assert trainer(tmp_path, "run", make, rows="local").fit().step == STEPS
    assert seen[0] == (0, 1)
    with pytest.raises(jaxtrain.UserError, match='rows: found \'each\'; expected "global" or "local"'):
        trainer(tmp_path, "x", make, rows="each")


def test_data_sets_of_rows_with_other_than_numbers_are_refused(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [[1.0]] * 9, "text": ["a"] * 9})
    with pytest.raises(jaxtrain.UserError, match="data: rows: `text` is text; expected numbers in arrays of one shape"):
        trainer(tmp_path, "text", rows).fit()
    ragged = datasets.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]] * 8})
    with pytest.raises(jaxtrain.UserError, match="data: rows: `x` is ragged; expected numbers in arrays of one shape"):
        trainer(tmp_path, "ragged", ragged).fit()
    with pytest.raises(jaxtrain.UserError, match="data: found the splits train, test of a data set; expected one"):
        trainer(tmp_path, "splits", datasets.DatasetDict(train=rows, test=rows)).fit()


def test_integers_of_64_bits_are_trained_on(tmp_path: Path):
    rows = {"x": np.arange(64, dtype=np.int64).reshape(16, 4) % 3, "y": np.ones((16, 2))}
    result = trainer(tmp_path, "run", rows, steps=2).fit()
    assert re.match(r"\d", str(losses(result.run_dir)[1]))
