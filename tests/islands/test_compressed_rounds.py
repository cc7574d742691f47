"""Rounds in few bits of islands without a server: against NumPy, and nothing is lost over time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net
from local_islands import LocalServer, Rows, agreed, island_program, train_islands
from test_coordinator import OneIsland, Time
from test_island_identities import one_program
from test_islands_without_server import fall_silent, together

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.islands.callback import open_island
from jaxtrain.islands.partition import Spec, partition
from jaxtrain.islands.peers.client import PeerClient, _in_rows
from jaxtrain.islands.shard_encoder import ShardEncoder
from jaxtrain.planning.islands import priced_strategies
from jaxtrain.planning.step_program import tree_bytes
from jaxtrain.trainer.restore import restore_checkpoint

pytestmark = pytest.mark.timeout(180)
FORMATS = ("int8", "fp8", "int4", "int2")
HIGHEST = {"int8": 127, "int4": 7}
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.1, "betas": [0.0, 0.9], "weight_decay": 0.0, "grad_clip_norm": None}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.01, "weight_decay": 0.0, "betas": [0.9, 0.99]}
STEPS = 24
M = ("params", "m")  # 64 x 64, the tensor that is large enough


def sync_of(strategy: str, form: str, **compress: Any) -> dict[str, Any]:
    found = {
        "strategy": strategy, "every": 4, "outer": {"lr": 0.7, "momentum": 0.5},
        "compress": {"deltas": form, **compress},
    }  # fmt: skip
    if strategy == "streaming_diloco":
        found |= {"every": 8, "streaming": {"fragments": 2, "tau": 1, "alpha": 0.0}}
    return found


def run_config(sync: dict[str, Any], count: int = 2, **changes: Any) -> Any:
    islands = {"count": count, "heartbeat": 5.0, "servers": 0}
    given = {"optimizer": ADAMW, "steps": STEPS, "model": {"type": "tiny_net:Wide"}} | changes
    return tiny_net.config(sync=sync, islands=islands, **given)


def train(sync: dict[str, Any], meshes: list[dict[str, int]], weights: str = "even", **changes: Any) -> list[Any]:
    config = run_config(sync, len(meshes), **changes)
    with LocalServer(config) as server:
        return train_islands(config, meshes, server, Rows(weights=weights))


def residual(state: dict[str, Any]) -> np.ndarray:
    return np.asarray(state["sync"]["residual"]["m"])


def rounded(x: np.ndarray, form: str) -> np.ndarray:
    """What arrives of rows of 64 values, which have a scale each."""
    scale = np.abs(x).max(-1, keepdims=True) / HIGHEST[form]
    return np.round(x / np.where(scale > 0, scale, 1)) * scale


class Recorded:
    """What the islands of a run were to send, and the means that arrived, by path without its first name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: Any = lambda: None) -> None:
        self.changes: dict[str, list[np.ndarray]] = {}
        self.means: dict[str, list[np.ndarray]] = {}
        call, average, lock = ShardEncoder.__call__, PeerClient.average, threading.Lock()

        def encode(encoder: ShardEncoder, arrays: Any, before: Any) -> Any:
            with lock:
                for path, x in arrays.items():
                    self.changes.setdefault(path[-1], []).append(np.asarray(x, np.float64))
            return call(encoder, arrays, before)

        def averaged(client: PeerClient, *args: Any) -> Any:
            arrived = average(client, *args)
            if client.index == 0:
                for path in {path for parts, _ in arrived.values for path in parts}:
                    rows = [(parts[path].start or 0, x[path]) for parts, x in arrived.values if path in parts]
                    whole = np.concatenate([x for _, x in sorted(rows, key=lambda row: row[0])])
                    self.means.setdefault(path[-1], []).append(whole.astype(np.float64))
            return arrived

        monkeypatch.setattr(ShardEncoder, "__call__", encode)
        monkeypatch.setattr(PeerClient, "average", averaged)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
@pytest.mark.parametrize("meshes", [[{}] * 4, [{"fsdp": 4}, {"model": 2}]], ids=["4", "layouts"])
def test_over_a_run_nothing_is_lost_but_what_is_still_to_be_sent(
    strategy: str, form: str, meshes: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sum of the means + mean of the residuals = mean of the sums of changes, and all have the same bits."""
    record = Recorded(monkeypatch)
    found = train(sync_of(strategy, form), meshes)
    for _, state in found:
        jax.tree.map(np.testing.assert_array_equal, agreed(state), agreed(found[0][1]))
    wanted, sent = (sum(values["m"]) for values in (record.changes, record.means))
    left = np.mean([residual(state) for _, state in found], 0)
    np.testing.assert_allclose(sent + left, wanted / len(meshes), atol=2e-6)
    assert np.abs(sent - wanted / len(meshes)).max() > 1e-4
    for name in ("a", "b"):  # small ones travel as they are
        np.testing.assert_allclose(sum(record.means[name]), sum(record.changes[name]) / len(meshes), atol=2e-6)


@pytest.mark.parametrize("form", HIGHEST)
def test_rounds_are_those_of_numpy(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds of two islands with uneven tokens, from the changes that they had."""
    record, count = Recorded(monkeypatch), 2
    found = train(sync_of("diloco", form), [{}, {}], "uneven", steps=12)
    tokens = [np.zeros(count)]
    for step in range(12):
        tokens[-1] += Rows(weights="uneven").batch(step)["w"].reshape(count, -1).sum(1)
        tokens += [np.zeros(count)] if step % 4 == 3 else []
    params = agreed(found[0][1])
    specs = {("params", name): Spec(x.shape, np.float32) for name, x in params.items()}
    owned = [parts[M].layers for parts in partition(_in_rows(specs), count)]
    left = np.zeros((count, 64, 64))
    for at, mean in enumerate(record.means["m"]):
        share = tokens[at] / tokens[at].sum()
        pair = record.changes["m"][2 * at : 2 * at + 2]  # in the order of the threads
        totals = min(
            ([x + r for x, r in zip(order, left)] for order in ([*pair], pair[::-1])),
            key=lambda totals: np.abs(sum(w * rounded(x, form) for w, x in zip(share, totals)) - mean).max(),
        )
        arrived = [rounded(x, form) for x in totals]
        exact = sum(w * x for w, x in zip(share, arrived))
        expected = rounded(exact, form)
        gap = np.abs(exact).max(-1, keepdims=True) / HIGHEST[form]
        close = np.abs(mean - expected) < 1e-5
        assert close.mean() > 0.99  # a value halfway between two codes may get either
        assert (np.abs(mean - expected) < 1.01 * gap).all()
        left = np.stack([x - y for x, y in zip(totals, arrived)])
        for island, rows in enumerate(owned):
            left[island, rows] += (exact - mean)[rows] / share[island]
    for island, (_, state) in enumerate(found):
        assert (np.abs(residual(state) - left[island]) < 1e-5).mean() > 0.97
        assert (np.abs(left[island]) > 1e-5).mean() > 0.8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_few_bits_train_as_float32_does(strategy: str) -> None:
    """The loss falls as that of one program with replicas, whose blocks are others."""
    exact = [losses[-1] for losses, _ in train(sync_of(strategy, "none"), [{}, {}])]
    _, theirs = one_program(
        {"replica": 2}, sync_of(strategy, "int4"), Rows(), optimizer=ADAMW, model={"type": "tiny_net:Wide"}
    )
    for form in ("int8", "int4"):
        ours = [losses for losses, _ in train(sync_of(strategy, form), [{}, {}])]
        np.testing.assert_allclose([losses[-1] for losses in ours], exact, rtol=0.02)
        np.testing.assert_allclose(np.mean(ours, 0)[: len(theirs)], theirs, rtol=0.02)


def test_muloco_is_that_of_one_program() -> None:
    """To rounding in float32; in the 2 bits of its default the losses are close."""
    muon = {"optimizer": {"name": "muon", "lr": 0.02}, "model": {"type": "tiny_net:Wide"}}
    sync = sync_of("muloco", "none")
    theirs, losses = one_program({"replica": 2}, sync, Rows(), **muon)
    found = train(sync, [{}, {}], steps=12, **muon)
    for _, state in found:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), agreed(state), theirs)
    sync.pop("compress")
    for servers in (0, 1):
        config = run_config(sync, steps=12, **muon)
        assert config.sync.compress.deltas == "int2"
        config = config.model_copy(update={"islands": config.islands.model_copy(update={"servers": servers})})
        with LocalServer(config) as server:
            rounded_losses = np.mean([losses for losses, _ in train_islands(config, [{}, {}], server)], 0)
        np.testing.assert_allclose(rounded_losses, losses, rtol=0.05)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stops_at", [8, 11])
@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_a_run_that_stops_goes_on_bit_for_bit(strategy: str, stops_at: int) -> None:
    """At the end of a round, and within one; with streaming_diloco a fragment travels then."""
    run, ends = run_config(sync_of(strategy, "int4")), []
    for stops in (False, True):
        with LocalServer(run) as server:
            islands = [OneIsland(server, run, index) for index in range(2)]
            together(*(lambda each=each: each.step(stops_at) for each in islands))
            saved = [jax.device_get(each.state) for each in islands]
            if not stops:
                together(*(lambda each=each: each.step(16 - stops_at) for each in islands))
            [each.island.close() for each in islands]
        if stops:
            with LocalServer(run) as server:
                islands = [OneIsland(server, run, index) for index in range(2)]
                for each, state in zip(islands, saved):
                    each.state = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), state, each.state)
                    each.clock = stops_at
                together(*(lambda each=each: each.step(16 - stops_at) for each in islands))
        ends.append([jax.device_get(each.state) for each in islands])
        for state in ends[-1]:
            state["sync"].pop("place")  # drawn
    jax.tree.map(np.testing.assert_array_equal, *ends)
    assert np.abs(residual(ends[0][0])).max() > 0


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_the_bytes_are_those_of_the_plan(strategy: str) -> None:
    run = run_config(sync_of(strategy, "int4"), 4)
    total = dict.fromkeys(("exchanged_bytes", "received_bytes"), 0.0)
    with LocalServer(run) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        for _ in range(2):  # of the two fragments one is larger
            for each in together(*(lambda each=each: each.step(4) for each in islands)):
                total = {name: before + each[name] for name, before in total.items()}
        sizes = tree_bytes(islands[0].program)
    (own, *_) = priced_strategies(run, sizes, tokens=1, seconds=None, rate=None)
    assert total == {"exchanged_bytes": 4 * 2 * own.sent, "received_bytes": 4 * 2 * own.received}
    in_float32 = run_config(sync_of(strategy, "none"), 4)
    (exact, *_) = priced_strategies(in_float32, sizes, tokens=1, seconds=None, rate=None)
    rows = 64 * (64 // 2 + 4)  # codes of 4 bits, and a scale
    assert exact.sent - own.sent == 3 / 4 * 2 * (4 * 64 * 64 - rows) / (2 if "streaming" in strategy else 1)


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_an_island_that_dies_in_an_exchange_leaves_what_the_others_keep(strategy: str) -> None:
    """They average again, from the same messages."""
    run, time = run_config(sync_of(strategy, "int4"), 4), Time()
    with LocalServer(run, time) as server:
        islands = [OneIsland(server, run, index) for index in range(4)]
        together(*(lambda each=each: each.step(2) for each in islands))
        swapped, dying = PeerClient._swapped, islands[3].island.client
        means = threading.Event()

        def dies(number: int, name: str, *args: Any) -> Any:
            if name == "mean":
                means.set()
                raise SystemExit
            return swapped(dying, number, name, *args)

        dying._swapped = dies
        with ThreadPoolExecutor(4) as pool:
            steps = [pool.submit(each.step, 2) for each in islands]
            assert means.wait(60)
            fall_silent(server, time, *islands[:3])
            [step.result(60) for step in steps[:3]]
        assert [record["islands"] for record in server.log if record["event"] == "update"] == [(0, 1, 2)]
        together(*(lambda each=each: each.step(4) for each in islands[:3]))
        for each in islands[1:3]:
            jax.tree.map(np.testing.assert_array_equal, agreed(each.state), agreed(islands[0].state))


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_numbers_that_are_not_finite_are_left_out_and_keep_nothing(strategy: str) -> None:
    run = run_config(sync_of(strategy, "int8"))
    with LocalServer(run) as server:
        good, bad = (OneIsland(server, run, index) for index in range(2))
        together(lambda: good.step(7), lambda: bad.step(7))
        bad.state["params"] = jax.tree.map(lambda x: x * np.nan, bad.state["params"])
        together(lambda: good.step(1), lambda: bad.step(1))
        for _ in range(2 if strategy == "streaming_diloco" else 0):  # what travelled was captured before
            bad.state["params"] = jax.tree.map(lambda x: x * np.nan, bad.state["params"])
            together(lambda: good.step(4), lambda: bad.step(4))
        assert np.abs(residual(good.state)).max() > 0
        # But for what the mean has lost that it has rounded: that of one island is rounded already.
        np.testing.assert_allclose(residual(bad.state), 0, atol=1e-7)
        jax.tree.map(np.testing.assert_array_equal, agreed(good.state), agreed(bad.state))
        for each in (good, bad):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get((each.params, each.state["sync"]))))
        pushes = [record for record in server.pushes() if record["island"] == 1]
        assert not all(record["is_finite"] for record in pushes)


def test_without_error_feedback_nothing_is_kept() -> None:
    sync = sync_of("diloco", "int4", error_feedback=False)
    for losses, state in train(sync, [{}, {}]):
        assert "residual" not in state["sync"]
        assert losses[-1] < losses[0]


def test_islands_with_other_formats_do_not_fit() -> None:
    run, other = (run_config(sync_of("diloco", form)) for form in ("int8", "int4"))
    with LocalServer(run) as server:
        OneIsland(server, run, 0)
        second = open_island(other, island_program(other, {}, 1), 1, server.door)
        with pytest.raises(Exception, match=r"its sync is .*int4.*; expected .*int8"):
            second.client.join()


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco"])
def test_a_checkpoint_has_the_residual(strategy: str, tmp_path: Path) -> None:
    """As the config of the run says, from which `resume`, `evaluate` and `export` take the form of the state."""
    run = run_config(sync_of(strategy, "int4"), 1)
    with LocalServer(run) as server:
        island = OneIsland(server, run, 0)
        island.step(8)
    manifest = {"config": run.model_dump(mode="json")}
    for form in (island.island, island.program.saved_synchronizer(manifest)):
        jax.tree.map(
            lambda want, have: np.testing.assert_equal((want.shape, want.dtype), (have.shape, have.dtype)),
            form.abstract(island.program.one), island.state,
        )  # fmt: skip
    with Checkpointer(tmp_path, keep=1, timeout=60) as checkpoints:
        checkpoints.save(8, island.state, manifest=manifest)
        checkpoints.wait()
        restored, _ = restore_checkpoint(checkpoints, island.program, 8)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), jax.device_get(island.state))
    assert np.abs(residual(island.state)).max() > 0
