"""A state goes to the memory of two nodes and comes back, on any mesh, from whichever is left."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.memory.checkpointer import Keeper
from jaxtrain.checkpoint.memory.client import Nodes
from jaxtrain.checkpoint.memory.format import Key
from jaxtrain.checkpoint.memory.server import StockServer

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
    """Two nodes, and a worker of the first."""

    def __init__(self) -> None:
        self.servers, self.said = [StockServer("127.0.0.1"), StockServer("127.0.0.1")], []
        for server in self.servers:
            server.token = "t"
        stocks = tuple(("127.0.0.1", server.port) for server in self.servers)
        self.nodes = Nodes(1, 4, "t", stocks)
        self.keeper = self.again()

    def again(self) -> Keeper:
        return Keeper(self.nodes, self.said.append)

    def keep(self, *steps: int, on: jax.sharding.Mesh | None = None) -> None:
        for step in steps:
            state = jax.device_put(values(), placed(on or mesh(4, 2)))
            self.keeper.keep(step, state, {"seen": step})
            self.keeper.share()
        self.keeper.wait()

    def spoil(self, node: int, step: int, offset: int) -> None:
        self.servers[node].stock.part(Key(4, step, 0))[1][offset] ^= 1


@pytest.fixture
def pair():
    made = Pair()
    yield made
    for server in made.servers:
        server.close()


def equal(state: dict, on: jax.sharding.Mesh) -> bool:
    same = all(np.asarray(state[name]).tobytes() == value.tobytes() for name, value in values().items())
    return same and {name: leaf.sharding for name, leaf in state.items()} == placed(on)


@pytest.mark.parametrize("there", [(4, 2), (1, 1), (2, 4), (1, 8), (8, 1)])
def test_it_comes_back_bitwise_on_any_mesh(pair, there):
    pair.keep(5)
    keeper = pair.again()
    found = keeper.newest(after=4)
    assert (found.step, found.manifest) == (5, {"seen": 5})
    assert equal(keeper.restore(found, abstract(mesh(*there))), mesh(*there))
    assert keeper.newest(after=5) is None
    assert pair.said == []


def test_the_state_may_be_donated_at_once(pair):
    on = mesh(4, 2)
    state = jax.device_put(values(), placed(on))
    grow = jax.jit(lambda s: jax.tree.map(lambda leaf: leaf + leaf, s), donate_argnums=0)
    pair.keeper.keep(1, state, {})
    for _ in range(20):
        state = grow(state)
    keeper = pair.again()
    assert keeper.newest(after=-1) is None  # until it is shared
    pair.keeper.share()
    pair.keeper.wait()
    assert equal(keeper.restore(keeper.newest(after=-1), abstract(on)), on)


def test_what_was_forgotten_before_it_was_shared_is_never_found(pair):
    pair.keep(5)
    pair.keeper.keep(6, jax.device_put(values(), placed(mesh(4, 2))), {})
    pair.keeper.forget(5)
    pair.keeper.share()
    pair.keeper.wait()
    assert pair.keeper.newest(after=-1).step == 5


def test_one_node_is_enough_and_one_that_is_gone_is_said(pair):
    pair.keep(5, 6)
    pair.servers[0].close()
    keeper = pair.again()
    found = keeper.newest(after=-1)
    assert equal(keeper.restore(found, abstract(mesh(2, 2))), mesh(2, 2))
    assert pair.said
    assert all("is not reached" in line for line in pair.said)
    pair.said.clear()
    pair.keep(7)
    assert keeper.newest(after=6).step == 7
    pair.keep(8, 9)
    assert sum("not in the memory of two nodes" in line for line in pair.said) == 1  # once, not for each step


def test_bytes_that_changed_are_read_from_the_other_node_and_never_used(pair):
    pair.keep(5)
    pair.spoil(0, 5, 0)
    found = pair.keeper.newest(after=-1)
    assert equal(pair.keeper.restore(found, abstract(mesh(1, 2))), mesh(1, 2))
    pair.spoil(1, 5, 0)
    assert pair.keeper.restore(found, abstract(mesh(1, 2))) is None
    assert "step 5 in the memory of the nodes cannot be used: a piece of" in pair.said[-1]
    assert "another checksum" in pair.said[-1]


def test_a_step_that_is_not_whole_is_passed_over(pair):
    pair.keep(5, 6)
    for server in pair.servers:
        head, data = server.stock.part(Key(4, 6, 0))
        server.stock.put(Key(4, 6, 0), head | {"processes": 2}, data)
    assert pair.keeper.newest(after=-1).step == 5
    pair.keeper.forget(4)
    assert pair.keeper.newest(after=-1) is None


def test_parts_of_different_models_are_not_put_together(pair):
    pair.keep(5)
    head, data = pair.servers[0].stock.part(Key(4, 5, 0))
    for server in pair.servers:
        server.stock.put(Key(4, 5, 0), head | {"processes": 2}, data)
        server.stock.put(
            Key(4, 5, 1), head | {"processes": 2, "tensors": head["tensors"] | {"more": [[], "int8"]}}, data
        )
    assert pair.keeper.newest(after=-1) is None
    assert "its parts are of different models" in pair.said[-1]


def test_a_state_of_another_model_does_not_fit(pair):
    pair.keep(5)
    other = abstract(mesh(1, 1))
    other["w"] = jax.ShapeDtypeStruct((16, 9), np.float32, sharding=other["w"].sharding)
    assert pair.keeper.restore(pair.keeper.newest(after=-1), other) is None
    assert "w is float32[16, 8] in the checkpoint, float32[16, 9] here" in pair.said[-1]
