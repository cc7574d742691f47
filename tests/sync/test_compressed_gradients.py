"""Gradients that travel compressed under bsp: nothing is lost, exact limits, bytes of the program, skipped steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from flax import nnx
from selection import one_in
from tiny_net import LAYOUTS, OVER_DATA, WIDTH, replicas, run

from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.sync import quantized_mean as q
from jaxtrain.sync.compression import power_sgd
from jaxtrain.sync.replica_dim import stacked_sharding

EMBED, MLP, LAYERS = 32, 48, 2
KINDS: dict[str, dict[str, Any]] = {
    "int8": {}, "fp8": {}, "int4": {}, "int2": {}, "powersgd": {"rank": 2}, "topk": {"share": 0.05},
}  # fmt: skip
ALL_LAYOUTS = [*LAYOUTS, *OVER_DATA]
PLACES = [*itertools.product([2, 4], LAYOUTS), (2, "data_tp"), (4, "data_fsdp"), (4, "zero1")]
kinds = pytest.mark.parametrize("kind", KINDS)


class Stacked(nnx.Module):
    """Two residual layers in one tensor each, between two small matrices."""

    rows_are_independent = True

    def __init__(self, *, env: Any, rngs: Any) -> None:
        self.env = env
        self.first = env.param(rngs, ("features", "embed"), (WIDTH, EMBED), tiny_net.normal)
        self.up = env.param(rngs, ("layers", "embed", "mlp"), (LAYERS, EMBED, MLP), tiny_net.normal)
        self.down = env.param(rngs, ("layers", "mlp", "embed"), (LAYERS, MLP, EMBED), tiny_net.normal)
        self.last = env.param(rngs, ("embed", "features"), (EMBED, WIDTH), tiny_net.normal)

    def loss(self, batch: Any, key: Any) -> Any:
        h = batch["x"] @ self.env.weight(self.first)
        up, down = self.env.weight(self.up), self.env.weight(self.down)
        for layer in range(LAYERS):
            h = h + jnp.tanh(h @ up[layer]) @ down[layer] / EMBED
        error = h @ self.env.weight(self.last) / EMBED - batch["y"]
        return {"square": (jnp.sum(batch["w"][:, None] * error**2), jnp.sum(batch["w"]))}


class Normalised(nnx.Module):
    """A loss that takes the mean of its rows from them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def loss(self, batch: Any, key: Any) -> Any:
        y = self.head(batch["x"])
        return jnp.mean(jnp.square(y - y.mean(0) - batch["y"]))


def compressed(kind: str, **more: Any) -> dict[str, Any]:
    return {"strategy": "bsp", "compress": {"gradients": kind, **KINDS[kind], **more}}


def stacked(layout: str, sync: dict[str, Any], count: int = 2, **changes: Any) -> Any:
    changes |= {"sync": sync, "model": {"type": "test_compressed_gradients:Stacked"}}
    return replicas(count, layout, **changes)


def gradients(program: Any, count: int, seed: int) -> Any:
    """Random gradients of all replicas, placed like the parameters."""
    rng = np.random.default_rng(seed)

    def one(p: Any) -> jax.Array:
        value = rng.normal(size=(count, *p.shape)).astype(np.float32)
        return jax.device_put(value, stacked_sharding(p, count, program.synchronizer.strategy.axis).sharding)

    return jax.tree.map(one, program.one["params"])


def host(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(x, np.float64) for name, x in tree.items()}


def left_over(own: Any, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """What was not applied yet: the mean of the workers' residuals, and the servers'."""
    left = np.asarray(own["worker"][name], np.float64).mean(0)
    if "server" in own and np.prod(shape) >= q.SMALLEST:
        left = left + np.asarray(q.from_blocks(own["server"][name], shape, 8), np.float64)
    return left


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "place"), one_in(2, KINDS, PLACES))
def test_what_was_applied_and_what_is_left_is_the_sum_of_the_true_means(kind: str, place: tuple[int, str]) -> None:
    count, layout = place
    program = stacked(layout, compressed(kind), count)
    strategy = program.synchronizer.strategy
    own, step = program.init()["sync"]["own"], jax.jit(strategy.combine)
    tokens = jnp.ones(count)
    applied: dict[str, Any] = {}
    true: dict[str, Any] = {}
    for time in range(1, 6):
        grads = gradients(program, count, time)
        own, mean, _ = step(own, grads, tokens)
        for name, value in host(mean).items():
            applied[name] = applied.get(name, 0.0) + value
            true[name] = true.get(name, 0.0) + np.asarray(grads[name], np.float64).mean(0)
            np.testing.assert_allclose(applied[name] + left_over(own, name, value.shape), true[name], atol=1e-6 * time)
    if kind != "powersgd":  # small ones travel whole; a matrix does if that has fewer bytes
        np.testing.assert_allclose(applied["first"], true["first"], atol=1e-5)
    assert np.abs(applied["up"] - true["up"]).max() > 1e-3  # large ones do not


@pytest.mark.parametrize("layout", [*LAYOUTS, "data_fsdp"])
def test_with_momentum_the_sum_is_of_velocities(layout: str) -> None:
    """Those of each replica, which become 0 where values were sent."""
    momentum, program = 0.9, stacked(layout, compressed("topk", momentum=0.9), optimizer={"name": "sgd"})
    own, step = program.init()["sync"]["own"], jax.jit(program.synchronizer.strategy.combine)
    applied: Any = 0.0
    velocities: Any = 0.0
    for time in range(1, 7):
        grads, before = gradients(program, 2, time), np.asarray(own["velocity"]["up"], np.float64)
        velocities = velocities + (momentum * before + np.asarray(grads["up"])).mean(0)
        own, mean, _ = step(own, grads, jnp.ones(2))
        applied = applied + np.asarray(mean["up"], np.float64)
        np.testing.assert_allclose(applied + left_over(own, "up", mean["up"].shape), velocities, atol=1e-6 * time)
    sent = np.asarray(own["worker"]["up"]) == 0
    assert sent.sum() == 2 * LAYERS * np.ceil(0.05 * EMBED * MLP)  # as many in each layer
    np.testing.assert_array_equal(np.asarray(own["velocity"]["up"])[sent], 0)
    assert np.abs(np.asarray(own["velocity"]["first"])).min() > 0  # what travels whole keeps its momentum


EXACT = {"powersgd": {"rank": EMBED}, "topk": {"share": 1.0}}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "layout"), one_in(2, EXACT, ALL_LAYOUTS))
def test_full_rank_and_all_values_are_bsp(kind: str, layout: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(power_sgd, "LEAST_SAVING", 0.0)
    changes = {"optimizer": {"name": "adamw", "lr": 0.01, "grad_clip_norm": 1.0}, "step": {"microbatches": 2}}
    (state, ours), (_, plain) = (
        run(stacked(layout, sync, **changes), 6, weights="uneven") for sync in (compressed(kind, **EXACT[kind]), {})
    )
    for found, expected in zip(ours, plain):
        harness.close_trees(expected["params"], found["params"], 1e-5)
        assert found["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-5)
    if kind == "powersgd":
        assert set(state["sync"]["own"]["factors"]) == {"0", "1", "2", "3"}


@pytest.mark.sampled(3)
@kinds
def test_all_layouts_of_a_replica_train_alike_and_near_bsp(kind: str) -> None:
    """Numbers that are rounded may be rounded otherwise where a sum has another order."""
    exact = run(stacked("fsdp", {}), 12)[1][-1]["metrics"]["loss"]
    one, *others = (
        run(stacked(layout, compressed(kind)), 12)[1][-1]["metrics"] for layout in ("fsdp", "tp", "data_tp")
    )
    for other in others:
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    assert one["loss"] == pytest.approx(exact, rel={"int2": 0.1, "powersgd": 0.1, "topk": 0.1}.get(kind, 0.02))
    whole = 2 * 4 * (2 * WIDTH * EMBED + 2 * LAYERS * EMBED * MLP) / 2
    assert one["exchanged_bytes"] < whole * {"int8": 0.32, "fp8": 0.32, "int4": 0.2}.get(kind, 0.15)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "layout"), one_in(2, KINDS, ALL_LAYOUTS))
def test_the_program_sends_the_bytes_of_the_formula(kind: str, layout: str) -> None:
    """Codes, scales, indices and what travels whole; beside that a few numbers for the metrics."""
    program = stacked(layout, compressed(kind), count=4)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tiny_net.rows(0).items()}
    step: Any = program.step
    rows = count_collectives(step.lower(program.state, batch).compile().as_text(), dict(program.sharder.mesh.shape))
    axis = "data" if layout in OVER_DATA else "replica"
    sent = [row for row in rows if axis in row.axes]
    if layout == "zero1":  # the weights travel whole, too, once
        weights = sum(4 * p.size // 2 for p in program.one["params"].values()) * 3 // 4
        formula_of = program.synchronizer.strategy._compressor.sent_bytes
        assert 0 <= sum(row.bytes for row in sent) - weights - formula_of(program.one["params"]) / 2 < 64
        return
    formula = program.synchronizer.strategy._compressor.sent_bytes(program.one["params"])
    numbers = sum(row.bytes for row in sent) - formula / 2  # a replica has two devices
    assert 0 <= numbers < 64, sent
    if kind == "powersgd":
        large = [row for row in sent if row.bytes > 64]
        assert {row.op for row in large} == {"all-reduce"}
        assert sum(row.count for row in large) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("kind", "layout"), one_in(2, KINDS, [*LAYOUTS, "zero1"]))
def test_gradients_that_are_not_finite_skip_the_step_and_spoil_nothing(kind: str, layout: str) -> None:
    program = stacked(layout, compressed(kind))
    state, _ = run(program, 2)
    before = jax.device_get((state["sync"], state["params"], state["opt_state"]))
    for bad in (np.nan, np.inf):
        batch = tiny_net.rows(2)
        batch["x"][-1] = bad  # a row of replica 1
        state, metrics = program.step(state, batch)
        assert metrics["skipped"] == 1
        after = jax.device_get((state["sync"], state["params"], state["opt_state"]))
        jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = program.step(state, tiny_net.rows(3))
    assert metrics["skipped"] == 0
    assert np.isfinite(metrics["loss"])


def test_layers_of_a_stack_are_compressed_apart() -> None:
    """A layer of small gradients beside one of large ones: each has its own largest values and its own rank."""
    rng = np.random.default_rng(0)
    for kind in ("topk", "powersgd"):
        program = stacked("fsdp", compressed(kind, **({"rank": 1} if kind == "powersgd" else {})))
        strategy = program.synchronizer.strategy
        grads = jax.tree.map(jnp.zeros_like, gradients(program, 2, 0))
        scale = np.array([1.0, 1e-3])[:, None, None]
        matrices = scale * rng.normal(size=(LAYERS, EMBED, 1)) * rng.normal(size=(LAYERS, 1, MLP))
        grads["up"] = jnp.broadcast_to(jnp.float32(matrices), (2, LAYERS, EMBED, MLP))
        _, mean, _ = jax.jit(strategy.combine)(strategy.init(program.one["params"]), grads, jnp.ones(2))
        if kind == "topk":
            assert [int((np.asarray(layer) != 0).sum()) for layer in mean["up"]] == [77, 77]
        else:
            harness.close_trees({"layer": matrices[1]}, {"layer": mean["up"][1]}, 1e-5)


def test_models_whose_rows_depend_on_each_other_are_refused_by_name() -> None:
    model = {"type": "test_compressed_gradients:Normalised"}
    with pytest.raises(UserError, match="Normalised: a row may change the loss of another one, so int8") as e:
        tiny_net.program({"replica": 2}, model=model, rules={"batch": []}, sync=compressed("int8"))
    assert len(str(e.value).splitlines()) == 1
    tiny_net.program({"replica": 2}, model=model, rules={"batch": []})  # bsp takes it


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sync": {"compress": {"deltas": "int8"}}}, "sync.compress.deltas: bsp exchanges gradients; expected none"),
        (
            {"sync": {"strategy": "diloco", "every": 4, "compress": {"gradients": "topk"}}},
            "sync.compress.gradients: diloco exchanges changes of parameters; expected none (see sync.compress.deltas)",
        ),
        (
            {"sync": {"strategy": "gossip", "every": 4, "compress": {"deltas": "int4"}}},
            "sync.compress.deltas: gossip exchanges parameters as they are; expected none, or sync.strategy=diloco",
        ),
        (
            {"sync": {"strategy": "local_sgd", "every": 4, "compress": {"secondary": 2}}},
            "sync.compress.secondary: local_sgd exchanges parameters as they are; expected 0, or sync.strategy=diloco",
        ),
        ({"sync": compressed("topk", share=0.0)}, "sync.compress.share"),
        ({"sync": compressed("powersgd", rank=0)}, "sync.compress.rank: expected at least 1; found 0"),
        (
            {"sync": compressed("topk", momentum=0.9), "optimizer": {"name": "adamw"}},
            "sync.compress.momentum: 0.9 takes the place of the optimizer's; expected optimizer.name=sgd with",
        ),
        (
            {"sync": compressed("int8"), "rules": {"embed": "replica"}},
            "rules.embed: replicas of sync.strategy bsp hold gradients of their own; expected `replica` only in",
        ),
        (
            {"sync": compressed("int8"), "mesh": {"data": -1}, "rules": {"embed": ["data"]}},
            "rules.embed: replicas of sync.strategy bsp hold gradients of their own; expected `data` only in `batch`",
        ),
        (
            {"sync": compressed("int8"), "mesh": {"data": -1}, "zero": 2},
            "zero: zero=2 shards over `data` what int8 needs whole on each of its devices; expected at most 1, or",
        ),
        (
            {"sync": compressed("int8"), "mesh": {"replica": -1, "data": 8}, "zero": 3},
            "zero: zero=3 shards over `data` what int8 needs whole on each of its devices; expected at most 1, or",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], text: str, problems: Callable[..., str]) -> None:
    assert text in problems(**changes)
