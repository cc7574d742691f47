"""Mixture of experts: routing against loops in NumPy, transports against every expert on every token."""

from __future__ import annotations

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.kernels.moe import run_experts, token_dispatcher
from jaxtrain.kernels.moe.device_group import DeviceGroup
from jaxtrain.kernels.moe.grouped_matmul import grouped
from jaxtrain.kernels.moe.ragged_all_to_all import ExchangeSizes, exchange
from jaxtrain.kernels.moe.routing import Load, Routing, expert_capacity, route
from jaxtrain.losses.load_balancing import load_balance_loss, load_metrics, router_z_loss
from jaxtrain.nn.mlp import HIDDEN
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import Layout, infer_sizes
from jaxtrain.sharding.sharder import Sharder

B, T, E, K, D, F = 8, 16, 8, 2, 12, 8
RULES = {
    "batch": ("data", "fsdp", "expert"), "context": ("context",), "sequence": ("context", "model"),
    "embed": ("fsdp", "expert"), "mlp": ("model",), "expert": ("expert",),
}  # fmt: skip


def sharder(sizes: dict[str, int], rules=RULES) -> Sharder:
    count = math.prod(sizes.values())
    layout = Layout("test", infer_sizes(sizes, count), rules, {})
    return Sharder(make_mesh(layout, jax.devices()[:count]), rules)


def tokens(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Router logits that favour some experts, and which tokens are no padding."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, T, E)) + np.linspace(0, 1.5, E)
    is_token = np.arange(T) < rng.integers(3, T + 1, (B, 1))
    return logits.astype(np.float32), is_token


def route_by_loops(logits, bias, is_token, top_k, normalize, capacity, order):
    """Returns expert (E for a dropped choice), gate and rank of every choice, one token at a time."""
    expert, gate = np.full((B, T, top_k), E), np.zeros((B, T, top_k))
    for b, t in np.ndindex(B, T):
        p = np.exp(logits[b, t].astype(np.float64))
        p /= p.sum()
        best = sorted(range(E), key=lambda e: (-(p[e] + bias[e]), e))[:top_k]
        gate[b, t] = p[best] / (p[best].sum() if normalize else 1.0)
        if is_token[b, t]:
            expert[b, t] = best
    dropped = expert.copy()
    if capacity is not None:
        limit = min(T, math.ceil(capacity * T * top_k / E))
        for b in range(B):
            used = [0] * (E + 1)
            for k in range(top_k):
                for t in np.argsort(order[b]):
                    e = expert[b, t, k]
                    used[e] += 1
                    if used[e] > limit:
                        dropped[b, t, k] = E
    return expert, gate, dropped


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [1, 3])
def test_routing_equals_loops(top_k: int, capacity: float | None):
    logits, is_token = tokens()
    rng = np.random.default_rng(1)
    bias = rng.normal(size=E).astype(np.float32) * 0.2
    order = np.stack([rng.permutation(5 * T)[:T] for _ in range(B)]).astype(np.int32)
    normalize = top_k > 1
    run = jax.jit(
        lambda x: route(x, bias, is_token, top_k=top_k, normalize=normalize, capacity_factor=capacity, order_BT=order)
    )
    routing, load = run(logits)
    chosen, gate, expert = route_by_loops(logits, bias, is_token, top_k, normalize, capacity, order)
    np.testing.assert_array_equal(routing.expert_BTK, expert)
    np.testing.assert_allclose(np.where(is_token[..., None], routing.gate_BTK - gate, 0), 0, atol=1e-6)
    np.testing.assert_array_equal(load.chosen_E, np.bincount(chosen.ravel(), minlength=E + 1)[:E])
    assert float(load.placed) == (expert < E).sum()
    if capacity is None:
        assert routing.slot_BTK is None
        return
    assert (expert != chosen).sum() > 10  # choices were dropped
    slot = np.asarray(routing.slot_BTK)
    for b, e in np.ndindex(B, E):  # the slots of an expert are each used once, from the first on
        used = sorted(slot[b][expert[b] == e])
        assert used == list(range(len(used)))
        assert len(used) <= expert_capacity(T, E, top_k, capacity)


def test_without_a_bias_equal_logits_choose_the_first():
    routing, _ = route(jnp.zeros((1, 2, E)), None, jnp.ones((1, 2), bool), top_k=2, normalize=True)
    np.testing.assert_array_equal(routing.expert_BTK, [[[0, 1], [0, 1]]])
    np.testing.assert_allclose(routing.gate_BTK, 0.5)


def test_the_gradient_of_the_bias_is_the_excess_load_in_whole_numbers():
    logits, is_token = tokens()

    def loss(bias, x):
        routing, load = route(x, bias, is_token, top_k=K, normalize=True)
        return 1e-9 * jnp.sum(routing.gate_BTK**2), load.chosen_E

    gradient, chosen = jax.grad(loss, has_aux=True)(jnp.zeros(E), logits)
    np.testing.assert_array_equal(gradient, E * np.asarray(chosen) - np.sum(chosen))


def test_steps_against_the_gradient_of_the_bias_balance_the_load():
    logits, is_token = tokens()

    @jax.jit
    def step(bias):
        def loss(bias):
            routing, load = route(logits, bias, is_token, top_k=K, normalize=True)
            return jnp.sum(routing.gate_BTK), load_metrics(load.chosen_E[None], load.placed[None])["moe/load_max"]

        gradient, busiest = jax.grad(loss, has_aux=True)(bias)
        return bias - 1e-2 * jnp.sign(gradient), busiest

    bias, busiest = jnp.zeros(E), []
    for _ in range(60):
        bias, most = step(bias)
        busiest.append(float(most))
    assert busiest[0] > 1.5
    assert max(busiest[-10:]) < 1.25


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_documents_of_a_row_change_one_another_only_by_a_capacity(capacity):
    """All tokens of the first document choose one expert; the second document wants it too, or does not."""
    second = np.eye(E, dtype=np.float32)[[0, 1, 0, 2] * 3]
    rows = [np.concatenate([np.eye(E, dtype=np.float32)[[expert] * 12], second]) for expert in (0, 3)]
    routing, _ = route(
        jnp.asarray(rows) * 9.0, None, jnp.ones((2, 24), bool), top_k=1, normalize=True, capacity_factor=capacity
    )
    first, other = np.asarray(routing.expert_BTK)[:, 12:]
    assert np.array_equal(first, other) == (capacity is None)


def test_losses_and_metrics_equal_their_formulas():
    logits, is_token = tokens()
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    p, z = p[is_token], np.log(np.exp(logits.astype(np.float64)).sum(-1))[is_token]
    _, load = route(jnp.asarray(logits), None, is_token, top_k=1, normalize=False)
    both: Load = jax.tree.map(lambda a: jnp.stack([a, a]), load)  # two equal layers
    share = np.bincount(p.argmax(-1), minlength=E) / len(p)
    np.testing.assert_allclose(
        load_balance_loss(both, both.chosen_E, 2) / len(p), E * (share * p.mean(0)).sum(), rtol=1e-5
    )
    np.testing.assert_allclose(router_z_loss(both, 2) / len(p), (z**2).mean(), rtol=1e-5)
    metrics = load_metrics(jnp.array([[3.0, 1.0], [2.0, 2.0]]), jnp.array([3.0, 4.0]))
    assert {name: float(value) for name, value in metrics.items()} == {
        "moe/load_max": 1.5, "moe/load_min": 0.5, "moe/dropped": 0.125,
    }  # fmt: skip
    assert all(np.isfinite(v) for v in load_metrics(jnp.zeros((2, E)), jnp.zeros(2)).values())


def operands(activation: str = "swiglu"):
    rng = np.random.default_rng(2)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    inner = tuple(draw(E, D, F) for _ in range(1 if activation == "gelu" else 2))
    return draw(B, T, D), (inner, draw(E, F, D))


def all_experts(x, logits, weights, capacity, hidden):
    """Computes every expert on every token, weighted by the gates of the choices that were not dropped."""
    routing, _ = route(logits, None, jnp.asarray(tokens()[1]), top_k=K, normalize=True, capacity_factor=capacity)
    inner, down = weights
    y = jnp.einsum("ebtf,efd->ebtd", hidden(*(jnp.einsum("btd,edf->ebtf", x, w) for w in inner)), down)
    return jnp.einsum("ebtd,btke,btk->btd", y, jax.nn.one_hot(routing.expert_BTK, E), routing.gate_BTK)


def dispatched(x, logits, weights, capacity, hidden, place: Sharder):
    routing, _ = route(
        logits, None, jnp.asarray(tokens()[1]), top_k=K, normalize=True, capacity_factor=capacity, sharder=place
    )
    slots = None if capacity is None else expert_capacity(T, E, K, capacity)
    return run_experts(x, routing, weights, hidden=hidden, capacity=slots, sharder=place)


def gradients(run, x, weights):
    """Returns the output, and gradients of x, router logits and weights, of a sum with distinct weights."""
    probe = jnp.cos(jnp.arange(B * T * D, dtype=jnp.float32)).reshape(B, T, D)

    def loss(x, logits, weights):
        y = run(x, logits, weights)
        return jnp.sum(y * probe), y

    grads, y = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(x, jnp.asarray(tokens()[0]), weights)
    return y, grads


@functools.cache
def expected(capacity: float | None, activation: str = "swiglu"):
    x, weights = operands(activation)
    run = lambda x, logits, weights: all_experts(x, logits, weights, capacity, HIDDEN[activation])  # noqa: E731
    return gradients(run, x, weights)


def close(actual, wanted) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(actual), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(a), jax.tree_util.keystr(path)


MESHES = {
    "one": None,
    "expert8": {"expert": 8},
    "data2_expert4": {"data": 2, "expert": 4},
    "fsdp2_expert2_model2": {"fsdp": 2, "expert": 2, "model": 2},
    "expert2_context2_model2": {"expert": 2, "context": 2, "model": 2},
    "expert2_model4": {"expert": 2, "model": 4},
    "fsdp2_model4": {"fsdp": 2, "model": 4},
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("capacity", [None, 1.0], ids=["dropless", "capacity"])
@pytest.mark.parametrize("mesh", MESHES)
def test_dispatch_equals_every_expert_on_every_token(mesh: str, capacity: float | None):
    place = Sharder() if MESHES[mesh] is None else sharder(MESHES[mesh])
    x, weights = operands()
    run = lambda x, logits, weights: dispatched(x, logits, weights, capacity, HIDDEN["swiglu"], place)  # noqa: E731
    close(gradients(run, x, weights), expected(capacity))


def test_dropless_experts_send_only_routed_rows(monkeypatch):
    """Each choice is sent over `expert` and back once, and to the three other devices that shard its expert's width and
    back; no padding of the buffers is sent."""
    sent = collections.Counter()

    def counted(devices, native, rows, x, forward, inverse):
        jax.debug.callback(lambda size: sent.update({devices.axes: int(size)}), forward.send_size.sum())
        return exchange(devices, native, rows, x, forward, inverse)

    monkeypatch.setattr(token_dispatcher, "exchange", counted)
    logits, is_token = tokens()
    x, weights = operands()
    place = sharder({"expert": 2, "model": 4})
    jax.jit(lambda x: dispatched(x, logits, weights, None, HIDDEN["swiglu"], place))(x)
    jax.effects_barrier()
    choices = int(is_token.sum()) * K
    assert sent == {("expert",): 2 * choices, ("model",): 2 * 3 * choices}


@pytest.mark.parametrize("capacity", [None, 1.0], ids=["dropless", "capacity"])
def test_without_sequence_parallelism_or_gates(capacity: float | None):
    """The residual stream replicated over `model`; GELU has one inner matrix."""
    place = sharder({"expert": 4, "model": 2}, {k: v for k, v in RULES.items() if k != "sequence"})
    x, weights = operands("gelu")
    run = lambda x, logits, weights: dispatched(x, logits, weights, capacity, HIDDEN["gelu"], place)  # noqa: E731
    close(gradients(run, x, weights), expected(capacity, "gelu"))


@pytest.mark.parametrize("length", [T, T - 1])
@pytest.mark.parametrize("mesh", ["data2_expert4", "fsdp2_expert2_model2"])
def test_all_tokens_on_one_expert_fit(mesh: str, length: int):
    """Tests the worst case of the dropless buffers, and a length that `model` does not divide."""
    place = sharder(MESHES[mesh], {k: v for k, v in RULES.items() if k != "sequence"})
    x, weights = operands()
    x = x[:, :length]
    routing = Routing(jnp.full((B, length, 1), E - 1), jnp.ones((B, length, 1)), None)
    run = jax.jit(lambda x: run_experts(x, routing, weights, hidden=HIDDEN["swiglu"], capacity=None, sharder=place))
    (gate, up), down = weights
    wanted = HIDDEN["swiglu"](x @ gate[-1], x @ up[-1]) @ down[-1]
    np.testing.assert_allclose(run(x), wanted, rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda x: run(x).sum()))(x)
    wanted = jax.grad(lambda x: (HIDDEN["swiglu"](x @ gate[-1], x @ up[-1]) @ down[-1]).sum())(x)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_grouped_matmuls_skip_empty_blocks():
    """Three groups, one of them empty; rows between the groups are zeros and stay so."""
    rng = np.random.default_rng(0)
    start, size = np.array([0, 8, 8]), np.array([5, 0, 9])
    x = np.zeros((24, D), np.float32)
    for s, n in zip(start, size):
        x[s : s + n] = rng.normal(size=(n, D))
    _, ((gate, up), down) = operands()
    weights = ((gate[:3], up[:3]), down[:3])
    run = functools.partial(grouped, HIDDEN["swiglu"], 4)
    actual, pull = jax.vjp(lambda x, w: run(x, w, jnp.asarray(start), jnp.asarray(size)), jnp.asarray(x), weights)

    def one_by_one(x, weights):
        (gate, up), down = weights
        y = jnp.zeros_like(x)
        for g in range(3):
            rows = slice(start[g], start[g] + size[g])
            y = y.at[rows].set(HIDDEN["swiglu"](x[rows] @ gate[g], x[rows] @ up[g]) @ down[g])
        return y

    wanted, pull_want = jax.vjp(one_by_one, jnp.asarray(x), weights)
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-5)
    close(pull(jnp.where(wanted != 0, 1.5, 0.0)), pull_want(jnp.where(wanted != 0, 1.5, 0.0)))


def exchange_sizes(count: np.ndarray) -> tuple[ExchangeSizes, ExchangeSizes]:
    """Returns the tables of all devices for `count` [sender, receiver, run] rows, received by (run, sender)."""
    N, _, M = count.shape
    begin = count.reshape(N, -1).cumsum(1).reshape(count.shape) - count
    by_run = count.transpose(1, 2, 0)  # receiver, run, sender
    output = (by_run.reshape(N, -1).cumsum(1).reshape(by_run.shape) - by_run).transpose(2, 0, 1)
    swap = lambda a: a.transpose(1, 0, 2)  # noqa: E731
    flat = lambda *tables: ExchangeSizes(*(jnp.asarray(t.reshape(N, N * M), jnp.int32) for t in tables))  # noqa: E731
    return flat(begin, count, output, swap(count)), flat(swap(output), swap(count), swap(begin), count)


def exchanger(place: Sharder, native: bool, rows: int):
    P = jax.sharding.PartitionSpec("expert")

    def local(x, *runs):
        forward, inverse = (ExchangeSizes(*(table[0] for table in half)) for half in (runs[:4], runs[4:]))
        return exchange(DeviceGroup.of(place, "expert"), native, rows, x, forward, inverse)

    return jax.shard_map(local, mesh=place.mesh, in_specs=P, out_specs=P, check_vma=False)


def test_exchange_moves_runs_and_its_gradient_moves_them_back():
    place, rng = sharder({"expert": 4}), np.random.default_rng(0)
    count = rng.integers(0, 4, (4, 4, 2))
    count[1] = 0  # sends nothing
    count[:, 2] = 0  # receives nothing
    forward, inverse = exchange_sizes(count)
    sent, received = 20, 24
    x = rng.normal(size=(4, sent, 3)).astype(np.float32)
    wanted, begin, output = (
        np.zeros((4, received, 3)),
        np.asarray(forward.input_offset),
        np.asarray(forward.output_offset),
    )
    for s, r, m in np.ndindex(count.shape):
        n, b, at = count[s, r, m], begin[s, 2 * r + m], output[s, 2 * r + m]
        wanted[r, at : at + n] = x[s, b : b + n]
    run = exchanger(place, False, received)
    actual, pull = jax.vjp(jax.jit(lambda x: run(x, *forward, *inverse)), jnp.asarray(x.reshape(-1, 3)))
    np.testing.assert_array_equal(np.asarray(actual).reshape(wanted.shape), wanted)
    g = rng.normal(size=wanted.shape)
    (gradient,) = pull(jnp.asarray(g.reshape(-1, 3), jnp.float32))
    np.testing.assert_allclose(np.sum(gradient * x.reshape(-1, 3)), np.sum(g * wanted), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(gradient != 0).reshape(4, sent, 3)[..., 0].sum(1), count.sum((1, 2)))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_native_exchange_lowers_for_accelerators(platform: str):
    place = sharder({"expert": 4})
    forward, inverse = exchange_sizes(np.ones((4, 4, 2), int))
    run = exchanger(place, True, 8)
    step = jax.jit(jax.grad(lambda x: run(x, *forward, *inverse).sum()))
    text = step.trace(jnp.ones((32, 3))).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") >= 1
