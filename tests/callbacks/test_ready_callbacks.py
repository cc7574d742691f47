"""Callbacks that are ready to use: best checkpoints, histograms, learning rates, the profiler."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from regression import ROWS, Linear, Points, squares

import jaxtrain
from jaxtrain.checkpoint import CheckpointStore
from jaxtrain.cli.main import main

STEPS = 8


class Seen(jaxtrain.Tracker):
    """A tracker that keeps everything."""

    def __init__(self) -> None:
        self.records: dict[int, Mapping[str, float]] = {}
        self.shown: dict[int, Mapping] = {}

    def log(self, step, values):
        self.records[step] = dict(values)

    def histograms(self, step, values):
        self.shown[step] = values


def trainer(tmp_path: Path, *callbacks: jaxtrain.Callback, optimizer=None, **keys) -> tuple[jaxtrain.Trainer, Seen]:
    seen = Seen()
    keys = {"name": "run", "steps": STEPS, "log": {"tensorboard": False}} | keys
    made = jaxtrain.Trainer(
        {"data": {"global_batch": ROWS}}, dir=str(tmp_path), simulate=8, layout="fsdp", precision="fp32",
        model=Linear, loss=squares, data=Points(), eval_data=Points(), optimizer=optimizer or optax.sgd(0.05),
        callbacks=callbacks, trackers=[seen], **keys,
    )  # fmt: skip
    return made, seen


def test_histograms_are_those_of_numpy_and_change_nothing(tmp_path: Path):
    weights = {"weight": np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)}
    plain, _ = trainer(tmp_path, weights=weights, name="plain")
    plain.fit()
    run, seen = trainer(tmp_path, jaxtrain.Histograms(every=4, bins=5), weights=weights)
    run.fit()
    losses = [(path / "metrics.jsonl").read_text() for path in (plain.run_dir, run.run_dir)]
    assert [json.loads(line)["loss"] for line in losses[0].splitlines()] == [
        json.loads(line)["loss"] for line in losses[1].splitlines()
    ]
    assert list(seen.shown) == [4, 8]
    assert set(seen.shown[4]) == {"parameters/weight", "gradients/weight"}
    weight = weights["weight"]
    for step in range(4):  # the histogram is of the weights in front of the update of step 4
        batch = Points().batch(step)
        gradient = 2 * batch["x"].T @ (batch["x"] @ weight - batch["y"]) / (ROWS * 2)
        before, weight = weight, weight - 0.05 * gradient
    for name, values in (("parameters/weight", before), ("gradients/weight", gradient)):
        found = seen.shown[4][name]
        counts, edges = np.histogram(values, bins=5)
        np.testing.assert_array_equal(found.counts, counts)
        np.testing.assert_allclose(found.edges, edges, rtol=1e-4)
        np.testing.assert_allclose([found.sum, found.sum_squares], [values.sum(), (values**2).sum()], rtol=1e-4)
        assert found.not_finite == 0


def test_tensorboard_reads_the_histograms(tmp_path: Path):
    proto = pytest.importorskip("tensorboardX.proto.event_pb2", reason="needs tensorboardX")
    run, _ = trainer(tmp_path, jaxtrain.Histograms(every=STEPS, gradients=False), log={"tensorboard": True})
    run.fit()
    (file,) = (run.run_dir / "tensorboard").iterdir()
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        event = proto.Event.FromString(data[12 : 12 + size])
        found += [(event.step, v) for v in event.summary.value if v.HasField("histo")]
        data = data[16 + size :]
    ((step, value),) = found
    assert (step, value.tag, value.histo.num) == (STEPS, "parameters/weight", 16)
    assert sum(value.histo.bucket) == 16


@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_checkpoints_stay_also_after_a_resume(tmp_path: Path, mode: str):
    """The validation falls at every step: with `max` the first ones are the best."""
    keys = {"eval": {"every": 1, "batches": 1}, "checkpoint": {"keep": 1}}
    run, _ = trainer(tmp_path, jaxtrain.BestCheckpoints("eval/loss", keep=2, mode=mode), **keys, steps=4)
    run.fit()
    again, _ = trainer(
        tmp_path, jaxtrain.BestCheckpoints("eval/loss", keep=2, mode=mode), **keys, run_dir=run.run_dir, resume=True
    )
    again.fit()
    store = CheckpointStore(run.run_dir / "checkpoints")
    assert store.marked() == ([1, 2, STEPS] if mode == "max" else [STEPS - 1, STEPS])
    assert main(["checkpoint", "prune", str(run.run_dir), "--keep", "1"]) == 0
    assert store.marked() == ([1, 2, STEPS] if mode == "max" else [STEPS - 1, STEPS])


class LossesSeen(jaxtrain.Callback):
    """Keeps the loss that each step shows, and stops the run after one."""

    def __init__(self, last: int = STEPS):
        self.losses: dict[int, float | None] = {}
        self.last = last

    def on_step_end(self, trainer, step: int) -> None:
        self.losses[step] = trainer.latest_metrics.get("loss")
        if step == self.last:
            trainer.request_stop("seen enough")


def test_a_callback_sees_the_metrics_of_the_step_before_also_after_a_resume(tmp_path: Path):
    seen = [LossesSeen(), LossesSeen(3), LossesSeen()]
    keys = {"log": {"every": 1, "tensorboard": False}}
    trainer(tmp_path / "whole", seen[0], **keys)[0].fit()
    first, _ = trainer(tmp_path / "parts", seen[1], **keys)
    first.fit()
    trainer(tmp_path / "parts", seen[2], **keys, run_dir=first.run_dir, resume=True)[0].fit()
    assert len(seen[0].losses) == STEPS
    assert [step for step, loss in seen[0].losses.items() if loss is None] == [1]
    assert seen[0].losses == seen[1].losses | seen[2].losses


def test_a_run_that_is_set_back_goes_on_from_there(tmp_path: Path):
    keys = {"log": {"every": 1, "tensorboard": False}, "checkpoint": {"every": 2, "keep": 9}}
    run, seen = trainer(tmp_path, **keys)
    run.fit()
    assert jaxtrain.checkpoints(run.run_dir).rewind(4) == [6, STEPS]
    again, more = trainer(tmp_path, **keys, run_dir=run.run_dir, resume=True)
    again.fit()
    assert list(more.records) == [5, 6, 7, STEPS]
    assert all(more.records[step]["loss"] == seen.records[step]["loss"] for step in more.records)
    store = CheckpointStore(run.run_dir / "checkpoints")
    assert (store.marked(), store.aside()) == ([2, 4, 6, STEPS], [])


def test_learning_rates_of_an_object_and_of_groups(tmp_path: Path):
    schedule = optax.linear_schedule(0.1, 0.0, STEPS)
    adam = optax.inject_hyperparams(optax.adam)(schedule)
    run, seen = trainer(tmp_path, jaxtrain.LearningRateMonitor(), optimizer=adam)
    run.fit()
    rates = [seen.records[step]["lr/learning_rate"] for step in range(1, STEPS + 1)]
    assert rates == pytest.approx([float(schedule(step)) for step in range(STEPS)], rel=1e-5, abs=1e-8)
    groups = {"name": "sgd", "lr": 0.1, "groups": [{"match": ["weight"], "lr_factor": 0.5}]}
    run, seen = trainer(tmp_path, jaxtrain.LearningRateMonitor(), optimizer=groups)
    run.fit()
    assert all(record["lr/weight"] == pytest.approx(0.5 * record["lr"]) for record in seen.records.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: jaxtrain.BestCheckpoints(keep=0), lambda: jaxtrain.BestCheckpoints(mode="large"),
        lambda: jaxtrain.EarlyStopping(patience=0),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(make):
    with pytest.raises(jaxtrain.UserError) as error:
        make()
    assert "\n" not in str(error.value)


def test_a_metric_that_is_not_there_is_one_line(tmp_path: Path):
    run, _ = trainer(tmp_path, jaxtrain.BestCheckpoints("eval/accuracy"))
    with pytest.raises(jaxtrain.UserError, match="no metric `eval/accuracy`; the validation has eval/loss"):
        run.fit()


def test_the_profiler_and_the_plot_are_callbacks(tmp_path: Path):
    run, _ = trainer(tmp_path, jaxtrain.Profiler((3, 5)), jaxtrain.LossPlot())
    run.fit()
    assert (run.run_dir / "loss.png").is_file()
    assert list((run.run_dir / "profile").rglob("*.xplane.pb"))


def test_state_of_the_optimizer_without_a_parameter_is_listed(tmp_path: Path, capsys):
    """A user's optimizer with a history of the gradient norm, and one with statistics per row."""

    def init(params):
        return {"history": jnp.zeros(64), "rows": {name: value[:, 0] for name, value in params.items()}}

    own = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    run, _ = trainer(tmp_path, optimizer=optax.chain(own, optax.sgd(0.1)), steps=1)
    run.fit()
    assert "2 arrays of its state have no parameter's shape; listed in layout.txt" in capsys.readouterr().out
    listed = (run.run_dir / "layout.txt").read_text()
    assert "opt_state/0/history  float32[64]  sharded over fsdp" in listed
    assert "opt_state/0/rows/weight  float32[8]  sharded over fsdp" in listed
