"""Names that an installed package adds to the config; users' own callbacks, trackers and metrics by their class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

import jaxtrain
from jaxtrain.cli.main import main

PACKAGE = Path(__file__).parent / "sample_package"
PARTS = "jaxtrain_sample.parts"
CONFIG = {
    "simulate": 8, "steps": 9, "precision": "fp32", "layout": "fsdp", "model": {"type": "regression"},
    "data": {"type": "points", "global_batch": 16}, "schedule": {"name": "constant"},
    "optimizer": {"name": "signs", "lr": 0.01, "grad_clip_norm": None, "options": {"scale": 2.0}},
    "eval": {"batches": 2, "metrics": {"error": f"{PARTS}:largest_error", "near": f"{PARTS}:share_below_one"}},
    "log": {"tensorboard": False, "trackers": ["loss_file"]},
    "callbacks": [{"type": "stop_at", "options": {"step": 6}}],
}  # fmt: skip


@pytest.fixture(autouse=True)
def _package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the package and its metadata on the path, as an installation does."""
    monkeypatch.syspath_prepend(str(PACKAGE))


def config(tmp_path: Path, **changes) -> dict:
    return CONFIG | {"dir": str(tmp_path)} | changes


def test_a_config_names_what_the_package_adds(tmp_path: Path):
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, name="command")))
    assert main(["train", str(file)]) == 75  # stopped, saved
    run = jaxtrain.train(config(tmp_path, name="python"))
    assert run.step == 6
    assert run.stopped_by == "far enough"
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("command", "python")]
    assert losses[0] == losses[1]
    assert list(losses[0]) == [str(step) for step in range(1, 7)]
    assert jaxtrain.evaluate(run.run_dir).keys() >= {"eval/loss", "eval/error", "eval/near"}


def test_metrics_are_means_over_the_rows(tmp_path: Path):
    """Against NumPy, with microbatches; the same on another layout."""
    trainer = jaxtrain.Trainer(config(tmp_path, step={"microbatches": 2}, callbacks=[]))
    trainer.fit()
    scores = trainer.evaluate()
    from jaxtrain_sample.parts import Points

    linear, errors = trainer.model.linear, []
    for step in range(2):
        batch = Points("validation", 0, 16).batch(step)
        errors.append(np.abs(batch["x"] @ np.asarray(linear.kernel[...]) + np.asarray(linear.bias[...]) - batch["y"]))
    assert scores["eval/error"] == pytest.approx(np.mean(errors), rel=1e-5)
    assert scores["eval/near"] == pytest.approx(np.mean(np.array(errors) < 1), rel=1e-5)
    other = jaxtrain.evaluate(trainer.run_dir, "layout=ddp")
    assert other["eval/error"] == pytest.approx(scores["eval/error"], rel=1e-5)


def test_objects_do_the_same(tmp_path: Path):
    from jaxtrain_sample.parts import LossFile, StopAt, largest_error

    keys = config(tmp_path, callbacks=[], log={"tensorboard": False}, eval={"batches": 2})
    file = LossFile(tmp_path, "mine.json")
    trainer = jaxtrain.Trainer(keys, callbacks=[StopAt(4)], trackers=[file], metrics={"error": largest_error})
    assert trainer.fit().step == 4
    assert len(json.loads((tmp_path / "mine.json").read_text())) == 4
    assert "eval/error" in trainer.evaluate()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": {"type": "regresion"}}, "packages add regression (did you mean `regression`?)"),
        ({"optimizer": {"name": "sign"}}, "did you mean `signs`"),
        ({"callbacks": ["stop"]}, 'callbacks.0.type: expected a class as `package.module:Class`; found "stop"'),
        ({"callbacks": ["stop_at"]}, "callbacks.0.options: stop_at fails: TypeError"),
        ({"callbacks": [f"{PARTS}:largest_error"]}, "largest_error fails"),
        ({"callbacks": [f"{PARTS}:Nothing"]}, "has no `Nothing`"),
        ({"callbacks": ["jaxtrain:Config"]}, "expected a subclass of jaxtrain.Callback"),
        ({"log": {"trackers": [{"type": "loss_file", "options": {"no": 1}}]}}, "log.trackers.0.options: loss_file"),
        ({"eval": {"metrics": {"x": "accuracy"}}}, "eval.metrics.x: expected a function as `package.module:function`"),
        ({"data": {"type": "point"}}, "did you mean `points`"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, change: dict, said: str):
    with pytest.raises(jaxtrain.UserError) as error:
        jaxtrain.train(config(tmp_path, **change))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_metric_that_is_no_number_is_one_line(tmp_path: Path):
    trainer = jaxtrain.Trainer(config(tmp_path, callbacks=[]), metrics={"bad": lambda model, batch: batch["x"]})
    with pytest.raises(jaxtrain.UserError, match=r"eval\.metrics\.bad: expected a scalar or \(sum, weight\)"):
        trainer.fit()


def test_a_tracker_that_raises_is_dropped(tmp_path: Path):
    class Broken(jaxtrain.Tracker):
        def log(self, step, values):
            raise OSError("no network")

    result = jaxtrain.train(config(tmp_path), trackers=[Broken()])
    assert result.step == 6
