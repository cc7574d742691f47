"""Silent corruption is found: a bit of one replica, and a step that does not repeat itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from faults import debug
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.api import trainer as trainer_api
from jaxtrain.callbacks.health.bit_digest import bit_sum, device_digests, differing_replicas
from jaxtrain.errors import CorruptionError


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "bool"])
def test_every_bit_counts(dtype):
    rng = np.random.default_rng(0)
    size = np.dtype(jnp.dtype(dtype)).itemsize
    raw = rng.integers(0, 256, (15, size), np.uint8)
    raw = raw & 1 if dtype == "bool" else raw
    sum_of = jax.jit(bit_sum)
    seen = {int(sum_of(jnp.asarray(raw.reshape(-1).view(jnp.dtype(dtype)).reshape(3, 5))))}
    for byte in range(15 * size):
        for bit in range(1) if dtype == "bool" else (0, 3, 7):
            wrong = raw.copy()
            wrong.reshape(-1)[byte] ^= 1 << bit
            found = int(sum_of(jnp.asarray(wrong.reshape(-1).view(jnp.dtype(dtype)).reshape(3, 5))))
            assert found not in seen
    swapped = raw[::-1].copy().reshape(-1).view(jnp.dtype(dtype)).reshape(3, 5)
    assert int(sum_of(jnp.asarray(swapped))) not in seen


def with_flipped(array: jax.Array, place: int, bit: int = 0) -> jax.Array:
    """One bit of the first byte that the device at `place` holds, wrong."""
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[place].reshape(-1).view(np.uint8)[0] ^= 1 << bit
    placed = [jax.device_put(x, shard.device) for x, shard in zip(shards, array.addressable_shards)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize(("spec", "device", "named"), [
    (PartitionSpec(), 5, [5]), (PartitionSpec("data"), 6, [6]), (PartitionSpec("fsdp"), 3, [3, 7]),
    (PartitionSpec(("data", "fsdp")), 2, []),
])  # fmt: skip
def test_the_replica_that_differs_is_named(mesh, spec, device, named):
    """By most of its replicas; of two both; where there is one only nothing can be compared."""
    placed = NamedSharding(mesh, spec)
    tree = {"a": jax.device_put(np.arange(16.0, dtype=np.float32), placed), "b": jax.device_put(np.ones(8), placed)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    sums = device_digests(abstract, mesh)
    assert differing_replicas(np.asarray(sums(tree)), abstract, mesh) == []
    wrong = {**tree, "a": with_flipped(tree["a"], device)}
    found = differing_replicas(np.asarray(sums(wrong)), abstract, mesh)
    assert found == ([("a", named)] if named else [])
    assert (np.asarray(sums(wrong)) != np.asarray(sums(tree))).any(axis=1).tolist() == [i == device for i in range(8)]


def test_a_flipped_bit_ends_the_run_and_the_last_good_checkpoint_is_gone_on_from(tmp_path):
    whole = tiny.config(tmp_path, name="whole", steps=16, checkpoint={"every": 3})
    tiny.train(whole)
    config = tiny.config(
        tmp_path, steps=16, checkpoint={"every": 3}, guard={"replica_check_every": 4}, debug=debug("flip@7")
    )
    text = (
        r"silent corruption at step 7: params/\w, compared with its replicas, differs on device 7 \(cpu, process 0 on "
    )
    with pytest.raises(CorruptionError, match=text + r".*; checkpoint 6 is the last good one$") as error:
        tiny.train(config)
    assert "\n" not in str(error.value)
    (event,) = tiny.events(config.run_dir, "corruption")
    assert event["found_by"] == "replicas"
    assert event["devices"].startswith("device 7")
    assert tiny.saved(config.run_dir) == [3, 6]
    tiny.train(config, resume=True)
    assert tiny.losses(config.run_dir) == tiny.losses(whole.run_dir)


def test_no_wrong_bit_is_saved(tmp_path):
    config = tiny.config(tmp_path, checkpoint={"every": 4}, guard={"replica_check_every": 100}, debug=debug("flip@8"))
    with pytest.raises(CorruptionError, match=r"at step 8: .*; checkpoint 4 is the last good one"):
        tiny.train(config)
    assert tiny.saved(config.run_dir) == [4]


def test_a_step_that_does_not_repeat_itself_ends_the_run(tmp_path, monkeypatch):
    real = trainer_api.open_trainer
    calls = []

    def opened(config, directory, **options):
        run, state, done = real(config, directory, **options)
        step = run.program.step

        def wrong(state, batch):
            calls.append(1)
            state, metrics = step(state, batch)
            if len(calls) == 7:  # the second of the sixth step
                state = {**state, "params": {**state["params"], "w": with_flipped(state["params"]["w"], 2, 6)}}
            return state, metrics

        run.program = dataclasses.replace(run.program, step=wrong)
        return run, state, done

    monkeypatch.setattr(trainer_api, "open_trainer", opened)
    config = tiny.config(tmp_path, guard={"replica_check_every": 6})
    text = r"at step 6: params/w, computed twice, differs on device 2 \(cpu, process 0 on .*; checkpoint 4 is the last"
    with pytest.raises(CorruptionError, match=text):
        tiny.train(config)


def test_a_checked_run_is_the_same_run(tmp_path):
    plain = tiny.config(tmp_path, name="plain")
    checked = tiny.config(tmp_path, name="checked", guard={"replica_check_every": 2})
    assert tiny.losses(tiny.train(checked).run_dir) == tiny.losses(tiny.train(plain).run_dir)
