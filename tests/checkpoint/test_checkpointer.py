"""Saving and restoring on eight simulated devices: round trips, meshes, donation, damage, retention, failures."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointReader,
    CheckpointStore,
    Committed,
    SaveFailed,
    SetAside,
    read_manifest,
)
from jaxtrain.checkpoint import orbax as orbax_module
from jaxtrain.checkpoint import saving as saving_module
from jaxtrain.checkpoint.state_tree import copy_to_host

MANIFEST = {"config": {"seed": 3}, "versions": {"jax": "x"}}


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    devices = np.array(jax.devices()[: data * fsdp * model]).reshape(data, fsdp, model)
    return Mesh(devices, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)


def shardings(tree, mesh: Mesh):
    """Matrices over (fsdp, model), vectors over fsdp, scalars replicated."""
    specs = {0: P(), 1: P("fsdp"), 2: P("fsdp", "model"), 3: P(None, "fsdp", "model")}
    return jax.tree.map(lambda x: NamedSharding(mesh, specs[len(x.shape)]), tree)


def make_state(mesh: Mesh, seed: int = 0, width: int = 16):
    """A train state with an optax chain: named tuples, empty states, bfloat16 and integer leaves."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(rng.normal(size=(32, width)), jnp.float32),
        "layers": {"w": jnp.asarray(rng.normal(size=(3, width, 8)), jnp.bfloat16), "norm": jnp.ones(width)},
    }
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-3, 0.0, 10)))
    opt_state = tx.init(params)
    _, opt_state = tx.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    state = {
        "step": jnp.int32(7),
        "params": params,
        "opt_state": opt_state,
        "rng": jax.random.key_data(jax.random.key(seed)),
    }
    specs = shardings(state, mesh)
    specs["rng"] = NamedSharding(mesh, P())
    return jax.device_put(state, specs)


def abstract(state, mesh: Mesh | None = None):
    """ShapeDtypeStructs of a state, on its own shardings or those of another mesh."""
    specs = jax.tree.map(lambda x: x.sharding, state) if mesh is None else shardings(state, mesh)
    if mesh is not None:
        specs["rng"] = NamedSharding(mesh, P())
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, specs)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def save_steps(directory: Path, *steps: int, **options) -> dict[int, object]:
    """Saves one state per step and returns host copies of them."""
    mesh, kept = mesh_of(2, 2, 2), {}
    with Checkpointer(directory, keep=10, **options) as checkpoints:
        for step in steps:
            state = make_state(mesh, seed=step)
            kept[step] = jax.device_get(state)
            checkpoints.save(step, state, manifest=MANIFEST | {"position": step})
        checkpoints.wait()
        assert not any(isinstance(event, SaveFailed) for event in checkpoints.poll())
    return kept


def files_of(directory: Path, step: int) -> list[Path]:
    return sorted(path for path in (directory / str(step)).rglob("*") if path.is_file())


def test_round_trip_keeps_structure_values_and_shardings(tmp_path):
    mesh = mesh_of(2, 2, 2)
    state = make_state(mesh)
    with Checkpointer(tmp_path / "run") as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.save(7, state, manifest=MANIFEST, metrics={"eval/loss": 2.5})
        checkpoints.wait()
        (event,) = checkpoints.poll()
        assert isinstance(event, Committed)
        assert (event.step, event.deleted) == (7, ())
        size = sum(path.stat().st_size for path in files_of(tmp_path / "run", 7) if path.name != "jaxtrain.json")
        assert event.bytes == size > 4 * 32 * 16
        assert 0 < event.stall < event.seconds
        restored, manifest = checkpoints.restore(None, abstract(state))
    assert manifest == MANIFEST
    assert_equal(restored, state)
    for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state)):
        assert x.sharding == y.sharding
    (info,) = CheckpointStore(tmp_path / "run").steps()
    assert (info.step, info.metrics, info.bytes) == (7, {"eval/loss": 2.5}, size)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (1, 1, 1), (4, 1, 2)])
def test_restores_onto_another_mesh(tmp_path, sizes):
    state = make_state(mesh_of(2, 2, 2))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, manifest=MANIFEST)
    target = abstract(state, mesh_of(*sizes))
    restored, _ = CheckpointReader(tmp_path).restore(None, target)
    assert_equal(restored, jax.device_get(state))
    assert all(x.sharding == y.sharding for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(target)))


def test_a_tensor_above_the_read_limit_restores(tmp_path):
    mesh = mesh_of(1, 1, 1)
    sharding = NamedSharding(mesh, P())
    state = {"w": jax.device_put(jnp.arange(20 << 20, dtype=jnp.float32).reshape(-1, 1024), sharding)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, manifest={})
        restored, _ = checkpoints.restore(1, {"w": jax.ShapeDtypeStruct((20480, 1024), jnp.float32, sharding=sharding)})
    assert_equal(restored, state)


def test_the_state_may_be_donated_right_after_save(tmp_path):
    mesh = mesh_of(2, 2, 2)
    spec = NamedSharding(mesh, P("fsdp", "model"))
    state = {"w": jax.device_put(jnp.ones((512, 512)), spec)}

    def work(s):
        return {"w": s["w"] @ jnp.eye(512) + 1}

    step = jax.jit(work, donate_argnums=0)
    state = step(state)
    with Checkpointer(tmp_path, keep=20) as checkpoints:
        for number in range(1, 11):
            state = step(state)  # still running when it is saved, and donated while it is copied
            checkpoints.save(number, state, manifest={})
            state = step(state)
    reader = CheckpointReader(tmp_path)
    like = {"w": jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=spec)}
    for number in range(1, 11):
        restored, _ = reader.restore(number, like)
        assert float(restored["w"].min()) == float(restored["w"].max()) == 2 * number + 1


def test_a_restored_state_donates_every_buffer(tmp_path):
    mesh = mesh_of(2, 2, 2)
    state = {f"w{i}": jnp.full((64 * (i + 1), 64), float(i)) for i in range(12)}
    state = jax.device_put(state, shardings(state, mesh))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, manifest={})
        restored, _ = checkpoints.restore(None, abstract_of(state))
    before = pointers(restored)
    after = pointers(jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(restored))
    assert len(before) == 12 * 8
    assert after == before


def abstract_of(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def pointers(state) -> set[int]:
    arrays = jax.block_until_ready(jax.tree.leaves(state))
    return {shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards}


def test_copy_to_host_copies_each_shard_once():
    mesh = mesh_of(2, 2, 2)
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P(None, "model")))
    scalar = jax.device_put(jnp.float32(3), NamedSharding(mesh, P()))
    copies = copy_to_host({"x": x, "scalar": scalar})
    assert len(copies["x"].addressable_shards) == 2
    assert len(copies["scalar"].addressable_shards) == 1
    assert not pointers(copies) & pointers([x, scalar])
    np.testing.assert_array_equal(copies["x"], x)


def test_copy_to_host_follows_any_device_order():
    devices = np.array(jax.devices())[np.random.default_rng(0).permutation(8)].reshape(2, 2, 2)
    mesh = Mesh(devices, ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    x = jnp.arange(4 * 4 * 4.0).reshape(4, 4, 4)
    specs = P("model", "data", "fsdp"), P("fsdp", None, "data"), P(None, ("model", "data")), P(None, None, "model")
    for spec in specs:
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        copy = copy_to_host({"x": placed})["x"]
        np.testing.assert_array_equal(copy, x)
        assert copy.sharding.shard_shape(x.shape) == placed.sharding.shard_shape(x.shape)
        assert all(shard.replica_id == 0 for shard in copy.addressable_shards)


def test_partial_restore_and_manifest(tmp_path):
    save_steps(tmp_path, 4)
    like = {"params": abstract(make_state(mesh_of(2, 2, 2), seed=4))["params"]}
    restored, _ = CheckpointReader(tmp_path).restore(None, like, partial=True)
    assert_equal(restored, {"params": make_state(mesh_of(2, 2, 2), seed=4)["params"]})
    assert read_manifest(tmp_path) == (4, MANIFEST | {"position": 4})
    with pytest.raises(CheckpointError, match="only in the checkpoint: opt_state"):
        CheckpointReader(tmp_path).restore(None, like)


def test_structure_shape_and_dtype_must_fit(tmp_path):
    mesh = mesh_of(2, 2, 2)
    save_steps(tmp_path, 4)
    like = abstract(make_state(mesh))
    sharding = like["params"]["embed"].sharding

    def with_embed(shape, dtype):
        embed = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        return like | {"params": dict(like["params"], embed=embed)}

    with pytest.raises(CheckpointError, match=r"params/embed is float32\[32, 16\] in the .*, bfloat16\[32, 16\] here"):
        CheckpointReader(tmp_path).restore(None, with_embed((32, 16), jnp.bfloat16))
    with pytest.raises(CheckpointError, match=r"float32\[32, 8\] here"):
        CheckpointReader(tmp_path).restore(None, with_embed((32, 8), jnp.float32))
    with pytest.raises(CheckpointError, match=r"not in the checkpoint: ema$"):
        CheckpointReader(tmp_path).restore(None, like | {"ema": like["params"]["embed"]})
    fewer = {key: value for key, value in like.items() if key != "rng"}
    with pytest.raises(CheckpointError, match=r"only in the checkpoint: rng$") as error:
        CheckpointReader(tmp_path).restore(None, fewer)
    assert "\n" not in str(error.value)


def damage_flip(path: Path, rng: np.random.Generator) -> None:
    raw = bytearray(path.read_bytes())
    raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)


def damage_truncate(path: Path, rng: np.random.Generator) -> None:
    os.truncate(path, path.stat().st_size - 1)


def damage_delete(path: Path, rng: np.random.Generator) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [damage_flip, damage_truncate, damage_delete])
def test_any_damage_to_any_file_falls_back_to_the_step_before(tmp_path, damage):
    kept = save_steps(tmp_path / "good", 10, 20)
    mesh = mesh_of(2, 2, 2)
    like = abstract(make_state(mesh))
    names = [path.relative_to(tmp_path / "good" / "20") for path in files_of(tmp_path / "good", 20)]
    assert len(names) >= 7
    rng = np.random.default_rng(0)
    for name in names:
        if (tmp_path / "good" / "20" / name).stat().st_size == 0 and damage is not damage_delete:
            continue
        work = tmp_path / "work"
        shutil.copytree(tmp_path / "good", work)
        damage(work / "20" / name, rng)
        reader = CheckpointReader(work)
        if damage is not damage_delete or name.name != "jaxtrain.json":
            with pytest.raises(CheckpointError, match=r"checkpoint 20 in .* is damaged") as error:
                reader.restore(20, like)
            assert name.name in str(error.value)
        restored, manifest = reader.restore(None, like)
        assert manifest["position"] == 10, name
        assert_equal(jax.device_get(restored), kept[10])
        assert (work / "20").is_dir(), "a reader renames nothing"
        shutil.rmtree(work)


def test_a_damaged_newest_step_is_set_aside_and_saved_again(tmp_path):
    save_steps(tmp_path, 10, 20)
    like = abstract(make_state(mesh_of(2, 2, 2)))
    data = max(files_of(tmp_path, 20), key=lambda path: path.stat().st_size)
    damage_flip(data, np.random.default_rng(1))
    with Checkpointer(tmp_path) as checkpoints:
        _, manifest = checkpoints.restore(None, like)
        assert manifest["position"] == 10
        (event,) = checkpoints.poll()
        assert isinstance(event, SetAside)
        assert event.step == 20
        assert "another checksum" in event.reason
        assert event.path is not None
        assert Path(event.path).name == "bad-20"
        assert [info.step for info in checkpoints.steps()] == [10]
        state = make_state(mesh_of(2, 2, 2), seed=99)
        assert checkpoints.save(20, state, manifest=MANIFEST)
        restored, _ = checkpoints.restore(None, like)
        assert_equal(restored, state)
    assert (tmp_path / "bad-20").is_dir()


def test_a_save_replaces_a_step_with_a_damaged_marker(tmp_path):
    save_steps(tmp_path, 10, 20)
    damage_truncate(tmp_path / "20" / "jaxtrain.json", np.random.default_rng(0))
    state = make_state(mesh_of(2, 2, 2), seed=5)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest() == 10
        assert checkpoints.save(20, state, manifest=MANIFEST)
        checkpoints.wait()
        first, second = checkpoints.poll()
        assert isinstance(first, SetAside)
        assert isinstance(second, Committed)
        assert_equal(checkpoints.restore(20, abstract(state))[0], state)
    assert (tmp_path / "bad-20").is_dir()


def test_all_damaged_steps_are_named(tmp_path):
    save_steps(tmp_path, 10, 20)
    for step in (10, 20):
        (tmp_path / str(step) / "state" / "_METADATA").unlink()
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"no usable checkpoint in .* 20, 10"):
            checkpoints.restore(None, abstract(make_state(mesh_of(2, 2, 2))))
        assert len(checkpoints.poll()) == 2


def test_keep_and_keep_best(tmp_path):
    state = {"w": jnp.zeros(8)}
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 2.0, 5: 2.5, 6: 2.6}
    deleted = []
    with Checkpointer(tmp_path, keep=2, keep_best=2, best="eval/loss") as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, state, manifest={}, metrics={"eval/loss": loss})
        checkpoints.wait()
        events = [event for event in checkpoints.poll() if isinstance(event, Committed)]
        deleted = [step for event in events for step in event.deleted]
        assert [info.step for info in checkpoints.steps()] == [2, 4, 5, 6]
    assert sorted(deleted) == [1, 3]
    assert list((tmp_path / ".trash").iterdir()) == []
    with Checkpointer(tmp_path, keep=1) as checkpoints:
        checkpoints.save(7, state, manifest={})
        checkpoints.wait()
        assert [info.step for info in checkpoints.steps()] == [7]


def test_a_failed_save_is_reported_and_the_next_one_works(tmp_path, monkeypatch):
    mesh = mesh_of(2, 2, 2)
    state = make_state(mesh)
    with Checkpointer(tmp_path, waits=()) as checkpoints:
        checkpoints.save(1, state, manifest=MANIFEST)
        checkpoints.wait()

        def full(*args, **kwargs):
            raise ValueError("RESOURCE_EXHAUSTED: Error writing: No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(orbax_module.ocp, "save", full)
            assert checkpoints.save(2, state, manifest=MANIFEST)
            checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(saving_module, "write_marker", full)
            assert checkpoints.save(3, state, manifest=MANIFEST)
            checkpoints.wait()
        first, second, third = checkpoints.poll()
        assert isinstance(first, Committed)
        for event, step in ((second, 2), (third, 3)):
            assert isinstance(event, SaveFailed)
            assert (event.step, event.newest) == (step, 1)
            assert "disk is full" in event.reason
            assert "\n" not in str(event)
        assert checkpoints.latest() == 1
        assert not (tmp_path / "3").exists(), "leavings of a failed save are deleted"
        assert checkpoints.save(3, state, manifest=MANIFEST)
        restored, _ = checkpoints.restore(None, abstract(state))
        assert checkpoints.latest() == 3
        assert_equal(restored, state)


def test_saving_a_step_twice_or_backwards(tmp_path):
    state = {"w": jnp.zeros(8)}
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(5, state, manifest={})
        assert checkpoints.save(5, state, manifest={}) is False
        checkpoints.save(9, state, manifest={})
        with pytest.raises(CheckpointError, match=r"behind the newest one \(9\)"):
            checkpoints.save(7, state, manifest={})
        assert checkpoints.rewind(5) == [9]
        assert checkpoints.save(7, state, manifest={})
        checkpoints.wait()
        assert [info.step for info in checkpoints.steps()] == [5, 7]
        assert (tmp_path / "old-9").is_dir()
        checkpoints.save(9, state, manifest={})
        checkpoints.wait()
        assert [info.step for info in checkpoints.steps()] == [5, 7, 9]
        assert not (tmp_path / "old-9").exists(), "a step as late as the abandoned one is saved again"
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoints.save(8, state, manifest={})


def test_unsavable_states_are_one_line_errors(tmp_path):
    with Checkpointer(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match="state w is a ndarray"):
            checkpoints.save(1, {"w": np.zeros(3)}, manifest={})
        with pytest.raises(CheckpointError, match="state k is a typed PRNG key"):
            checkpoints.save(1, {"k": jax.random.key(0)}, manifest={})
        with pytest.raises(CheckpointError, match="must be JSON-able"):
            checkpoints.save(1, {"w": jnp.zeros(3)}, manifest={"mesh": object()})
        with pytest.raises(CheckpointError, match="no usable checkpoint in"):
            checkpoints.restore(None, {})
        for step in (3, -1):
            with pytest.raises(CheckpointError, match=f"no checkpoint {step} in .*; it has none"):
                checkpoints.restore(step, {})
        assert checkpoints.poll() == []
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        read_manifest(tmp_path)


def test_a_second_writer_is_refused(tmp_path):
    with Checkpointer(tmp_path), pytest.raises(CheckpointError, match=f"being written by process {os.getpid()} on"):
        Checkpointer(tmp_path)
    with Checkpointer(tmp_path) as checkpoints:
        assert checkpoints.latest() is None


def test_opening_deletes_what_a_crash_left_and_nothing_else(tmp_path):
    save_steps(tmp_path, 10)
    shutil.copytree(tmp_path / "10", tmp_path / "20")
    (tmp_path / "20" / "jaxtrain.json").unlink()  # killed between data and marker
    shutil.copytree(tmp_path / "10", tmp_path / "30.orbax-checkpoint-tmp")
    shutil.copytree(tmp_path / "10", tmp_path / ".trash" / "5.123")
    shutil.copytree(tmp_path / "10", tmp_path / "bad-7")
    (tmp_path / "notes.txt").write_text("mine")
    assert CheckpointStore(tmp_path).latest() == 10
    with Checkpointer(tmp_path):
        pass
    assert sorted(os.listdir(tmp_path)) == [".lock", ".trash", "10", "bad-7", "notes.txt"]
    assert os.listdir(tmp_path / ".trash") == []


def test_the_marker_lists_every_file_and_tensor(tmp_path):
    save_steps(tmp_path, 10)
    content = json.loads((tmp_path / "10" / "jaxtrain.json").read_text())["content"]
    names = {str(path.relative_to(tmp_path / "10")) for path in files_of(tmp_path, 10)}
    assert set(content["files"]) == names - {"jaxtrain.json"}
    assert content["tensors"]["params/layers/w"] == [[3, 16, 8], "bfloat16"]
    assert content["tensors"]["opt_state/1/0/mu/embed"] == [[32, 16], "float32"]
