"""`jaxtrain.Trainer` against the command, YAML and a loop of one's own; nothing private is used."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

import jaxtrain
from jaxtrain.checkpoint import read_manifest
from jaxtrain.cli.main import main

ROWS, STEPS = 8, 6


class Linear(nnx.Module):
    """A user's module; its loss is a function."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (4, 2)))

    def __call__(self, x):
        return x @ self.weight


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batches(count: int = 100):
    rng = np.random.default_rng(0)
    target = np.arange(8, dtype=np.float32).reshape(4, 2)
    for _ in range(count):
        x = rng.standard_normal((ROWS, 4)).astype(np.float32)
        yield {"x": x, "y": x @ target}


def options(tmp_path, **more):
    return {
        "name": "own", "dir": str(tmp_path), "steps": STEPS, "precision": "fp32", "schedule": {"name": "constant"},
        "log": {"tensorboard": False},
    } | more  # fmt: skip


def own(tmp_path, data=batches, **more):
    """A trainer of Python objects."""
    keys = options(tmp_path, steps=more.pop("steps", STEPS), name=more.pop("name", "own"))
    del keys["schedule"]
    objects = {"model": Linear, "loss": squares, "data": data, "optimizer": optax.sgd(0.1)} | more
    return jaxtrain.Trainer({"data": {"global_batch": ROWS}}, **keys, **objects)


def losses(run_dir) -> list[float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records]


def plain_losses(weight, steps=STEPS) -> list[float]:
    """The same run in NumPy."""
    found = []
    for _, batch in zip(range(steps), batches()):
        error = batch["x"] @ weight - batch["y"]
        found.append(float(np.square(error).mean()))
        weight = weight - 0.1 * 2 * batch["x"].T @ error / error.size
    return found


def test_a_run_of_python_objects_is_that_of_numpy(tmp_path):
    start = np.ones((4, 2), np.float32)
    result = own(tmp_path, weights={"weight": start}).fit()
    np.testing.assert_allclose(losses(result.run_dir), plain_losses(start), rtol=1e-5)
    assert (result.step, result.stopped_by) == (STEPS, None)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sections of a small run of text."""
    folder = tmp_path_factory.mktemp("text")
    cache = tmp_path_factory.mktemp("cache")
    for i in range(20):
        (folder / f"{i}.txt").write_text(f"number {i} " * 40)
    return {
        "model": {"embed": 16, "layers": 2, "heads": 2, "mlp": 32}, "optimizer": {"lr": 1e-2},
        "data": {"sources": [{"path": str(folder)}], "sequence": 32, "global_batch": 8, "validation_fraction": 0.2,
                 "cache_dir": str(cache), "workers": 1},
    }  # fmt: skip


def test_yaml_trainer_steps_and_the_command_give_the_same_losses(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(options(tmp_path, name="command") | text))
    assert main(["train", str(file)]) == 0
    want = losses(tmp_path / "command")
    assert losses(jaxtrain.train(file, name="train").run_dir) == want
    assert losses(jaxtrain.Trainer(file, "name=fit").fit().run_dir) == want
    assert losses(jaxtrain.Trainer(options(tmp_path, name="dict"), **text).fit().run_dir) == want
    assert losses(jaxtrain.Trainer(jaxtrain.load(file, name="config")).fit().run_dir) == want
    trainer = jaxtrain.Trainer(file, name="steps")
    read = [(step.number, step.metrics["loss"]) for step in trainer.steps()]
    assert [loss for _, loss in read] == want
    assert [number for number, _ in read] == list(range(1, STEPS + 1))


def test_a_second_fit_continues_and_leaving_a_loop_saves(tmp_path):
    start = np.ones((4, 2), np.float32)
    trainer = own(tmp_path, weights={"weight": start})
    for step in trainer.steps():
        if step.number == 2:
            break
    assert trainer.step == 2
    assert jaxtrain.resume(trainer.run_dir, model=Linear, loss=squares, data=batches, optimizer=optax.sgd(0.1),
                           weights=None).step == STEPS  # fmt: skip
    np.testing.assert_allclose(losses(trainer.run_dir), plain_losses(start), rtol=1e-5)
    trainer = own(tmp_path, name="again", weights={"weight": start})
    trainer.predict(np.ones((ROWS, 4), np.float32))  # opens it
    for step in trainer.steps():
        with pytest.raises(jaxtrain.UserError, match="the trainer is in a loop of `steps` already"):
            next(trainer.steps())
        trainer.save()
        if step.number == 2:
            break
    assert trainer.fit().step == STEPS
    assert trainer.fit().step == STEPS
    np.testing.assert_allclose(losses(trainer.run_dir), plain_losses(start), rtol=1e-5)


def test_model_predict_evaluate_and_gradients_are_those_of_the_state(tmp_path):
    held_out = list(batches(3))
    trainer = own(tmp_path, eval_data=held_out)
    before = trainer.model
    assert isinstance(before, Linear)
    x = held_out[0]["x"]
    np.testing.assert_allclose(trainer.predict(x), x @ np.asarray(before.weight), rtol=1e-5)
    weight = np.asarray(before.weight)
    error = x @ weight - held_out[0]["y"]
    metrics, gradients = trainer.gradients(held_out[0])
    np.testing.assert_allclose(gradients["weight"], 2 * x.T @ error / error.size, rtol=1e-4)
    assert metrics["loss"] == pytest.approx(np.square(error).mean(), rel=1e-5)
    result = trainer.fit()
    after = np.asarray(trainer.model.weight)
    assert not np.array_equal(weight, after)
    want = np.mean([np.square(b["x"] @ after - b["y"]).mean() for b in held_out])
    assert trainer.evaluate()["eval/loss"] == pytest.approx(want, rel=1e-5)
    assert result.metrics["eval/loss"] == pytest.approx(want, rel=1e-5)
    assert trainer.evaluate(held_out[:1])["eval/loss"] == pytest.approx(
        np.square(held_out[0]["x"] @ after - held_out[0]["y"]).mean(), rel=1e-5
    )
    with pytest.raises(jaxtrain.UserError, match="its last state is saved already"):
        trainer.save()


class Recorder(jaxtrain.Callback):
    """Records what it is told, and asks for things."""

    def __init__(self, ask=None):
        self.seen, self.ask = [], ask

    def on_train_begin(self, trainer, step):
        self.seen.append(("begin", step))

    def on_step_end(self, trainer, step):
        self.seen.append(("step", step))
        if self.ask:
            self.ask(trainer, step)

    def on_evaluate(self, trainer, step, scores):
        self.seen.append(("evaluate", step, sorted(scores)))

    def on_save(self, trainer, step):
        self.seen.append(("save", step))

    def on_exception(self, trainer, error):
        self.seen.append(("exception", str(error)))

    def on_train_end(self, trainer):
        self.seen.append(("end",))


def test_callbacks_hear_and_ask(tmp_path):
    def ask(trainer, step):
        if step == 2:
            trainer.request_evaluate()
            trainer.request_save()
        if step == 4:
            assert trainer.current_metrics()["loss"] > 0
            trainer.request_stop("enough")

    recorder = Recorder(ask)
    result = own(tmp_path, eval_data=list(batches(2)), callbacks=[recorder]).fit()
    assert (result.step, result.stopped_by) == (4, "enough")
    kinds = [entry for entry in recorder.seen if entry[0] != "step"]
    assert [entry for entry in recorder.seen if entry[0] == "step"] == [("step", n) for n in range(1, 5)]
    assert kinds[0] == ("begin", 0)
    assert ("evaluate", 2, ["eval/loss"]) in kinds
    assert [entry for entry in kinds if entry[0] == "save"] == [("save", 2), ("save", 4)]
    assert kinds[-1] == ("save", 4)
    assert ("end",) in kinds


def test_a_callback_goes_back_and_skips_batches(tmp_path):
    done = []

    def ask(trainer, step):
        if step == 2:
            trainer.request_save()
        if step == 4 and not done:
            done.append(step)
            trainer.request_rewind(1, skip_batches=3, reason="try")

    result = own(tmp_path, callbacks=[Recorder(ask)], weights={"weight": np.ones((4, 2), np.float32)}).fit()
    assert result.step == STEPS
    weight, found, data = np.ones((4, 2), np.float32), [], list(batches())
    for batch in [*data[:2], *data[5:]][:STEPS]:
        error = batch["x"] @ weight - batch["y"]
        found.append(float(np.square(error).mean()))
        weight = weight - 0.1 * 2 * batch["x"].T @ error / error.size
    np.testing.assert_allclose(losses(result.run_dir), found, rtol=1e-5)


def test_a_callback_that_raises_ends_the_run_in_its_own_words(tmp_path):
    recorder = Recorder(lambda trainer, step: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        own(tmp_path, callbacks=[recorder]).fit()
    assert recorder.seen[-1] == ("exception", "'missing'")


def rising(steps_down: int):
    """An optimizer that learns for some steps, then does the opposite."""
    return optax.sgd(lambda step: jnp.where(step < steps_down, 0.1, -0.05))


def test_early_stopping_stops_where_an_uninterrupted_run_does(tmp_path):
    def make(name, **more):
        stop = jaxtrain.EarlyStopping("eval/loss", patience=3)
        return own(tmp_path, steps=40, name=name, eval_data=list(batches(2)), eval={"every": 1}, callbacks=[stop],
                   optimizer=rising(10), **more)  # fmt: skip

    whole = make("whole").fit()
    assert whole.stopped_by == "eval/loss is no better after 3 validations"
    assert whole.step == 13
    trainer = make("parts")
    for step in trainer.steps():
        if step.number == 12:
            break
    assert make("parts", run_dir=trainer.run_dir, resume=True).fit().step == 13


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (lambda: iter([1]), "data: batch 0 is int; expected a dict of arrays, such as"),
        (lambda: [{"x": np.zeros((3, 4))}], r"data: `x` of batch 0 has the shape \(3, 4\); expected 8 rows"),
        (lambda: [], "data: it ends after 0 batches"),
        (3, "data: int is no data; expected an object with `batch"),
        ({"x": np.zeros((9, 4)), "y": np.zeros((8, 2))}, r"data: arrays of .* rows; expected the same number in each"),
        ({"x": np.zeros((4, 4)), "y": np.zeros((4, 2))}, "data: 4 rows are fewer than data.global_batch 8"),
    ],
)
def test_bad_data_is_refused_in_one_line(tmp_path, data, said):
    with pytest.raises(jaxtrain.UserError, match=said) as caught:
        own(tmp_path, data=data).fit()
    assert "\n" not in str(caught.value)


def test_a_batch_of_another_shape_is_named(tmp_path):
    def changing():
        for index, batch in enumerate(batches(10)):
            yield batch if index < 3 else batch | {"y": batch["y"].astype(np.float64)}

    said = r"data: `y` of batch 3 is float64\[8, 2\], and it was float32\[8, 2\] before; expected one shape and dtype"
    with pytest.raises(jaxtrain.UserError, match=said):
        own(tmp_path, data=changing).fit()


def test_data_that_ends_ends_the_run_and_is_saved(tmp_path):
    result = own(tmp_path, data=batches(4), eval_data=list(batches(1))).fit()
    assert (result.step, result.stopped_by) == (4, "data: it ends after 4 batches")
    assert result.metrics["eval/loss"] > 0
    assert sorted(path.name for path in (result.run_dir / "checkpoints").iterdir() if path.name.isdecimal()) == ["4"]
    assert len(losses(result.run_dir)) == 4


def test_a_generator_resumes_by_skipping_and_is_not_read_twice(tmp_path):
    start = np.ones((4, 2), np.float32)
    trainer = own(tmp_path, data=batches(), steps=3, weights={"weight": start})
    trainer.fit()
    own(tmp_path, data=batches(), run_dir=trainer.run_dir, resume=True).fit()
    np.testing.assert_allclose(losses(trainer.run_dir), plain_losses(start), rtol=1e-5)

    def ask(trainer, step):
        if step == 4:
            trainer.request_rewind(1)

    with pytest.raises(jaxtrain.UserError, match="was read already, and generator cannot be read twice; expected a fu"):
        own(tmp_path, name="back", data=batches(), checkpoint={"every": 2}, callbacks=[Recorder(ask)]).fit()


def test_arrays_are_every_row_once_an_epoch_on_any_layout(tmp_path):
    rows = list(batches(4))
    arrays = {key: np.concatenate([batch[key] for batch in rows]) for key in ("x", "y")}
    start = {"weight": np.ones((4, 2), np.float32)}
    one = own(tmp_path, name="one", data=arrays, weights=start).fit()
    many = own(tmp_path, name="many", data=arrays, weights=start, layout="fsdp", mesh={"fsdp": 8}, simulate=8).fit()
    np.testing.assert_allclose(losses(one.run_dir), losses(many.run_dir), rtol=1e-5)
    seen = np.concatenate([one.data.batch(step)["x"] for step in range(4)])
    assert {row.tobytes() for row in seen} == {row.tobytes() for row in arrays["x"]}
    np.testing.assert_array_equal(one.data.batch(1, slice(2, 5))["x"], one.data.batch(1)["x"][2:5])


@pytest.mark.parametrize(
    ("missing", "said"),
    [("loss", "loss: the run has one that was given in Python"), ("data", "data: the run has some that was given in"),
     ("optimizer", "optimizer: the run has one that was given in Python")],
)  # fmt: skip
def test_a_run_of_objects_needs_them_again(tmp_path, missing, said):
    run = own(tmp_path, steps=2).fit().run_dir
    objects = {"model": Linear, "loss": squares, "data": batches, "optimizer": optax.sgd(0.1)}
    with pytest.raises(jaxtrain.UserError, match=said):
        jaxtrain.resume(run, "steps=3", **{name: value for name, value in objects.items() if name != missing})
    assert jaxtrain.resume(run, "steps=3", **objects).step == 3


def test_a_run_of_objects_is_evaluated_and_generates(tmp_path, text):
    sections = {name: section for name, section in text.items() if name != "optimizer"}
    keys = {name: value for name, value in options(tmp_path, name="lamb").items() if name != "schedule"}
    run = jaxtrain.Trainer(keys, optimizer=optax.lamb(1e-2), **sections).fit()
    assert jaxtrain.generate(run.run_dir, "n", tokens=2).startswith("n")
    assert jaxtrain.evaluate(run.run_dir)["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    keys["name"], free = "free", optax.contrib.schedule_free_adamw(1e-2)
    run = jaxtrain.Trainer(keys, optimizer=free, **sections).fit()
    with pytest.raises(jaxtrain.UserError, match="its optimizer, which has the weights to evaluate with, was given in"):
        jaxtrain.evaluate(run.run_dir)
    scores = jaxtrain.evaluate(run.run_dir, optimizer=free)
    assert scores["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)


def test_an_object_and_its_keys_are_not_both(tmp_path):
    for keys in ({"schedule": {"name": "constant"}}, {}):
        texts = () if keys else ("optimizer.lr=1",)
        with pytest.raises(jaxtrain.UserError, match=r"optimizer: an object and keys of `.*` are given; expected one"):
            jaxtrain.Trainer("quickstart", *texts, optimizer=optax.sgd(0.1), **keys)


def test_shipped_names_and_functions(tmp_path, text):
    assert jaxtrain.load("quickstart", layout="fsdp", mesh={"data": 1, "fsdp": 8, "model": 1}).mesh.fsdp == 8
    run = jaxtrain.Trainer(options(tmp_path, name="text"), **text).fit()
    scores = jaxtrain.evaluate(run.run_dir)
    assert scores["eval/loss"] == pytest.approx(run.metrics["eval/loss"], rel=1e-6)
    assert jaxtrain.generate(run.run_dir, "num", tokens=4, temperature=0.0).startswith("num")
    assert [text[:1] for text in jaxtrain.generate(run.run_dir, ["a", "b"], tokens=2)] == ["a", "b"]
    assert jaxtrain.resume(run.run_dir, "steps=8").step == 8
    with pytest.raises(jaxtrain.UserError, match="no such file"):
        jaxtrain.load("quickstat")


def test_a_mistyped_section_is_one_of_the_config_not_data(tmp_path):
    with pytest.raises(jaxtrain.UserError, match=r"data\.pth: unknown key"):
        jaxtrain.Trainer({}, data={"pth": "x"}, dir=str(tmp_path))


def test_a_state_that_is_read_after_the_next_step_is_one_line(tmp_path):
    trainer, kept, values = own(tmp_path), None, []
    with pytest.raises(jaxtrain.UserError, match=r"state of step 1 is read after step 3.*jnp\.copy") as error:  # noqa: PT012
        for step in trainer.steps():
            copies = jax.tree.map(jnp.copy, trainer.state)
            values.append(np.asarray(copies["params"]["weight"]))
            if kept is None:
                kept = trainer.state["params"]
            if step.number == 3:
                kept["weight"]
    assert "\n" not in str(error.value)
    assert not np.allclose(values[0], values[1])
    assert np.allclose(values[-1], trainer.state["params"]["weight"])
    assert [leaf.shape for leaf in jax.tree.leaves(trainer.state["params"])] == [(4, 2)]


class Keeps(jaxtrain.Callback):
    """Keeps an array of the state for longer than a step."""

    def on_step_end(self, trainer, step):
        if step == 1:
            self.weight = trainer.state["params"]["weight"]
        if step == 3:
            self.weight + 1


def test_a_callback_that_keeps_the_state_is_one_line(tmp_path):
    with pytest.raises(jaxtrain.UserError, match=r"an array of `trainer\.state` is used after the next step") as error:
        own(tmp_path, callbacks=[Keeps()]).fit()
    assert "\n" not in str(error.value)


def test_objects_are_recorded_by_name_and_a_change_is_shown(tmp_path, capsys):
    """Another optimizer of the same state goes on, with a line; one of another state is refused in one."""
    run = own(tmp_path, optimizer=optax.adam(0.1)).fit()
    objects = {"model": Linear, "loss": squares, "data": batches}
    _, manifest = read_manifest(run.run_dir / "checkpoints")
    assert manifest["objects"]["model"].endswith("test_trainer:Linear")
    assert manifest["objects"]["data"].endswith("test_trainer:batches")
    capsys.readouterr()
    jaxtrain.resume(
        run.run_dir, f"steps={STEPS + 1}", **objects | {"data": lambda: batches()}, optimizer=optax.adam(1.0)
    )
    assert "changed   data object: " in capsys.readouterr().out
    with pytest.raises(jaxtrain.UserError, match="not in the checkpoint: opt_state/0/trace/weight") as error:
        jaxtrain.resume(run.run_dir, f"steps={STEPS + 2}", **objects, optimizer=optax.sgd(0.1, momentum=0.9))
    assert "\n" not in str(error.value)


def test_a_notebook_gets_lines_of_text_and_the_run_its_files(tmp_path, monkeypatch, capsys):
    """There rich shows what it prints as HTML, also what is meant for a file."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    result = own(tmp_path, steps=2).fit()
    assert "weight" in (result.run_dir / "layout.txt").read_text()
    assert "step 2" in capsys.readouterr().out


def test_a_model_may_be_a_lambda(tmp_path):
    trainer = own(tmp_path, model=lambda rngs: Linear(rngs), steps=2)
    assert trainer.fit().step == 2
    assert type(trainer.model) is Linear
