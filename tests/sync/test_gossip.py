"""Gossip: the mean of the replicas stays, they agree at the rate of the graph, and push-sum where it is needed.

Whole runs are compared with steps of single replicas on one device and products with the mixing matrix in NumPy.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tiny_net import LAYOUTS, replicas, run

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.sync.gossip.graphs import messages_of, mixing_matrix, round_number, rounds
from jaxtrain.sync.gossip.strategy import Gossip
from jaxtrain.sync.strategy import Replicas

# Replica 0 hears of all others through one path alone, and some send to three, others to one.
IRREGULAR = ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 4), (4, 0), (2, 0))
RNG = np.random.default_rng(0)
SEEDED = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def same_values() -> None:
    """Draws of a test do not depend on which tests ran before it in the same process."""
    RNG.bit_generator.state = SEEDED


def gossip(count: int, **options: Any) -> Gossip:
    mesh = Mesh(np.array(jax.devices()[:count]), ("replica",))
    return Gossip(SyncConfig(strategy="gossip", gossip=options), count, mesh)


@partial(jax.jit, static_argnums=(0, 4))
def exchange(strategy: Gossip, own: Any, tree: Any, weights: jax.Array, kind: Any) -> Any:
    return strategy.exchange(own, Replicas(tree, weights), kind)


def exchanges(strategy: Gossip, x: np.ndarray, count: int) -> list[np.ndarray]:
    """What the replicas hold at the begin and after each of so many exchanges without steps between them."""
    n = strategy.replicas
    over_replicas = NamedSharding(strategy.replica_mesh, PartitionSpec("replica"))
    tree = {"w": jax.device_put(jnp.asarray(x, jnp.float32), over_replicas)}
    own, found = strategy.init({"w": jnp.zeros(x.shape[1:])}), [x]
    if own:
        own["biased"] = {"w": jnp.asarray(x, jnp.float32)}
    weights, every = jnp.full(n, 1 / n), strategy.config.every
    for number in range(count):
        kind = strategy.plan((number + 1) * every - 1).exchange
        own, tree = exchange(strategy, own, tree, weights, kind)
        found.append(np.asarray(tree["w"]))
        if "weight" in own:
            assert float(own["weight"].sum()) == pytest.approx(n, rel=1e-5)
    return found


@pytest.mark.parametrize("graph", ["ring", "exponential", "matching"])
@pytest.mark.parametrize("count", [2, 4, 5, 8])
def test_the_mean_stays(graph: str, count: int) -> None:
    x = RNG.normal(size=(count, 3, 2))
    for after in exchanges(gossip(count, graph=graph), x, 6):
        np.testing.assert_allclose(after.mean(0), x.mean(0), atol=1e-6)


@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_ring_agrees_at_the_rate_of_its_second_eigenvalue(count: int) -> None:
    """1/3 + 2/3 cos(2 pi / n), from its eigenvector."""
    rate = 1 / 3 + 2 / 3 * np.cos(2 * np.pi / count)
    x = np.cos(2 * np.pi * np.arange(count) / count)[:, None] * np.ones((1, 4))
    found = exchanges(gossip(count, graph="ring"), x, 4)
    for before, after in pairwise(found):
        np.testing.assert_allclose(after, rate * before, atol=1e-6)
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(mixing_matrix(messages_of("ring", count), count))))
    assert eigenvalues[-2] == pytest.approx(rate, abs=1e-6)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_exponential_graph_agrees_exactly_after_log2_rounds(count: int) -> None:
    x = RNG.integers(-8, 8, size=(count, 3)).astype(float)  # whose halves are exact
    found = exchanges(gossip(count, graph="exponential"), x, int(np.log2(count)))
    np.testing.assert_array_equal(found[-1], np.broadcast_to(x.mean(0), x.shape))
    assert np.abs(found[-2] - x.mean(0)).max() > 0


@pytest.mark.parametrize("count", [4, 8])
def test_matchings_agree_in_expectation_at_the_second_eigenvalue_of_their_mean(count: int) -> None:
    """E ||W x||^2 = x' E[W'W] x over the equally likely rounds, and W'W = W: a rate of 1/2 - 1/(2 (n - 1))."""
    matrices = [mixing_matrix(messages_of("matching", count, r), count) for r in range(rounds("matching", count))]
    met = sum((matrix > 0).astype(int) for matrix in matrices) - len(matrices) * np.eye(count, dtype=int)
    np.testing.assert_array_equal(met, 1 - np.eye(count, dtype=int))  # every pair once
    x = RNG.normal(size=count)
    x -= x.mean()
    expected = np.mean([np.sum((matrix @ x) ** 2) for matrix in matrices])
    assert expected == pytest.approx((0.5 - 0.5 / (count - 1)) * np.sum(x**2))
    drawn = np.bincount([round_number("matching", count, number, 3) for number in range(7000)])
    np.testing.assert_allclose(drawn, 7000 / len(matrices), rtol=0.15)


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_push_sum_finds_the_mean_on_an_irregular_graph_with_lost_messages(drop: float) -> None:
    x = RNG.normal(size=(5, 3)).astype(np.float32)
    found = exchanges(gossip(5, graph="directed", edges=IRREGULAR, drop=drop), x, 200)
    np.testing.assert_allclose(found[-1], np.broadcast_to(x.mean(0), x.shape), atol=1e-5)
    matrix = mixing_matrix(messages_of("directed", 5, edges=IRREGULAR), 5)
    np.testing.assert_allclose(matrix.sum(0), 1)
    biased = np.linalg.matrix_power(matrix, 500) @ x  # without the weights replicas agree on nothing
    assert np.abs(biased - x.mean(0)).max() > 0.02


def test_messages_are_lost_as_often_as_asked_and_make_the_weights_move_on_a_ring() -> None:
    strategy = gossip(4, graph="ring", drop=0.3)
    x = RNG.normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_allclose(exchanges(strategy, x, 150)[-1], np.broadcast_to(x.mean(0), x.shape), atol=1e-5)
    parts = messages_of("ring", 4)
    arrived = np.mean([strategy._received(jnp.int32(number), parts) for number in range(500)])
    assert arrived == pytest.approx(0.7, abs=0.03)


def gossip_of_single_replicas(count: int, graph: str, steps: int, every: int) -> np.ndarray:
    """The matrix `a` of all replicas after steps on one device each, mixed in NumPy: [replicas, ...]."""
    alone = tiny_net.program({}, data={"global_batch": tiny_net.ROWS // count})
    states = [jax.device_get(alone.init()) for _ in range(count)]
    for step in range(steps):
        batch = tiny_net.rows(step)
        size = tiny_net.ROWS // count
        for i in range(count):
            part = {name: value[i * size : (i + 1) * size] for name, value in batch.items()}
            states[i] = jax.device_get(alone.step(jax.device_put(states[i]), part)[0])
        if (step + 1) % every == 0:
            number = round_number(graph, count, (step + 1) // every - 1, 0)
            matrix = mixing_matrix(messages_of(graph, count, number, IRREGULAR), count)
            for name in ("a", "b"):
                mixed = np.einsum("rs,s...->r...", matrix, np.stack([s["params"][name] for s in states]))
                for state, value in zip(states, mixed):
                    state["params"][name] = value.astype(np.float32)
    return np.stack([state["params"]["a"] for state in states])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", ["ring", "exponential", "matching"])
def test_a_run_is_that_of_single_replicas_and_their_mixing_matrix(layout: str, graph: str) -> None:
    sync = {"strategy": "gossip", "every": 2, "gossip": {"graph": graph}}
    state, history = run(replicas(4, layout, sync=sync), 6)
    expected = gossip_of_single_replicas(4, graph, 6, 2)
    np.testing.assert_allclose(state["params"]["a"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history[-1]["agreed"]["a"], expected.mean(0), rtol=1e-5, atol=1e-6)
    assert history[-1]["metrics"]["mixing_distance"] > 0
    assert "mixing_distance" not in history[-2]["metrics"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_of_push_sum_keeps_its_mass_and_trains(layout: str) -> None:
    edges = ((0, 1), (1, 2), (2, 3), (3, 0), (0, 2))
    sync = {"strategy": "gossip", "every": 1, "gossip": {"graph": "directed", "edges": edges, "drop": 0.2}}
    state, history = run(replicas(4, layout, sync=sync), 12)
    own = state["sync"]["own"]
    assert float(own["weight"].sum()) == pytest.approx(4, rel=1e-6)
    assert np.abs(np.asarray(own["weight"]) - 1).max() > 0.1
    biased, weight = np.asarray(own["biased"]["a"]), np.asarray(own["weight"])
    np.testing.assert_allclose(state["params"]["a"], biased / weight[:, None, None], rtol=1e-5)
    np.testing.assert_allclose(history[-1]["agreed"]["a"], biased.sum(0) / 4, rtol=1e-5, atol=1e-6)
    assert history[-1]["metrics"]["loss"] < history[0]["metrics"]["loss"]


@pytest.mark.parametrize("options", [{"graph": "ring"}, {"graph": "directed", "edges": IRREGULAR}])
def test_a_replica_that_is_not_finite_is_left_out_and_continues_from_the_others(options: dict[str, Any]) -> None:
    x = np.ones((5, 3), np.float32)
    strategy = gossip(5, **options)
    own = strategy.init({"w": jnp.ones(3)})
    tree = {"w": jnp.asarray(x).at[2].set(jnp.nan)}
    weights = jnp.array([0.25, 0.25, 0.0, 0.25, 0.25])
    _, new = exchange(strategy, own, tree, weights, 0)
    np.testing.assert_allclose(new["w"], x, rtol=1e-6)
    np.testing.assert_allclose(strategy.agreed(own, Replicas(tree, weights))["w"], x[0], rtol=1e-6)


@pytest.mark.parametrize(("graph", "messages"), [("ring", 2), ("exponential", 1), ("matching", 1)])
def test_an_exchange_sends_what_the_formula_says_and_reduces_no_parameters(graph: str, messages: int) -> None:
    program = replicas(4, "fsdp", sync={"strategy": "gossip", "every": 1, "gossip": {"graph": graph}})
    synchronizer = program.synchronizer
    compiled = synchronizer._exchange_program(0).lower(program.state).compile()
    found = count_collectives(compiled.as_text(), program.sharder.mesh.shape)
    size = 4 * 2 * tiny_net.WIDTH * tiny_net.HIDDEN
    assert {c.axes for c in found if c.op == "collective-permute"} == {("replica",)}
    sent = sum(c.bytes for c in found if c.op == "collective-permute")
    assert synchronizer.sent_bytes(0) == messages * (size + 4)
    assert sent == messages * (size // 2 + 4)  # each of the two devices of a replica sends its shards
    assert all(c.bytes <= 64 for c in found if c.op != "collective-permute")


@pytest.mark.parametrize(
    ("edges", "said"),
    [
        (((0, 1), (1, 0), (2, 0)), "nothing of replica 0 reaches replica 2"),
        (((0, 1), (1, 5)), r"\(1, 5\) is no edge between two of 3 replicas; expected numbers from 0 to 2"),
        (((0, 1), (0, 1)), "an edge is there twice"),
    ],
)
def test_a_graph_that_cannot_agree_is_refused_in_one_line(edges: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        gossip(3, graph="directed", edges=edges)
    assert "\n" not in str(error.value)
