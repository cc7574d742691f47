"""Validation in a loop of one's own, `trainer.steps()`, against the run's own validation."""

from __future__ import annotations

import json
import time

import jax.numpy as jnp
import optax
import pytest
from test_trainer import ROWS, STEPS, Linear, batches

import jaxtrain
from jaxtrain.reports.tables import own_curves


def squares(model, batch):
    error = model(batch["x"]) - batch["y"]
    count = jnp.float32(error.size)
    return {"squares": (jnp.square(error).sum(), count)}, {"distance": (jnp.abs(error).sum(), count)}


class Heard(jaxtrain.Callback):
    """Records validations and checkpoints, and asks for something after a validation."""

    def __init__(self, ask=lambda trainer, step: None):
        self.evaluated, self.saved, self.ask = [], [], ask

    def on_evaluate(self, trainer, step, scores):
        self.evaluated.append((step, scores["eval/loss"]))
        self.ask(trainer, step)

    def on_save(self, trainer, step):
        self.saved.append(step)


def make(tmp_path, name="own", **more):
    keys = {"steps": STEPS, "precision": "fp32", "log": {"tensorboard": False, "every": 4}, "optimizer": optax.sgd(0.1)}
    keys |= {"model": Linear, "loss": squares, "data": batches, "eval_data": list(batches(2))}
    return jaxtrain.Trainer({"data": {"global_batch": ROWS}}, dir=str(tmp_path), name=name, **keys | more)


def validations(trainer) -> list[tuple[int, float]]:
    lines = map(json.loads, (trainer.run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["eval/loss"]) for line in lines if "eval/loss" in line]


def test_a_validation_of_the_caller_is_recorded_as_one_of_the_run(tmp_path):
    heard, own_heard = Heard(), Heard()
    whole = make(tmp_path, "whole", eval={"every": 2}, callbacks=[heard])
    whole.fit()
    trainer = make(tmp_path, callbacks=[own_heard])
    found = [(step.number, trainer.evaluate()["eval/loss"]) for step in trainer.steps() if step.number in (2, 4)]
    assert [step for step, _ in validations(whole)] == [2, 4, 6]
    assert validations(trainer) == validations(whole)
    assert validations(trainer)[:2] == found
    assert own_heard.evaluated == heard.evaluated
    report, whole_report = jaxtrain.report(trainer.run_dir), jaxtrain.report(whole.run_dir)
    assert report.scores() == whole_report.scores()
    assert report.series("loss") == whole_report.series("loss")  # the step is logged with its validation


@pytest.mark.parametrize("data", [None, list(batches(1))], ids=["own", "other"])
def test_its_time_is_that_of_validation(tmp_path, monkeypatch, data):
    import jaxtrain.api.trainer as api
    import jaxtrain.trainer.training_run as parts

    real = api.validate

    def slow(*args):
        time.sleep(0.5)
        return real(*args)

    for module in (api, parts):
        monkeypatch.setattr(module, "validate", slow)
    trainer = make(tmp_path, steps=4)
    for step in trainer.steps():
        if step.number < 4:
            trainer.evaluate(data)
    seconds = jaxtrain.report(trainer.run_dir).seconds
    assert seconds["eval"] >= 4 * 0.5  # with the last one, which is the run's own
    assert seconds["compute"] < 1  # it had 3 * 0.5 of them
    assert [step for step, _ in validations(trainer)] == ([1, 2, 3, 4] if data is None else [4])


def test_a_step_that_is_logged_already_gets_a_line_of_its_scores(tmp_path):
    trainer = make(tmp_path, checkpoint={"every": 2})
    for step in trainer.steps():
        if step.number == 2:
            trainer.evaluate()
        if step.number == 3:
            score = trainer.evaluate()["eval/loss"]
            break  # leaving the loop logs and saves
    assert [step for step, _ in validations(trainer)] == [2, 3]
    assert validations(trainer)[-1][1] == score
    lines = list(map(json.loads, (trainer.run_dir / "metrics.jsonl").read_text().splitlines()))
    assert [(line["step"], "loss" in line) for line in lines] == [(2, True), (2, False), (3, True)]


def test_a_last_line_of_scores_alone_hides_no_curve(tmp_path):
    trainer = make(tmp_path)
    for _ in trainer.steps():
        if trainer.step == STEPS:
            trainer.evaluate()
    assert own_curves(jaxtrain.report(trainer.run_dir)) == ["distance"]


def test_what_callbacks_ask_for_is_done_at_that_step(tmp_path):
    def ask(trainer, step):
        if step == 2:
            trainer.request_save()
        if step == 4:
            trainer.request_stop("enough")

    heard = Heard(ask)
    trainer = make(tmp_path, callbacks=[heard])
    numbers = []
    for step in trainer.steps():
        numbers.append(step.number)
        trainer.evaluate()
    assert numbers == [1, 2, 3, 4]
    assert heard.saved == [2, 4]
    assert jaxtrain.report(trainer.run_dir).state == "stopped: enough"


def test_outside_of_a_loop_nothing_is_recorded(tmp_path):
    heard = Heard()
    trainer = make(tmp_path, callbacks=[heard])
    before = trainer.evaluate()
    trainer.fit()
    files = [(trainer.run_dir / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")]
    assert trainer.evaluate()["eval/loss"] < before["eval/loss"]
    assert [(trainer.run_dir / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl")] == files
    assert [step for step, _ in heard.evaluated] == [STEPS]
