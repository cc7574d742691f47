"""Snapshots in the memory of two nodes: restored on any mesh, from either node."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.memory.checkpointer import MemoryCheckpointer
from jaxtrain.checkpoint.memory.client import PeerConfig
from jaxtrain.checkpoint.memory.protocol import SnapshotKey
from jaxtrain.checkpoint.memory.server import SnapshotServer

SPECS = {"w": ("a", "b"), "half": (None, ("a", "b")), "count": (), "whole": ()}


def mesh(*sizes: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices()[: sizes[0] * sizes[1]]).reshape(sizes)
    return jax.sharding.Mesh(devices, ("a", "b"))


def placed(on: jax.sharding.Mesh) -> dict:
    return {name: NamedSharding(on, PartitionSpec(*spec)) for name, spec in SPECS.items()}


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(16, 8)).astype(np.float32),
        "half": np.asarray(jnp.asarray(rng.normal(size=(3, 8)), jnp.bfloat16)),
        "count": np.asarray(7, np.int32),
        "whole": rng.integers(0, 2**32, (2, 5), np.uint32),
    }


def abstract(on: jax.sharding.Mesh) -> dict:
    return {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=placed(on)[name])
        for name, value in values().items()
    }


class Pair:
    """Snapshot servers of two nodes, and the worker of the first."""

    def __init__(self) -> None:
        self.servers = [SnapshotServer("127.0.0.1", "t", print) for _ in range(2)]
        self.messages: list[str] = []
        addresses = tuple(("127.0.0.1", server.port) for server in self.servers)
        self.config = PeerConfig(1, 4, "t", addresses)
        self.memory = self.new_memory()

    def new_memory(self) -> MemoryCheckpointer:
        return MemoryCheckpointer(self.config, self.messages.append)

    def save(self, *steps: int, on: jax.sharding.Mesh | None = None) -> None:
        for step in steps:
            state = jax.device_put(values(), placed(on or mesh(4, 2)))
            self.memory.snapshot(step, state, {"seen": step})
            self.memory.replicate()
        self.memory.wait()

    def damage(self, node: int, step: int, offset: int) -> None:
        self.servers[node].store.get(SnapshotKey(4, step, 0))[1][offset] ^= 1


@pytest.fixture
def pair():
    made = Pair()
    yield made
    for server in made.servers:
        server.close()


def equal(state: dict, on: jax.sharding.Mesh) -> bool:
    same = all(np.asarray(state[name]).tobytes() == value.tobytes() for name, value in values().items())
    return same and {name: leaf.sharding for name, leaf in state.items()} == placed(on)


@pytest.mark.parametrize("sizes", [(4, 2), (1, 1), (2, 4), (1, 8), (8, 1)])
def test_restores_bitwise_on_any_mesh(pair, sizes):
    pair.save(5)
    memory = pair.new_memory()
    source = memory.newest(after=4)
    assert (source.step, source.manifest) == (5, {"seen": 5})
    assert equal(memory.restore(source, abstract(mesh(*sizes))), mesh(*sizes))
    assert memory.newest(after=5) is None
    assert pair.messages == []


def test_state_may_be_donated_after_snapshot(pair):
    on = mesh(4, 2)
    state = jax.device_put(values(), placed(on))
    grow = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + leaf, s), donate_argnums=0)
    pair.memory.snapshot(1, state, {})
    for _ in range(20):
        state = grow(state)
    memory = pair.new_memory()
    assert memory.newest(after=-1) is None  # until it is replicated
    pair.memory.replicate()
    pair.memory.wait()
    assert equal(memory.restore(memory.newest(after=-1), abstract(on)), on)


def test_a_discarded_snapshot_is_never_replicated(pair):
    pair.save(5)
    pair.memory.snapshot(6, jax.device_put(values(), placed(mesh(4, 2))), {})
    pair.memory.discard_after(5)
    pair.memory.replicate()
    pair.memory.wait()
    assert pair.memory.newest(after=-1).step == 5


def test_one_node_is_enough_and_a_lost_one_is_reported(pair):
    pair.save(5, 6)
    pair.servers[0].close()
    memory = pair.new_memory()
    source = memory.newest(after=-1)
    assert equal(memory.restore(source, abstract(mesh(2, 2))), mesh(2, 2))
    assert pair.messages
    assert all("cannot be reached" in line for line in pair.messages)
    pair.messages.clear()
    pair.save(7)
    assert memory.newest(after=6).step == 7
    pair.save(8, 9)
    assert sum("not in the memory of two nodes" in line for line in pair.messages) == 1  # once, not for each step


def test_damaged_bytes_are_read_from_the_other_node(pair):
    pair.save(5)
    pair.damage(0, 5, 0)
    source = pair.memory.newest(after=-1)
    assert equal(pair.memory.restore(source, abstract(mesh(1, 2))), mesh(1, 2))
    pair.damage(1, 5, 0)
    assert pair.memory.restore(source, abstract(mesh(1, 2))) is None
    assert "step 5 in the memory of the nodes cannot be used: a piece of" in pair.messages[-1]
    assert "another checksum" in pair.messages[-1]


def test_an_incomplete_step_is_skipped(pair):
    pair.save(5, 6)
    for server in pair.servers:
        head, data = server.store.get(SnapshotKey(4, 6, 0))
        server.store.put(SnapshotKey(4, 6, 0), head | {"processes": 2}, data)
    assert pair.memory.newest(after=-1).step == 5
    pair.memory.discard_after(4)
    assert pair.memory.newest(after=-1) is None


def test_snapshots_of_different_models_are_refused(pair):
    pair.save(5)
    head, data = pair.servers[0].store.get(SnapshotKey(4, 5, 0))
    for server in pair.servers:
        server.store.put(SnapshotKey(4, 5, 0), head | {"processes": 2}, data)
        server.store.put(
            SnapshotKey(4, 5, 1), head | {"processes": 2, "tensors": head["tensors"] | {"more": [[], "int8"]}}, data
        )
    assert pair.memory.newest(after=-1) is None
    assert "its snapshots are of different models" in pair.messages[-1]


def test_a_state_of_another_model_is_refused(pair):
    pair.save(5)
    other = abstract(mesh(1, 1))
    other["w"] = jax.ShapeDtypeStruct((16, 9), np.float32, sharding=other["w"].sharding)
    assert pair.memory.restore(pair.memory.newest(after=-1), other) is None
    assert "w is float32[16, 8] in the checkpoint, float32[16, 9] here" in pair.messages[-1]
