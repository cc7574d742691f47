"""Which promise holds, and which config changes a resume accepts."""

from __future__ import annotations

import copy
import subprocess
import sys
from importlib import metadata

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxtrain.config.schema import Config
from jaxtrain.trainer.compatibility import compare_configs, environment, resume_guarantee


@pytest.fixture(scope="module", autouse=True)
def started():
    """JAX reads its flags when it starts: it must have, before a test changes them."""
    jax.devices()


def config(**sections) -> dict:
    return Config.model_validate(sections).model_dump(mode="json")


def mesh_of(fsdp: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: fsdp * model]).reshape(fsdp, model)
    return Mesh(devices, ("fsdp", "model"), axis_types=(AxisType.Auto,) * 2)


def test_the_environment_names_all_that_decides_the_bits(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--b=1 --xla_force_host_platform_device_count=8 --a=2")
    manifest = environment(config(), mesh_of(8, 1), position=12)
    assert manifest["mesh"] == {"fsdp": 8}
    assert (manifest["devices"], manifest["processes"], manifest["position"]) == (8, 1, 12)
    assert manifest["flags"]["XLA_FLAGS"] == "--a=2 --b=1"
    assert manifest["versions"]["jax"] == jax.__version__
    for package in ("jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        assert manifest["versions"][package] == metadata.version(package)


def test_the_same_environment_guarantees_equal_bits():
    saved = environment(config(log={"every": 5}, checkpoint={"keep": 2}, dir="a"), mesh_of(4, 2), position=3)
    now = environment(config(log={"every": 1}, dir="b", data={"workers": 9}), mesh_of(4, 2), position=4)
    assert resume_guarantee(saved, now) == ("bitwise", [])


def test_a_key_that_the_saved_config_lacks_has_its_default():
    now = config(model={"from": "folder"})
    older = config(model={"from": "folder"})
    del older["step"]["unroll"]
    assert resume_guarantee(environment(older, mesh_of(4, 2)), environment(now, mesh_of(4, 2))) == ("bitwise", [])
    assert compare_configs(older, now) == ([], [])
    changed = environment(now | {"step": {**now["step"], "unroll": 2}}, mesh_of(4, 2))
    assert resume_guarantee(environment(older, mesh_of(4, 2)), changed) == (
        "fp32-tight",
        ["config step.unroll: 1 -> 2"],
    )


def test_each_difference_is_named(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    saved = environment(config(), mesh_of(4, 2))
    assert resume_guarantee(saved, environment(config(), mesh_of(2, 4))) == (
        "fp32-tight",
        ["mesh fsdp: 4 -> 2", "mesh model: 2 -> 4"],
    )
    assert resume_guarantee(saved, environment(config(), mesh_of(2, 2)))[1] == ["mesh fsdp: 4 -> 2", "devices: 8 -> 4"]
    for path, value, line in [
        (("processes",), 2, "processes: 1 -> 2"),
        (("versions", "jax"), "9", f"versions jax: {jax.__version__} -> 9"),
        (("device_kind",), "TPU v5p", "-> TPU v5p"),
        (("flags", "XLA_FLAGS"), "--fast", "flags XLA_FLAGS: none -> --fast"),
        (("config", "step", "microbatches"), 4, "config step.microbatches: 1 -> 4"),
        (("config", "optimizer", "lr"), 1.0, "config optimizer.lr: 0.0003 -> 1.0"),
    ]:
        now = copy.deepcopy(saved)
        node = now
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        level, reasons = resume_guarantee(saved, now)
        assert level == ("changed" if "optimizer" in path else "fp32-tight")
        assert len(reasons) == 1
        assert reasons[0].endswith(line)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model": {"embed": 512}}, "model.embed: 256 -> 512"),
        ({"model": {"type": "mine.net:Net"}}, "model.type: decoder -> mine.net:Net"),
        ({"model": {"tie_embeddings": True}}, "model.tie_embeddings: False -> True"),
        ({"data": {"sources": [{"path": "/corpus"}]}}, "data.sources.0.path: stdlib -> /corpus"),
        ({"data": {"tokenizer": "t.json"}}, "data.tokenizer: bytes -> t.json"),
        ({"data": {"sequence": 2048}}, "data.sequence: 1024 -> 2048"),
        ({"data": {"global_batch": 16}}, "data.global_batch: 8 -> 16"),
        ({"data": {"validation_fraction": 0.5}}, "data.validation_fraction: 0.01 -> 0.5"),
        ({"seed": 1}, "seed: 0 -> 1"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: adamw -> lion"),
        ({"optimizer": {"ema_decay": 0.99}}, "optimizer.ema_decay: none -> 0.99"),
        ({"precision": "bf16_pure"}, "precision: bf16 -> bf16_pure"),
        ({"precision": "fp16"}, "precision: bf16 -> fp16"),
    ],
)
def test_refused_changes(change, key):
    changes, refused = compare_configs(config(), config(**change))
    assert changes == [key]
    assert len(refused) == 1
    assert refused[0].startswith(f"{key} cannot be resumed: ")


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"mesh": {"model": 4}}, "mesh.model: 1 -> 4"),
        ({"layout": "fsdp"}, "layout: ddp -> fsdp"),
        ({"rules": {"embed": "fsdp"}}, "rules.embed.0: none -> fsdp"),
        ({"precision": "fp32"}, "precision: bf16 -> fp32"),
        ({"steps": 2000}, "steps: 1000 -> 2000"),
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr: 0.0003 -> 0.5"),
        ({"step": {"microbatches": 2}}, "step.microbatches: 1 -> 2"),
        ({"step": {"attention": "xla"}}, "step.attention: auto -> xla"),
        ({"step": {"remat": "full", "remat_save": {"a": "device"}}}, None),
        ({"log": {"every": 7}}, "log.every: 1 -> 7"),
        ({"simulate": 4}, "simulate: none -> 4"),
        ({"data": {"workers": 3}}, "data.workers: none -> 3"),
        ({"model": {"init_std": 0.5}}, "model.init_std: 0.02 -> 0.5"),
    ],
)
def test_allowed_changes(change, key):
    changes, refused = compare_configs(config(), config(**change))
    assert refused == []
    assert changes
    assert key is None or changes == [key]


def test_no_change():
    assert compare_configs(config(), config()) == ([], [])


def test_mixture_weights_may_change_from_the_step_on():
    def mixture(**weights):
        shares = {int(k[1:]): v for k, v in weights.items()}
        return config(data={"sources": [{"path": "a", "weight": shares or {"0": 1.0}}]})

    key = "data.sources.0.weight"
    assert compare_configs(mixture(), mixture(s500=0.5), step=500) == ([f"{key}.500: none -> 0.5"], [])
    assert compare_configs(mixture(s700=0.5), mixture(s700=0.25), step=500)[1] == []
    assert len(compare_configs(mixture(), mixture(s500=0.5), step=501)[1]) == 1
    assert len(compare_configs(mixture(s10=0.5), mixture(), step=500)[1]) == 1
    assert compare_configs(mixture(), mixture(s0=1.0), step=500) == ([], [])
    assert len(compare_configs(mixture(), mixture(s0=2.0), step=500)[1]) == 1


def test_reading_a_checkpoint_needs_no_jax():
    code = (
        "import sys, jaxtrain.checkpoint as c; from jaxtrain.trainer import compatibility, signals; c.read_manifest;"
        "c.CheckpointStore('.').latest(); compatibility.compare_configs({}, {}); signals.Signals(); "
        "sys.exit('jax' in sys.modules or 'orbax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_more_steps_change_the_schedule_unless_it_does_not_look_at_them():
    for schedule, level in (("cosine", "changed"), ("constant", "fp32-tight")):
        before, after = (environment(config(steps=n, optimizer={}, schedule={"name": schedule})) for n in (1000, 2000))
        assert resume_guarantee(before, after)[0] == level


def test_data_that_moved_is_the_same_data():
    moved = config(data={"sources": [{"path": "/elsewhere"}], "tokenizer": "/elsewhere/t.json"})
    assert compare_configs(config(), moved, same_data=True)[1] == []
    assert len(compare_configs(config(), moved)[1]) == 2
    before, after = environment(config(), data="key"), environment(moved, data="key")
    assert resume_guarantee(before, after) == ("bitwise", [])
