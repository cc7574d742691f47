"""Bad steps are left out in the graph: no update, under every layout, and nothing changes where all is finite."""

from __future__ import annotations

import harness
import jax
import linear_model
import numpy as np
import pytest
from faults import debug

from jaxtrain.config import Config
from jaxtrain.core import spike_detection
from jaxtrain.core import step as steps
from jaxtrain.core.program import build_program

SMALL = {
    "model": {"embed": 16, "heads": 2, "kv_heads": 2, "mlp": 32, "sliding_window": None, "sliding_window_pattern": 1,
    "qk_norm": "none",
              "biases": []},
    "loss": {"vocab_chunks": 1},
}  # fmt: skip
LAYOUTS = {
    "data, fsdp, model": {"mesh": {"data": 2, "fsdp": 2, "model": 2}},
    "zero 2, accumulated": {"mesh": {"data": 4}, "zero": 2, "step": {"microbatches": 2}},
    "stages": {
        "mesh": {"pipeline": 2, "data": 2}, "rules": harness.RULES | {"layers": "pipeline"},
        "step": {"microbatches": 2},
    },
}  # fmt: skip


def host(tree):
    return jax.tree.map(np.asarray, tree)


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_with_nan_gradients_updates_nothing_and_counts(layout):
    program = harness.program(**LAYOUTS[layout], **SMALL, debug=debug("nan@2"), optimizer={"ema_decay": 0.9})
    state, metrics = program.step(program.init(), harness.placed(program, 0))
    assert float(metrics["skipped"]) == 0
    before = host(state)
    state, metrics = program.step(state, harness.placed(program, 1))
    assert float(metrics["skipped"]) == 1
    assert np.isnan(float(metrics["grad_norm"]))
    assert int(state["step"]) == 2
    for name in ("params", "opt_state", "ema"):
        assert same(before[name], host(state[name])), name
        for leaf in jax.tree.leaves(state[name]):  # every device took the same branch
            copies = {}
            for shard in leaf.addressable_shards:
                copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
            assert all(same(group[0], other) for group in copies.values() for other in group)
    state, metrics = program.step(state, harness.placed(program, 2))
    assert float(metrics["skipped"]) == 0
    assert not same(before["params"], host(state["params"]))


def test_a_loss_that_is_not_finite_is_left_out_too():
    program = harness.program({"data": 2}, **SMALL)
    state = program.init()
    before = host(state)
    batch = harness.batch(0)
    state, metrics = program.step(state, {**batch, "weights": batch["weights"] * np.nan})
    assert float(metrics["skipped"]) == 1
    assert same(before["params"], host(state["params"]))


def unguarded(monkeypatch) -> None:
    """The step as it would be without any of this."""
    monkeypatch.setattr(steps, "_select", lambda is_good, new, old: new)
    monkeypatch.setattr(steps, "_accept_update", lambda *_: (None, {}, {}))


def test_where_all_is_finite_nothing_changes_by_a_bit(monkeypatch):
    """Operation by operation: a compiler may fuse a multiplication and an addition here and not there."""
    own = {"model": {"type": "linear_model:Linear", "options": {"size": 5}}, "data": {"type": "linear_model:Packed"}}
    program = build_program(
        Config(**own, precision="fp32", optimizer={"lr": 0.1, "ema_decay": 0.9}), None, jax.devices()[:1]
    )

    def trained():
        state = program.init()
        with jax.disable_jit():
            for rows in (4, 8):
                state, metrics, _ = program.step_with_gradients(state, linear_model.batch(rows, 5))
        return host(state), metrics

    state, metrics = trained()
    assert float(metrics["skipped"]) == 0
    unguarded(monkeypatch)
    plain, metrics = trained()
    assert "skipped" not in metrics
    assert same(state, plain)


def test_compiled_it_changes_no_more_than_fused_multiply_adds_do(monkeypatch):
    def trained():
        return harness.run(harness.program(**LAYOUTS["zero 2, accumulated"], **SMALL, optimizer={"ema_decay": 0.9}), 3)

    state, rows = trained()
    unguarded(monkeypatch)
    plain, plain_rows = trained()
    for name in ("params", "ema", "opt_state"):
        harness.close_trees(state[name], plain[name], 1e-6)
    np.testing.assert_allclose(rows["loss"], plain_rows["loss"], rtol=1e-6)


def zscore(values: np.ndarray, new: float) -> float:
    """By its model_def, with NumPy."""
    median = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - median))
    return (new - median) / max(spread, 0.01 * abs(median))


def test_the_score_is_that_of_its_definition():
    rng = np.random.default_rng(0)
    history = rng.normal([[2.0], [0.5]], [[0.3], [0.1]], (2, 100)).astype(np.float32)
    window = spike_detection.initial()
    for index in range(100):
        if index == 90:
            kept = host(window)
            assert same(host(spike_detection.push(window, np.float32(np.nan), np.float32(1))), kept)
        window = jax.jit(spike_detection.push)(window, history[0, index], history[1, index])
        new = np.float32([2.5, 1.1])
        past = history[:, max(0, index + 1 - spike_detection.WINDOW) : index + 1]
        expected = (
            max(zscore(past[0], new[0]), zscore(past[1], new[1])) if index + 1 >= spike_detection.MIN_STEPS else 0.0
        )
        if index % 7 == 0:
            np.testing.assert_allclose(spike_detection.score(window, *new), expected, rtol=1e-4)
    flat = spike_detection.initial()
    for _ in range(20):
        flat = spike_detection.push(flat, np.float32(2), np.float32(1))
    assert float(spike_detection.score(flat, np.float32(2.1), np.float32(1))) == pytest.approx(
        5, rel=1e-3
    )  # 1% is the least


def test_a_spike_is_skipped_before_its_update():
    program = harness.program({"data": 2, "fsdp": 2}, **SMALL, guard={"spike": {"action": "skip", "threshold": 8.0}})
    state = program.init()
    shuffled = np.random.default_rng(0)
    for index in range(18):
        if index == 17:
            kept = host(state)
        batch = dict(harness.batch(index % 3))
        if index == 17:  # targets of other places, in one row alone: a loss far above the others
            batch["targets"] = shuffled.permutation(batch["targets"].reshape(-1)).reshape(batch["targets"].shape)
            batch["weights"] = batch["weights"] * 0 + (np.arange(harness.ROWS) == 0)[:, None]
        state, metrics = program.step(state, batch)
        if index < 17:
            assert float(metrics["skipped"]) == 0
    assert float(metrics["spike"]) > 8
    assert float(metrics["skipped"]) == 1
    assert same(kept["params"], host(state["params"]))
    assert int(state["step"]) == int(state["spikes"]["count"]) == 18
