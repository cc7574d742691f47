"""1-bit Adam: exact before its freeze, then momenta of which the signs travel, and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_net
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from selection import one_in
from test_compressed_gradients import LAYERS, gradients, host, stacked
from test_run import config, resumed_bitwise
from tiny_net import WIDTH, replicas, run

import jaxtrain
from jaxtrain.config.checks import config_notes
from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.hlo.collectives import count_collectives
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.sharding import quantized_blocks
from jaxtrain.sync import quantized_mean as q
from jaxtrain.sync.compression.onebit_adam import Momenta

LAYOUTS = ["fsdp", "tp", "data_fsdp"]
layouts = pytest.mark.parametrize("layout", LAYOUTS)
FREEZE, OUT, LR, DECAY, CLIP, BETAS = 4, 512, 0.02, 0.1, 1.5, (0.9, 0.95)
ADAM = {"name": "adamw", "lr": LR, "betas": BETAS, "weight_decay": DECAY, "grad_clip_norm": CLIP}
SPLIT = {"batch": ["replica", "data", "fsdp"]}
STACK = {"type": "test_compressed_gradients:Stacked"}
TARGETS = np.sin(np.arange(WIDTH * OUT, dtype=np.float32)).reshape(WIDTH, OUT)


def onebit(freeze: int = FREEZE, **more: Any) -> dict[str, Any]:
    return {"strategy": "bsp", "compress": {"gradients": "onebit_adam", "freeze": freeze, **more}}


class Linear(nnx.Module):
    """Columns y P ~ x w of one matrix, which has two blocks."""

    rows_are_independent = True

    def __init__(self, *, env: Any, rngs: Any) -> None:
        self.env, self.w = env, env.param(rngs, ("embed", "mlp"), (WIDTH, OUT), tiny_net.normal)

    def loss(self, batch: Any, key: Any) -> Any:
        error = batch["x"] @ self.env.weight(self.w) - batch["y"] @ TARGETS
        return {"square": (jnp.sum(batch["w"][:, None] * error**2) / 25, jnp.sum(batch["w"]))}


def moments(state: Any) -> tuple[Any, Any]:
    return tuple(jax.device_get(optax.tree.get(state["opt_state"], name)) for name in ("mu", "nu"))


def in_blocks(x: np.ndarray) -> np.ndarray:
    """One bit of each value, in blocks of 1,024: the sign, times the mean magnitude of the block."""
    blocks = x.reshape(-1, 1024)
    return (np.where(blocks > 0, 1.0, -1.0) * np.abs(blocks).mean(-1, keepdims=True)).reshape(x.shape)


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Rows whose first feature is 0 before the freeze."""
    batch = tiny_net.rows(step, weights="uneven")
    batch["x"][:, 0] *= step >= FREEZE
    return batch


def numpy_gradients(w: np.ndarray, step: int, count: int) -> np.ndarray:
    """Gradients of each replica of `Linear`; their mean is that of the batch."""
    x, y, weights = (batch_of(step)[name].astype(np.float64) for name in "xyw")
    terms = 2 * weights[:, None] * (x @ w - y @ TARGETS) / weights.sum() / 25
    return np.stack([count * a.T @ b for a, b in zip(np.split(x, count), np.split(terms, count))])


def clipped(g: np.ndarray, limit: float) -> np.ndarray:
    return g * min(1.0, limit / np.linalg.norm(g))


def numpy_history(w: np.ndarray, steps: int, count: int) -> list[np.ndarray]:
    """Weights after every step of AdamW that is frozen after `FREEZE` steps."""
    w, m, v = w.astype(np.float64), np.zeros_like(w, np.float64), np.zeros_like(w, np.float64)
    worker, server, found = np.zeros((count, *w.shape)), np.zeros_like(w, np.float64), []
    b1, b2 = BETAS
    for step in range(steps):
        apart = numpy_gradients(w, step, count)
        if step < FREEZE:
            g = clipped(apart.mean(0), CLIP)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        else:
            total = b1 * m + (1 - b1) * np.stack([clipped(g, CLIP * count**0.5) for g in apart]) + worker
            sent = np.stack([in_blocks(x) for x in total])
            worker, part = total - sent, sent.mean(0) + server
            m = in_blocks(part)
            server = part - m
            m = m * (v > 0)
        done = min(step + 1, FREEZE)
        direction = m / (1 - b1**done) / (np.sqrt(v / (1 - b2**done)) + 1e-8)
        w = w - LR * (direction + DECAY * w)
        found.append(w)
    return found


@pytest.mark.parametrize(("count", "layout"), one_in(2, [2, 4], LAYOUTS))
def test_a_history_across_the_freeze_is_that_of_numpy(count: int, layout: str) -> None:
    model = {"type": "test_onebit_adam:Linear"}
    program = replicas(count, layout, sync=onebit(), optimizer=ADAM, model=model)
    state = program.init()
    first = np.asarray(state["params"]["w"])
    expected, norms = numpy_history(first, 10, count), []
    for step, w in enumerate(expected):
        state, metrics = program.step_at(step)(state, batch_of(step))
        np.testing.assert_allclose(state["params"]["w"], w, atol=2e-5)
        norms.append(float(metrics["grad_norm"]))
        assert ("exchanged_bytes" in metrics) == (step >= FREEZE)
    assert min(norms) < CLIP < max(norms[:FREEZE])
    assert max(norms) > CLIP * count**0.5
    decayed = first[0] * (1 - LR * DECAY) ** 10
    np.testing.assert_allclose(state["params"]["w"][0], decayed, rtol=1e-5)  # had no gradient before the freeze


@layouts
def test_before_the_freeze_it_is_adam_bit_for_bit_and_then_its_second_moment_stays(layout: str) -> None:
    changes = {"optimizer": ADAM | {"ema_decay": 0.5}, "step": {"microbatches": 2}, "rules": SPLIT}
    ours, plain = (stacked(layout, sync, **changes) for sync in (onebit(), {}))
    (state, found), (exact, expected) = (run(program, FREEZE, weights="uneven") for program in (ours, plain))
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected))
    for name, tree in exact.items():
        assert jax.tree.all(jax.tree.map(np.array_equal, jax.device_get(state[name]), jax.device_get(tree))), name
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(state["sync"]))
    assert ours.step_at(FREEZE - 1) is ours.step_at(0)
    assert ours.step_at(FREEZE) is ours.step
    frozen = moments(state)
    state, _ = run(ours, 4, state, first=FREEZE)
    assert jax.tree.all(jax.tree.map(np.array_equal, moments(state)[1], frozen[1]))
    assert not np.array_equal(moments(state)[0]["up"], frozen[0]["up"])
    magnitudes = np.abs(moments(state)[0]["up"]).reshape(2 * LAYERS, -1)  # blocks of half a layer
    np.testing.assert_array_equal(magnitudes, magnitudes[:, :1].repeat(magnitudes.shape[1], 1))
    assert len(set(magnitudes[:, 0])) == 2 * LAYERS


@pytest.mark.parametrize(("count", "layout"), one_in(2, [2, 4], LAYOUTS))
def test_what_was_applied_and_what_is_left_is_the_sum_of_the_mean_momenta(count: int, layout: str) -> None:
    """Momenta as the step computes them: each replica goes on from the one that was applied last."""
    program = stacked(layout, onebit(), count, optimizer=ADAM)
    gradients_of = program.synchronizer.strategy
    own, step = program.init()["sync"]["own"], jax.jit(gradients_of.combine)
    applied: dict[str, Any] = {}
    true: dict[str, Any] = {}
    mean: Any = jax.tree.map(lambda p: np.zeros(p.shape), program.one["params"])
    for time in range(1, 7):
        momenta = jax.tree.map(lambda m, g: np.float32(0.9 * m) + 0.1 * g, mean, gradients(program, count, time))
        own, mean, _ = step(own, momenta, jnp.ones(count))
        for name, value in host(mean).items():
            applied[name] = applied.get(name, 0.0) + value
            true[name] = true.get(name, 0.0) + np.asarray(momenta[name], np.float64).mean(0)
            left = np.asarray(own["worker"][name], np.float64).mean(0)
            if value.size >= q.SMALLEST:
                left += np.asarray(own["server"][name], np.float64).reshape(value.shape)
            np.testing.assert_allclose(applied[name] + left, true[name], atol=1e-6 * time)
    np.testing.assert_allclose(applied["first"], true["first"], atol=1e-5)  # small ones travel whole
    assert np.abs(applied["up"] - true["up"]).max() > 0.01


def test_one_bit_keeps_the_magnitude_of_a_block_and_the_signs_in_eight_to_a_byte() -> None:
    x = np.random.default_rng(0).normal(size=(5, 256)).astype(np.float32)
    x[3] = 0
    codes, scale = quantized_blocks.encode(jnp.asarray(x), 1)
    assert (codes.dtype, codes.shape) == (jnp.uint8, (5, 32))
    back = np.asarray(quantized_blocks.decode(codes, scale, 1))
    np.testing.assert_allclose(np.abs(back), np.abs(x).mean(-1, keepdims=True).repeat(256, 1), rtol=1e-6)
    np.testing.assert_array_equal(np.sign(back), np.sign(x))


@layouts
def test_the_program_sends_the_bytes_of_the_formula(layout: str) -> None:
    """After the freeze signs, scales and what travels whole; before it what bsp sends."""
    program, plain = (stacked(layout, sync, 2, optimizer=ADAM, rules=SPLIT) for sync in (onebit(), {}))
    rows = NamedSharding(program.sharder.mesh, PartitionSpec(tuple(SPLIT["batch"])))
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for name, x in tiny_net.rows(0).items()}

    def sent(step: Any, state: Any = program.state) -> int:
        compiled = step.lower(state, batch).compile()
        rows = count_collectives(compiled.as_text(), dict(program.sharder.mesh.shape))
        return sum(row.bytes for row in rows if program.synchronizer.strategy.axis in row.axes)

    strategy = program.synchronizer.strategy
    formula = strategy._compressor.sent_bytes(program.one["params"])
    whole, signs = 4 * 2 * WIDTH * 32, 2 * LAYERS * 32 * 48
    assert formula == whole + signs / 8 + 4 * signs / 768  # 2 (M - 1) / M is 1
    assert 0 <= sent(program.step) - formula / 2 < 64  # a replica has two devices
    exact = sent(plain.step, plain.state)
    assert sent(program.step_at(0)) == exact
    assert sent(program.step) < exact / 9


@layouts
def test_gradients_that_are_not_finite_skip_the_step_and_spoil_nothing(layout: str) -> None:
    program = stacked(layout, onebit(2), optimizer=ADAM)
    state, _ = run(program, 4)
    before = jax.device_get((state["sync"], state["params"], state["opt_state"]))
    batch = tiny_net.rows(4)
    batch["x"][-1] = np.inf  # a row of replica 1
    state, metrics = program.step(state, batch)
    assert metrics["skipped"] == 1
    after = jax.device_get((state["sync"], state["params"], state["opt_state"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert np.isfinite(program.step(state, tiny_net.rows(5))[1]["loss"])


def test_all_layouts_of_a_replica_train_alike_and_near_adam() -> None:
    exact, one, two = (
        run(stacked(layout, sync, optimizer=ADAM), 24)[1][-1]["metrics"]["loss"]
        for layout, sync in (("fsdp", {}), ("fsdp", onebit(8)), ("tp", onebit(8)))
    )
    assert one == pytest.approx(two, rel=1e-3)
    assert one == pytest.approx(exact, rel=0.1)


def test_selection_biases_of_experts_have_no_momentum() -> None:
    """They take a step by the sign of the mean of the loads, as ever."""
    names = {"bias": ("layers", "balance"), "w": ("embed", "mlp")}
    params = {"bias": jnp.ones((2, 3)), "w": jnp.ones((4, 5))}
    grads = {"bias": jnp.stack([-3 * params["bias"], params["bias"]]), "w": jnp.stack([params["w"], 3 * params["w"]])}
    exact, frozen = (
        make_optimizer(
            OptimizerConfig(betas=BETAS), lambda step: jnp.float32(0.1), names, params, 0.01, is_frozen=frozen
        )
        for frozen in (False, True)
    )
    mean = {name: g.mean(0) for name, g in grads.items()}
    _, state = exact.update(mean, exact.init(params), params)
    momenta, metrics = Momenta(BETAS[0], None, names)(grads, state)
    np.testing.assert_array_equal(momenta["bias"], grads["bias"])
    np.testing.assert_allclose(momenta["w"], 0.9 * 0.2 + 0.1 * grads["w"], rtol=1e-6)  # after a gradient of 2
    assert metrics["grad_norm"] == pytest.approx(2 * 20**0.5)
    updates, _ = frozen.update({name: m.mean(0) for name, m in momenta.items()}, state, params)
    np.testing.assert_allclose(updates["bias"], 0.01, rtol=1e-6)


def test_runs_that_are_resumed_before_and_after_the_freeze_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    whole = resumed_bitwise(tmp_path, onebit(4), model=STACK)
    assert np.abs(whole.state["sync"]["own"]["worker"]["up"]).max() > 0
    shards = whole.state["sync"]["own"]["worker"]["up"].addressable_shards
    assert {shard.data.size for shard in shards} == {2 * 32 * 48 // 2}  # of one replica, over fsdp


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"sync": onebit(), "optimizer": {"name": "lion"}},
            "sync.compress.gradients: onebit_adam sends the momentum of Adam, and the optimizer is lion; expected"
            " optimizer.name=adamw (Adam with optimizer.weight_decay=0)",
        ),
        (
            {"sync": onebit(12), "optimizer": ADAM},
            "sync.compress.freeze: of 12 steps none comes after the freeze at 12, so that nothing is compressed",
        ),
        ({"sync": onebit(0), "optimizer": ADAM}, "sync.compress.freeze: expected at least 1; found 0"),
        (
            {"sync": {**onebit(), "strategy": "diloco", "every": 4}, "optimizer": ADAM},
            "sync.compress.gradients: diloco exchanges changes of parameters; expected none",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(changes: dict[str, Any], text: str, problems: Callable[..., str]) -> None:
    assert text in problems(**changes)


def test_plan_is_of_steps_after_the_freeze_and_says_what_those_before_it_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(tiny_net.__file__))  # of the process that compiles
    plan = jaxtrain.plan(config(tmp_path, "run", onebit(2), model=STACK, mesh={"replica": 2, "fsdp": 4}), "simulate:8")
    note = next(line for line in plan.notes if "replicas" in line)
    # of 4 devices 6,400 values in float32; or 256 of them, and signs and scales of 16 blocks, half of them to fill up
    assert note == (
        "between replicas a device sends 0.0064 MB in each of the first 2 steps in the mean, and 0.000656 MB in later"
        " ones, of which this plan is; in that of all 0.00209 MB"
    )
    assert 656 <= sum(row.bytes for row in plan.traffic if "replica" in row.axes) < 720


def test_one_replica_is_told_that_it_sends_nothing(tmp_path: Path) -> None:
    one = config(tmp_path, "one", onebit(), model=STACK, mesh={"fsdp": 8})
    assert any("sync.compress.gradients: one replica sends nothing" in note for note in config_notes(one))
