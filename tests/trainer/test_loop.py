"""Whole runs: files written, the host never waiting, a user's own model, resume on another mesh."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

import jaxtrain
from jaxtrain.api import trainer as trainer_api
from jaxtrain.checkpoint.store import CheckpointStore, Retention, steps_beyond_limit
from jaxtrain.config import Config
from jaxtrain.config.show import as_dict
from jaxtrain.errors import DivergedError, TrainingError
from jaxtrain.models.flops import decoder_flops
from jaxtrain.pipeline.schedules.cost import Costs, schedule_cost
from jaxtrain.pipeline.schedules.shipped import shipped_table
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trainer import loop, run_training, training_run
from jaxtrain.trainer.setup import open_trainer


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta"]
    for index in range(60):
        (folder / f"{index}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(20, 200))))
    return folder


def config(tmp_path, corpus, *overrides):
    base = {
        "dir": str(tmp_path / "runs"), "steps": 8, "precision": "fp32", "simulate": 8, 
        "model": {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64},
        "data": {"sources": [{"path": str(corpus)}], "sequence": 64, "global_batch": 8, "validation_fraction": 0.2,
                 "cache_dir": str(tmp_path / "cache"), "workers": 1},
        "optimizer": {"lr": 1e-3}, "schedule": {"warmup_steps": 2}, "checkpoint": {"every": 4}, "eval": {"every": 4,
        "batches": 2},
    }  # fmt: skip
    return jaxtrain.load(None, "layout=3d", *overrides, base=base)


def quiet(steps: int = 8) -> ConsoleTracker:
    return ConsoleTracker(steps, console=Console(file=io.StringIO(), width=100), live=False)


def losses(run_dir) -> dict[int, float]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def read(folder, name) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_run_writes_all_of_its_files(tmp_path, corpus):
    result = jaxtrain.train(config(tmp_path, corpus), console=quiet())
    assert result.step == 8
    assert result.stopped_by is None
    assert result.metrics["eval/loss"] > 0
    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [r for r in records if "loss" in r][-1]
    wanted = {
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_sec", "tokens_per_sec_per_device", "step_time",
        "data_wait", "memory",
    }  # fmt: skip
    assert wanted <= last.keys()
    assert not {"mfu", "hfu"} & last.keys()  # a simulated device has no peak
    assert last["tokens"] == 8 * 8 * 64
    assert [r["step"] for r in records] == list(range(1, 9))  # one object per step, validation beside the step's own
    assert [r["step"] for r in records if "eval/loss" in r] == [4, 8]
    kinds = [json.loads(line)["kind"] for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    assert kinds[0] == "start"
    assert kinds[-1] == "stop"
    assert kinds.count("eval") == kinds.count("save") == 2
    assert jaxtrain.load(result.run_dir / "config.yaml") == config(tmp_path, corpus)  # paths were absolute already
    screen = quiet()
    again = jaxtrain.train(
        config(tmp_path, corpus, "steps=2", "schedule.warmup_steps=0", "log.upload_checkpoints=true"), console=screen
    )
    assert "vocab     257 tokens, padded to 384 rows (model.vocab)" in screen.console.file.getvalue()
    assert f"wrote {again.run_dir}/checkpoints/2" in screen.console.file.getvalue()  # what every tracker is given
    assert again.run_dir != result.run_dir  # a run is never written over another


def test_the_log_shows_the_bubble_of_measured_stages(tmp_path, corpus):
    changes = (
        "layout=pp",
        "mesh.pipeline=2",
        "mesh.data=4",
        "step.microbatches=2",
        "pipeline.schedule=zb_h1",
        "steps=3",
    )
    # an mlp whose W takes longer than what a busy machine adds to it
    cfg = config(tmp_path, corpus, *changes, "eval.every=3", "step.remat=full", "model.mlp=1024")
    run_dir = jaxtrain.train(cfg, console=quiet()).run_dir
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    (found,) = (event for event in events if event["kind"] == "pipeline")
    costs = Costs(found["forward_ms"], found["backward_ms"], found["weight_ms"])
    bubble = schedule_cost(shipped_table("zb_h1", 2, 2), costs).lockstep_bubble
    assert [record.get("bubble") for record in records] == [pytest.approx(bubble, abs=0.01)] * 3


def test_unequal_stages_wait_for_what_is_no_layer(tmp_path, corpus, monkeypatch):
    """3 layers in the 4 places of 2 stages; and the run is that of no stages, its validation and its resume too."""
    monkeypatch.setattr(training_run, "stage_costs", lambda *_: Costs(1.0, 1.0, 1.0))
    stages = ("layout=pp", "mesh.pipeline=2", "mesh.data=4", "step.microbatches=2", "name=stages")

    def trained(folder, *changes):
        cfg = config(tmp_path, corpus, "model.layers=3", "schedule.name=constant", *changes)
        return jaxtrain.train(cfg, run_dir=folder, resume=folder is not None, console=quiet()).run_dir

    folder = trained(None, *stages, "steps=4")
    (event,) = (event for event in read(folder, "events") if event["kind"] == "pipeline")
    of_table = schedule_cost(shipped_table("1f1b_aligned", 2, 2)).lockstep_bubble
    assert event["bubble"] == pytest.approx(1 - (1 - of_table) * 3 / 4, abs=1e-4)
    trained(folder, *stages)
    got, want = (
        [(r["step"], r["loss"], r.get("eval/loss")) for r in read(one, "metrics")]
        for one in (folder, trained(None, "layout=fsdp"))
    )
    np.testing.assert_allclose(np.array(got, float), np.array(want, float), rtol=1e-5)


def test_actions_too_short_to_be_timed_end_no_run(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(training_run, "stage_costs", lambda *_: Costs(0.0, 0.0, 0.0))
    changes = ("layout=pp", "mesh.pipeline=2", "mesh.data=4", "step.microbatches=2", "steps=2")
    folder = jaxtrain.train(config(tmp_path, corpus, *changes), console=quiet()).run_dir
    assert all("bubble" not in record for record in read(folder, "metrics"))
    assert any("too short to be timed" in event.get("text", "") for event in read(folder, "events"))


def test_a_checkpoint_is_ranked_by_the_newest_validation(tmp_path, corpus):
    """Checkpoints and validations need not fall on the same steps."""
    often = ("steps=7", "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.keep_best=1", "eval.every=3")
    result = jaxtrain.train(config(tmp_path, corpus, *often), console=quiet(7))
    scores = {event["step"]: event["eval/loss"] for event in read(result.run_dir, "events") if event["kind"] == "eval"}
    assert set(scores) == {3, 6, 7}
    steps = CheckpointStore(result.run_dir / "checkpoints").steps()
    newest = {step: max((s for s in scores if s <= step), default=None) for step in range(1, 8)}
    assert {info.step: info.metrics.get("eval/loss") for info in steps} == {
        step: scores.get(validated) for step, validated in newest.items()
    }
    assert steps_beyond_limit(steps, Retention(1, 1, "eval/loss")) == [1, 2, 3, 4, 5, 6]  # the last one is the best


def test_the_loop_makes_no_implicit_transfer(tmp_path, corpus, monkeypatch):
    """No `.item()`, no NumPy on device arrays: every transfer in the loop is an explicit one."""
    real = run_training.iterate

    def guarded(*args):
        with jax.transfer_guard("disallow"):
            yield from real(*args)

    monkeypatch.setattr(run_training, "iterate", guarded)
    assert jaxtrain.train(config(tmp_path, corpus), console=quiet()).step == 8


def test_metrics_lag_one_step(tmp_path, corpus, monkeypatch):
    """Step n is dispatched before the metrics of step n - 1 are read."""
    order, real = [], loop.log

    def spy(trainer, progress, now=False):
        if progress.pending is not None:
            order.append((trainer.dispatched, progress.pending[0]))
        return real(trainer, progress, now)

    def counted(config, directory, **kwargs):
        trainer, state, done = open_trainer(config, directory, **kwargs)
        step = trainer.program.step

        def dispatch(state, batch):
            trainer.dispatched += 1
            return step(state, batch)

        trainer.dispatched, trainer.program = done, dataclasses.replace(trainer.program, step=dispatch)
        return trainer, state, done

    open_trainer = trainer_api.open_trainer
    monkeypatch.setattr(loop, "log", spy)
    monkeypatch.setattr(trainer_api, "open_trainer", counted)
    jaxtrain.train(config(tmp_path, corpus, "eval.every=null", "checkpoint.every=null"), console=quiet())
    assert order[:-1] == [(n + 1, n) for n in range(1, 8)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["fsdp", "cp_ring"])
def test_resume_on_another_layout_is_fp32_tight(tmp_path, corpus, layout):
    same = "schedule.name=constant"  # so that the number of steps does not matter
    whole = jaxtrain.train(config(tmp_path, corpus, "name=whole", same), console=quiet())
    half = jaxtrain.train(config(tmp_path, corpus, "name=half", "steps=4", same), console=quiet())
    again = jaxtrain.load(half.run_dir / "config.yaml", f"layout={layout}", "steps=8")
    screen = quiet()
    jaxtrain.train(again, run_dir=half.run_dir, resume=True, console=screen)
    shown = screen.console.file.getvalue()
    assert "changed   layout: 3d ->" in shown
    assert "to float32 rounding" in shown
    expected, got = losses(whole.run_dir), losses(half.run_dir)
    assert got.keys() == expected.keys()
    assert list(got.values()) == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.matrix
def test_resume_under_stages_of_two_chunks_and_without_any(tmp_path, corpus):
    """Wherever a schedule has its layers, a checkpoint holds them in their order."""
    stages = ("layout=pp", "mesh={pipeline: 2, data: -1, fsdp: 1, model: 2}", "pipeline.schedule=zb_v")
    devices = (f"simulate={jax.device_count()}", "data.global_batch=16")  # `make matrix` has 16

    def trained(folder, *changes):
        same = ("schedule.name=constant", "model.layers=4", "step.microbatches=2", *devices)
        cfg = config(tmp_path, corpus, *same, *changes)
        return jaxtrain.train(cfg, run_dir=folder, resume=folder is not None, console=quiet()).run_dir

    whole, half = trained(None, "name=whole"), trained(None, "name=half", *stages, "steps=2")
    trained(half, "name=half", "steps=4")
    trained(half, "name=half", *stages)
    expected, got = losses(whole), losses(half)
    assert list(got) == list(range(1, 9))
    assert list(got.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def test_a_users_own_model_trains_on_any_layout(tmp_path):
    found = []
    for layout in ("3d", "fsdp"):
        cfg = jaxtrain.load(
            "configs/recipes/spirals.yaml", f"layout={layout}", f"dir={tmp_path}", f"name={layout}", "steps=60",
            "checkpoint.every=null",
        )  # fmt: skip
        found.append(jaxtrain.train(cfg, console=quiet(60)).metrics)
    assert found[0]["eval/loss"] < 0.4
    assert found[0]["eval/loss"] == pytest.approx(found[1]["eval/loss"], rel=1e-3)


@pytest.mark.parametrize("own", ["model", "data"])
def test_rates_and_flops_count_the_same_items(tmp_path, corpus, own):
    """Tokens, also where the model or the data are the user's own: MFU is their product over the peak."""
    base = config(tmp_path, corpus)
    values, model = as_dict(base), base.model.model_copy(update={"vocab": 256})
    if own == "model":
        values["model"], per_token = {"type": "linear_model:Bigrams"}, 7
    else:
        values["model"], per_token = model.model_dump(), decoder_flops(model, 256, 64).model
        values["data"] = {"type": "linear_model:Packed", "sequence": 64, "global_batch": 8}
    trainer, *_ = open_trainer(Config(**values), tmp_path / own, console=quiet(), resume=False)
    trainer.trackers.close()
    trainer.checkpointer.close()
    assert trainer.meter.tokens == 8 * 64
    assert trainer.meter.flops.model == per_token


def test_a_folder_that_holds_a_run_is_not_trained_into(tmp_path, corpus):
    first = jaxtrain.train(config(tmp_path, corpus, "seed=1"), console=quiet())
    before = (first.run_dir / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="already holds a run"):
        jaxtrain.train(config(tmp_path, corpus, "seed=2"), run_dir=first.run_dir, console=quiet())
    assert (first.run_dir / "metrics.jsonl").read_text() == before
    again = jaxtrain.load(first.run_dir / "config.yaml", "steps=3")
    with pytest.raises(ValueError, match="steps: 3 is less than the 8 already done"):
        jaxtrain.train(again, run_dir=first.run_dir, resume=True, console=quiet())
    # A refusal frees the folder: the same process may go on with it.
    changed = jaxtrain.load(first.run_dir / "config.yaml", "steps=9", "optimizer.lr=0.5")
    screen = quiet()
    assert jaxtrain.train(changed, run_dir=first.run_dir, resume=True, console=screen).step == 9
    assert "guarantee the config asks for different steps" in screen.console.file.getvalue()


def test_a_run_whose_first_checkpoint_is_damaged_begins_again(tmp_path, corpus):
    same = ("schedule.name=constant", "layout=ddp", "eval.every=null")
    whole = jaxtrain.train(config(tmp_path, corpus, "name=whole", *same), console=quiet())
    part = jaxtrain.train(config(tmp_path, corpus, "name=part", "steps=4", *same), console=quiet()).run_dir
    shutil.copytree(part, tmp_path / "other")
    for folder, file in ((part, "state/_METADATA"), (tmp_path / "other", "jaxtrain.json")):
        (folder / "checkpoints/4" / file).write_bytes(b"{")
        screen = quiet()
        again = jaxtrain.load(folder / "config.yaml", "steps=8")
        assert jaxtrain.train(again, run_dir=folder, resume=True, console=screen).step == 8
        shown = " ".join(screen.console.file.getvalue().split())
        assert "but one of step 4, which is damaged: starting from step 0" in shown
        assert losses(folder) == losses(whole.run_dir)
        assert (folder / "checkpoints/bad-4").is_dir()


def test_a_run_whose_later_checkpoints_are_damaged_is_the_users_to_begin_again(tmp_path, corpus):
    keys = ("layout=ddp", "eval.every=null", "checkpoint.every=2", "checkpoint.keep=1", "steps=4")
    part = jaxtrain.train(config(tmp_path, corpus, *keys), console=quiet())
    (part.run_dir / "checkpoints/4/state/_METADATA").unlink()
    again = jaxtrain.load(part.run_dir / "config.yaml")
    for _ in range(2):  # also when it is set aside
        with pytest.raises(ValueError, match=r"4 is damaged .* --set-aside\) to start from step 0"):
            jaxtrain.train(again, run_dir=part.run_dir, resume=True, console=quiet())
    assert losses(part.run_dir).keys() == {1, 2, 3, 4}  # nothing is cut


def test_a_run_whose_only_copy_cannot_be_fetched_does_not_begin_again(tmp_path, corpus):
    keys = ("layout=ddp", "eval.every=null", "steps=4", f"checkpoint.durable={tmp_path / 'copies'}")
    part = jaxtrain.train(config(tmp_path, corpus, *keys), console=quiet())
    shutil.rmtree(part.run_dir / "checkpoints/4")
    (copy,) = (tmp_path / "copies").rglob("_METADATA")
    copy.write_bytes(b"{")
    again = jaxtrain.load(part.run_dir / "config.yaml")
    with pytest.raises(ValueError, match=r"no usable checkpoint in .* could not be fetched"):
        jaxtrain.train(again, run_dir=part.run_dir, resume=True, console=quiet())
    assert losses(part.run_dir).keys() == {1, 2, 3, 4}


def test_every_step_is_recorded_at_any_log_interval(tmp_path, corpus):
    result = jaxtrain.train(config(tmp_path, corpus, "log.every=5", "seed=3000000000"), console=quiet())
    assert result.metrics["loss"] > 0
    assert losses(result.run_dir).keys() == {4, 5, 8}  # 4 and 8 because they were saved


def test_losses_that_stay_bad_stop_the_run_and_are_never_saved(tmp_path, corpus, monkeypatch):
    real = trainer_api.open_trainer

    def poisoned(config, directory, **kwargs):
        trainer, state, done = real(config, directory, **kwargs)
        step = trainer.program.step

        def poison(state, batch):
            batch = dict(batch)
            if int(jax.device_get(state["step"])) >= 5:
                batch["weights"] = batch["weights"] * jax.numpy.nan
            return step(state, batch)

        trainer.program = dataclasses.replace(trainer.program, step=poison)
        return trainer, state, done

    monkeypatch.setattr(trainer_api, "open_trainer", poisoned)
    cfg = config(tmp_path, corpus, "steps=40", "eval.every=null", "log.every=3")
    with pytest.raises(DivergedError, match=r"20 steps in a row .* at step 25; checkpoint 4 is the last good one"):
        jaxtrain.train(cfg, console=quiet())
    saved = [path.name for path in (cfg.run_dir / "checkpoints").iterdir() if path.name.isdigit()]
    assert saved == ["4"]


def test_the_loss_contract_and_options_of_a_users_model_are_checked_in_one_line(tmp_path):
    cfg = jaxtrain.load(
        "configs/recipes/spirals.yaml",
        "model.options.width=8",
        f"dir={tmp_path}",
    )
    with pytest.raises(ValueError, match="unexpected keyword argument 'width'"):
        jaxtrain.train(cfg, console=quiet())
    from jaxtrain.losses.terms import validate_terms

    for bad in (1.0, {}, {"a": 1.0}, {"a": (1.0, jax.numpy.ones(2))}):
        with pytest.raises(ValueError, match=r"must return a dict of terms"):
            validate_terms(bad)


def test_a_full_device_is_told_in_one_line(tmp_path, corpus, monkeypatch):
    def full(self, index):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 bytes.")

    monkeypatch.setattr("jaxtrain.core.placement.Placer.__call__", full)
    cfg = config(tmp_path, corpus)
    with pytest.raises(TrainingError, match="ran out of memory"):
        jaxtrain.train(cfg, run_dir=tmp_path / "full", console=quiet())
    stop = json.loads((tmp_path / "full" / "events.jsonl").read_text().splitlines()[-1])
    assert (stop["kind"], stop["step"]) == ("stop", 0)
