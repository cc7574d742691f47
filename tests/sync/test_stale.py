"""`ssp` and `asp`: gradients of parameters that were read some updates ago, against NumPy, `bsp` and serial steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import test_histories
import tiny_net
from numpy_histories import FEATURES, INNER_LR, ROWS, STALE, STALE_MOMENTUM, STALE_STEPS
from test_identities import ADAM, assert_close, assert_equal_bits
from test_run import config, resumed_bitwise, train
from tiny import records
from tiny_net import LAYOUTS, replicas, run

import jaxtrain
from jaxtrain.core.placement import Placer
from jaxtrain.core.program import Program
from jaxtrain.data.replica_rows import ReplicaRows
from jaxtrain.errors import UserError

layouts = pytest.mark.parametrize("layout", LAYOUTS)
SSP = {"strategy": "ssp", "stale": {"bound": 2, "speeds": [1.0, 0.7], "jitter": 1.5, "seed": 1}}
ASP = {"strategy": "asp", "stale": {"speeds": [1.0, 0.3], "jitter": 0.8, "seed": 4}}


def steps_of(program: Program, count: int, data: Any = None, rows: int = tiny_net.ROWS) -> tuple[Any, list]:
    """The last state, and of every step the metrics and the server's parameters; each worker has rows of its clock."""
    strategy = program.synchronizer.strategy
    mixed = ReplicaRows(data or tiny_net.Rows("train", 0, rows), strategy.data_steps, rows)
    place = Placer(mixed.batch, program.sharder, rows, False)
    state, found = program.init(), []
    for step in range(count):
        batch = place(step)
        with jax.transfer_guard("disallow" if step else "allow"):  # the first step compiles, with constants
            state, metrics = program.step_at(step)(state, batch)
        found.append(jax.device_get((metrics, program.agreed(state)["params"])))
    return state, found


@layouts
def test_with_a_bound_of_0_it_is_bsp_bit_for_bit(layout: str) -> None:
    """Whatever the speeds are, with Adam, clipping, a schedule, an average of weights and noise."""
    sync = SSP | {"stale": SSP["stale"] | {"bound": 0}}
    (state, ours), (plain_state, plain) = (run(replicas(2, layout, sync=s, **ADAM), 5) for s in (sync, {}))
    assert_equal_bits([h["params"] for h in ours], [h["params"] for h in plain])
    assert_equal_bits(state, plain_state)
    assert state.keys() == plain_state.keys()


@layouts
@pytest.mark.parametrize("strategy", ["ssp", "asp"])
def test_workers_of_one_speed_push_together_as_bsp(layout: str, strategy: str) -> None:
    """In the program of workers that differ: with tokens that are uneven, microbatches and clipping."""
    sync = {"strategy": strategy, "stale": {"jitter": 0.0}}
    changes = {**ADAM, "model": {"options": {}}, "step": {"microbatches": 2}}
    state, ours = run(replicas(2, layout, sync=sync, **changes), 5, weights="uneven")
    _, plain = run(replicas(2, layout, **changes), 5, weights="uneven")
    for found, expected in zip(ours, plain):
        assert_close(found["params"], expected["params"])
        for name, value in expected["metrics"].items():
            assert found["metrics"][name] == pytest.approx(value, rel=1e-5)
        assert found["metrics"]["staleness_max"] == 0
        assert found["metrics"]["pushing"] == 2
    assert "read" in state["sync"]["own"]


@pytest.mark.parametrize("name", STALE)
def test_the_server_moves_as_numpy_says(name: str) -> None:
    """Four workers of different speeds, with momentum; pushes that come together are one update."""
    program = tiny_net.program(
        {"replica": 4}, model={"type": "test_histories:Line"}, sync=STALE[name], rules={"batch": []},
        data={"type": "test_histories:Points", "global_batch": ROWS}, example=test_histories.Points().batch(0),
        optimizer={"lr": INNER_LR, "betas": [STALE_MOMENTUM, 0.9]}, steps=STALE_STEPS,
    )  # fmt: skip
    expected = test_histories.EXPECTED[name]
    _, found = steps_of(program, STALE_STEPS, test_histories.Points(), ROWS)
    np.testing.assert_allclose([params["w"] for _, params in found], expected["agreed"], rtol=1e-4, atol=1e-5)
    bytes_of_params = 4 * FEATURES
    for (metrics, _), ages in zip(found, expected["staleness"], strict=True):
        assert metrics["pushing"] == len(ages)
        assert metrics["staleness"] == pytest.approx(np.mean(ages))
        assert metrics["staleness_max"] == max(ages)
        assert metrics["tokens"] == len(ages)  # rows of those that push alone
        assert metrics["exchanged_bytes"] <= 2 * bytes_of_params
    sent = sum(float(metrics["exchanged_bytes"]) for metrics, _ in found) * 4 / bytes_of_params
    pushes = sum(map(len, expected["staleness"]))
    assert pushes + 4 <= sent <= 2 * pushes + 4  # each pushes, and reads before it


def test_the_golden_histories_of_stale_workers_are_those_of_numpy() -> None:
    for name, sync in STALE.items():
        assert test_histories.golden.stale_history(sync) == test_histories.EXPECTED[name]
        assert max(map(max, test_histories.EXPECTED[name]["staleness"])) >= 3
    assert test_histories.EXPECTED["ssp"]["staleness"] != test_histories.EXPECTED["asp"]["staleness"]


@layouts
@pytest.mark.parametrize(
    "optimizer", [{"betas": [0.9, 0.9]}, {"name": "adamw", "lr": 0.02, "weight_decay": 0.1}], ids=["sgd", "adam"]
)
def test_asynchronous_with_one_worker_that_works_is_serial(layout: str, optimizer: dict[str, Any]) -> None:
    """The other never pushes. An update is scaled by 1/2, as if the learning rate were half, for Adam too."""
    sync = {"strategy": "asp", "stale": {"speeds": [1.0, 1e-9]}}
    half = tiny_net.ROWS // 2
    _, ours = steps_of(replicas(2, layout, sync=sync, optimizer=optimizer), 6)
    lr = {**optimizer, "lr": optimizer.get("lr", 0.05) / 2}
    alone = tiny_net.program({}, optimizer=lr, data={"global_batch": half})
    state = alone.init()
    for step, (metrics, params) in enumerate(ours):
        state, serial = alone.step(state, {name: value[:half] for name, value in tiny_net.rows(step).items()})
        assert_close(params, jax.device_get(state["params"]), 1e-5)
        assert metrics["loss"] == pytest.approx(float(serial["loss"]), rel=1e-5)
        assert (metrics["staleness"], metrics["pushing"]) == (0, 1)


def test_asynchronous_of_one_worker_is_plain_training() -> None:
    sync = {"strategy": "asp"}
    (state, ours), (plain_state, plain) = (run(tiny_net.program({"fsdp": 2}, sync=s, **ADAM), 3) for s in (sync, {}))
    assert_equal_bits([h["params"] for h in ours], [h["params"] for h in plain])
    assert_equal_bits(state, plain_state)


@layouts
def test_a_worker_that_is_not_finite_disturbs_no_one_until_it_pushes(layout: str) -> None:
    """Rows that overflow are masked while their worker computes on, and skip the update in which it pushes them."""
    program = replicas(2, layout, sync={"strategy": "asp", "stale": {"speeds": [1.0, 0.26], "jitter": 0.0}})

    class Huge(tiny_net.Rows):
        def batch(self, step: int, rows_of: Any = slice(None)) -> dict[str, np.ndarray]:
            found = tiny_net.rows(step)
            found["y"][tiny_net.ROWS // 2 :] *= 1e30
            return {name: value[rows_of] for name, value in found.items()}

    _, found = steps_of(program, 10, Huge("train", 0, tiny_net.ROWS))
    pushes = [program.synchronizer.strategy.update(step).pushes for step in range(10)]
    assert pushes.count((False, True)) == 2
    for (metrics, params), (_, before), (_, second) in zip(found[1:], found, pushes[1:]):
        assert metrics["skipped"] == second
        assert np.isfinite(metrics["loss"]) or second
        assert np.isfinite(params["a"]).all()
        assert (np.abs(params["a"] - before["a"]).max() == 0) == second


def test_batch_statistics_are_those_of_the_rows_that_are_pushed() -> None:
    """Numbers by hand: momentum 0.5 from 0, means over the rows of the one that pushes, of its own iteration."""
    model = {"type": "test_exchange:Normalised"}
    program = tiny_net.program({"replica": 2}, model=model, rules={"batch": []}, sync=ASP)
    state, _ = steps_of(program, 6)
    expected, half = np.zeros(tiny_net.WIDTH), tiny_net.ROWS // 2
    for step in range(6):
        ((worker, clock),) = [(w, c) for w, c in enumerate(program.synchronizer.strategy.update(step).clocks) if c >= 0]
        expected = 0.5 * expected + 0.5 * tiny_net.rows(clock)["x"][worker * half : worker * half + half].mean(0)
    np.testing.assert_allclose(state["mutable"]["norm"]["mean"], expected, atol=1e-6)
    assert state["mutable"]["passes"] == 6


def test_what_is_read_before_a_skipped_step_is_read() -> None:
    """Worker 0 reads after each update: its gradients are of the newest parameters also after a skipped one."""
    sync = {"strategy": "asp", "stale": {"speeds": [1.0, 1e-9], "jitter": 0.0}}
    program = replicas(2, "fsdp", sync=sync, debug={"faults": [{"kind": "nan", "step": 3}]})
    state, found = steps_of(program, 3)
    assert [float(metrics["skipped"]) for metrics, _ in found] == [0, 0, 1]
    np.testing.assert_array_equal(state["sync"]["own"]["read"]["a"][0], found[1][1]["a"])
    np.testing.assert_array_equal(state["sync"]["own"]["read"]["a"][1], jax.device_get(program.init()["params"]["a"]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", [SSP, ASP], ids=["ssp", "asp"])
def test_a_resumed_run_is_the_same_bit_for_bit(tmp_path: Path, sync: dict[str, Any]) -> None:
    whole = resumed_bitwise(tmp_path, sync)
    read = np.asarray(whole.state["sync"]["own"]["read"]["a"])
    assert np.abs(read[0] - read[1]).max() > 1e-4
    logged = records(whole.run_dir)
    assert max(record["staleness_max"] for record in logged) >= 1
    assert {record["pushing"] for record in logged} <= {1, 2}
    pushed = np.cumsum([record["pushing"] for record in logged])
    assert [record["samples"] for record in logged] == (pushed * tiny_net.ROWS // 2).tolist()
    assert jaxtrain.evaluate(whole.run_dir)["eval/loss"] == pytest.approx(whole.metrics["eval/loss"], rel=1e-6)


OTHER_SEED = SSP | {"stale": SSP["stale"] | {"seed": 5}}


@pytest.mark.parametrize("sync", [OTHER_SEED, ASP, {"strategy": "bsp"}], ids=["seed", "asp", "bsp"])
def test_a_run_that_continues_with_other_clocks_reads_anew(
    tmp_path: Path, sync: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """From the server's parameters and moments: workers would not have read when the other clocks say."""
    first, _ = train(config(tmp_path, "run", SSP, steps=4))
    server = jax.device_get((first.state["params"], first.state["opt_state"]))
    read = np.asarray(first.state["sync"]["own"]["read"]["a"])
    assert np.abs(read[0] - read[1]).max() > 1e-4
    trainer = jaxtrain.Trainer(config(tmp_path, "run", sync), run_dir=first.run_dir, resume=True)
    assert_equal_bits((trainer.state["params"], trainer.state["opt_state"]), server)
    if sync["strategy"] == "bsp":
        assert "sync" not in trainer.state
    else:
        a = trainer.state["sync"]["own"]["read"]["a"]
        np.testing.assert_array_equal(a, np.broadcast_to(server[0]["a"], a.shape))
    assert np.isfinite(trainer.fit().metrics["loss"])
    assert "the config asks for different steps" in capsys.readouterr().out


def test_gradients_between_steps_are_those_of_the_next_step(tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "lr": 0.05, "grad_clip_norm": None}
    trainer = jaxtrain.Trainer(config(tmp_path, "run", SSP, optimizer=optimizer))
    found: dict[str, float] = {}
    for step in trainer.steps():
        if found:
            taken = step.metrics
            assert {name: taken[name] for name in found} == pytest.approx(found, rel=1e-6)
        found = {} if step.number == 8 else trainer.gradients()[0]


@pytest.mark.parametrize(
    ("sync", "mesh", "said"),
    [
        (SSP | {"stale": {"bound": -1}}, {"replica": 2, "data": 4}, "sync.stale.bound"),
        (SSP | {"stale": {"speeds": [1.0, 0.0]}}, {"replica": 2, "data": 4}, "sync.stale.speeds"),
        (
            SSP | {"stale": {"speeds": [1.0, 2.0, 3.0]}},
            {"replica": 2},
            "3 speeds for 2 replicas; expected one for each",
        ),
        (SSP | {"stale": {}}, {"data": 4, "fsdp": 2}, "ssp needs 2 replicas; expected mesh.replica >= 2, and it is 1"),
    ],
)
def test_bad_clocks_are_refused_in_one_line(tmp_path: Path, sync: Any, mesh: Any, said: str) -> None:
    given = config(tmp_path, "run", {"strategy": "bsp"}).model_dump()
    given |= {"sync": sync, "mesh": mesh}
    with pytest.raises(UserError, match=said) as error:
        jaxtrain.train(given)
    assert "\n" not in str(error.value).strip()
