"""Optimizers of optax and users' own in whole runs: any layout, any ZeRO stage, resumed on another mesh."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from safetensors import safe_open
from selection import one_in

import jaxtrain
from jaxtrain.config.schema import MeshConfig
from jaxtrain.core.placement import placer
from jaxtrain.core.program import build_program
from jaxtrain.core.state import evaluated_parameters
from jaxtrain.data.dataset import open_dataset
from jaxtrain.errors import UserError
from jaxtrain.models.spec import vocabulary_size

STEPS = 6
OWN = str(Path(__file__).parents[1] / "optim")
OPTIMIZERS = {
    "lamb": {"name": "optax.lamb", "lr": 1e-2},
    "schedule_free": {"name": "optax.contrib.schedule_free_adamw", "options": {"learning_rate": 1e-2}},
    "prodigy": {"name": "optax.contrib.prodigy", "lr": 1.0},
    "dadapt": {"name": "optax.contrib.dadapt_adamw", "lr": 1.0},
    "muon": {"name": "optax.contrib.muon", "lr": 1e-2},
    "adafactor": {"name": "optax.adafactor", "lr": 1e-2, "options": {"min_dim_size_to_factor": 16}},
    "lion": {"name": "optax.lion", "lr": 1e-3},
    "sm3": {"name": "optax.sm3", "options": {"learning_rate": 1e-2}},  # it takes no schedule
    "novograd": {"name": "optax.novograd", "lr": 1e-2},
    "lars": {"name": "optax.lars", "lr": 1e-2},
    "factored": {"name": "own_optimizers:factored", "options": {"learning_rate": 1e-2}},
    "kronecker": {"name": "own_optimizers:kronecker", "options": {"learning_rate": 1e-3}},
    "norms": {"name": "own_optimizers:norm_scaled", "options": {"learning_rate": 1e-2}},
}
SMALL_STATE = ("norms", "adafactor", "factored", "sm3")  # less than a number for each parameter
LAYOUTS = {
    "ddp": ("layout=ddp", "mesh.data=-1"),
    "zero1": ("layout=zero1", "mesh.data=-1"),
    "zero2": ("layout=zero2", "mesh.data=-1"),
    "zero3": ("layout=zero3", "mesh.data=-1"),
    "3d": ("layout=3d", "mesh={data: -1, fsdp: 2, model: 2}"),
}


def config(tmp_path, optimizer, *overrides, steps=STEPS, name="run"):
    base = {
        "name": name, "dir": str(tmp_path / "runs"), "steps": steps, "precision": "fp32",
        "model": {"embed": 32, "layers": 3, "heads": 4, "mlp": 64}, "optimizer": optimizer,
        "data": {"sequence": 32, "global_batch": 16, "validation_fraction": 0.02, "cache_dir": str(tmp_path / "cache")},
        "schedule": {"name": "constant"}, "eval": {"batches": 1}, "log": {"tensorboard": False},
    }  # fmt: skip
    return jaxtrain.load(None, *overrides, base=base)


@pytest.fixture(autouse=True)
def own_optimizers(monkeypatch, tmp_path_factory):
    monkeypatch.syspath_prepend(OWN)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("optimizers")


def losses(result) -> list[float]:
    records = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records] + [r["eval/loss"] for r in records if "eval/loss" in r]


def steps_of(config, devices: int):
    """Losses of all steps of a config on so many devices, and bytes of the optimizer's state on the first one."""
    data = open_dataset(config.data, config.seed)
    program = build_program(config, vocabulary_size(config.model, data.vocab), jax.devices()[:devices])
    place, state, found = placer(data, program), program.init(), []
    for step in range(STEPS):
        state, metrics = program.step(state, place(step))
        found.append(float(metrics["loss"]))
    return found, sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state["opt_state"]))


@pytest.fixture(scope="module")
def alone(place):
    """The same of each optimizer on one device."""
    one = {"mesh": MeshConfig(), "rules": {}, "zero": 0, "simulate": None}

    @functools.cache
    def run(name):
        return steps_of(config(place, OPTIMIZERS[name]).model_copy(update=one), 1)

    return run


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "layout"), one_in(5, OPTIMIZERS, LAYOUTS))
def test_a_layout_never_changes_the_result(place, alone, name, layout):
    found, size = steps_of(config(place, OPTIMIZERS[name], *LAYOUTS[layout], "simulate=8"), 8)
    want, whole = alone(name)
    np.testing.assert_allclose(found, want, rtol=1e-4 if name == "kronecker" else 1e-5)
    assert size <= whole
    if layout != "ddp" and name not in SMALL_STATE:
        assert size < whole / (1.5 if layout == "3d" else 3)


MOVES = {"zero2-3d": ("zero2", "3d"), "3d-zero1": ("3d", "zero1")}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "move"), one_in(12, OPTIMIZERS, MOVES))
def test_resume_on_another_mesh(place, alone, name, move):
    before, after = (LAYOUTS[layout] for layout in MOVES[move])
    devices = f"simulate={jax.device_count()}"  # `make matrix` has 16
    first = config(place, OPTIMIZERS[name], *before, devices, steps=3, name=f"{name}-{move}")
    run_dir = jaxtrain.train(first).run_dir
    second = config(place, OPTIMIZERS[name], *after, devices, name=f"{name}-{move}")
    result = jaxtrain.train(second, run_dir=run_dir, resume=True)
    np.testing.assert_allclose(losses(result)[:STEPS], alone(name)[0], rtol=1e-4 if name == "kronecker" else 1e-5)


def test_an_object_is_its_own_rate_and_clip(tmp_path):
    """The same optimizer by name has the config's learning rate; its clipping is off here."""
    by_name = config(tmp_path, OPTIMIZERS["lamb"] | {"grad_clip_norm": None}, name="named")
    want = jaxtrain.train(by_name)
    given = config(tmp_path, {"lr": 7.0}, name="given")
    got = jaxtrain.train(given, optimizer=optax.lamb(1e-2))
    assert losses(got) == losses(want)
    records = [json.loads(line) for line in (got.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "lr" not in records[0]
    with pytest.raises(UserError, match="the run has one that was given in Python; expected it again, as `optimizer"):
        jaxtrain.train(jaxtrain.load(got.run_dir / "config.yaml", "steps=8"), run_dir=got.run_dir, resume=True)
    longer = config(tmp_path, {"lr": 7.0}, steps=8, name="given")
    assert jaxtrain.train(longer, run_dir=got.run_dir, resume=True, optimizer=optax.lamb(1e-2)).step == 8
    with pytest.raises(UserError, match=r"optimizer: found function; expected an optax\.GradientTransformation"):
        jaxtrain.train(given, optimizer=optax.lamb)


def test_a_schedule_free_run_is_evaluated_with_its_average(place):
    result = jaxtrain.train(config(place, OPTIMIZERS["schedule_free"], name="average"))
    state = result.state["opt_state"]
    want = optax.contrib.schedule_free_eval_params(state, result.state["params"])
    got = evaluated_parameters(result.state)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), got, want))
    assert not np.array_equal(jax.tree.leaves(got)[0], jax.tree.leaves(result.state["params"])[0])
    assert jaxtrain.evaluate(result.run_dir)["eval/loss"] == pytest.approx(result.metrics["eval/loss"], rel=1e-6)
    assert jaxtrain.generate(result.run_dir, "def ", tokens=3).startswith("def ")
    jaxtrain.export(result.run_dir, place / "exported")
    with safe_open(place / "exported" / "model.safetensors", "np") as file:
        table = file.get_tensor("model.embed_tokens.weight")
    np.testing.assert_array_equal(table, np.asarray(got["embed"]["table"]))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"name": "adamww"}, r"optimizer\.name: expected adamw, adafactor, .* `optax\.NAME`, .*did you mean `adamw`"),
        ({"name": "optax.lamb", "weight_decay": 0.3}, r"`optax\.lamb` does not read weight_decay; expected `optimizer"),
        ({"name": "optax.lamb", "groups": [{"match": ["vocab"], "weight_decay": 0}]}, "`optax.lamb` has its own decay"),
        ({"options": {"b1": 0.8}}, r"options are for those of optax or a user's own; `adamw` takes its keys"),
    ],
)
def test_wrong_configs(tmp_path, optimizer, said):
    with pytest.raises(UserError, match=said):
        config(tmp_path, optimizer)
