"""Values in few bits between islands and servers: nothing is lost over time, and all hold the same."""

from __future__ import annotations

import threading
from itertools import pairwise
from math import ceil, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_net
from local_islands import LocalServer, Rows, island_program, train_islands
from test_coordinator import OneIsland, Time
from test_island_identities import one_program
from test_island_values import SHARDINGS, SPECS, like

import jaxtrain
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config.sections.sync import OuterConfig, SyncConfig
from jaxtrain.errors import UserError
from jaxtrain.islands.blocks import EncodedBlock, decode, decode_on_device, encode
from jaxtrain.islands.callback import open_island
from jaxtrain.islands.partition import Spec, partition
from jaxtrain.islands.pieces import assemble, decoded, pieces_of
from jaxtrain.islands.server.process import ServerProcess
from jaxtrain.islands.server.public_values import with_message
from jaxtrain.islands.server.recent_messages import RecentMessages
from jaxtrain.islands.server.rules import ExchangeRule, Header
from jaxtrain.islands.shard_encoder import ShardEncoder
from jaxtrain.sync.quantized_mean import BITS, message_bytes
from jaxtrain.trainer.restore import restore_checkpoint

FORMATS = ("int8", "fp8", "int4", "int2")
CODES = {"int8": 255, "int4": 15, "int2": 4}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.01, "weight_decay": 0.0, "betas": [0.9, 0.99]}
STEPS = 24


def run_config(sync: dict[str, Any], count: int = 2, **islands: Any) -> Any:
    """Islands of a network with a matrix of 64 x 64 and two smaller ones."""
    given = {"count": count, "heartbeat": 5.0, **islands}
    return tiny_net.config(sync=sync, islands=given, model={"type": "tiny_net:Wide"}, optimizer=ADAMW, steps=STEPS)


def gradients(strategy: str, form: str, **changes: Any) -> dict[str, Any]:
    return {"strategy": strategy, "compress": {"gradients": form, **changes}}


def deltas(strategy: str, form: str, every: int = 4) -> dict[str, Any]:
    outer = {"lr": 0.7, "momentum": 0.5}
    return {"strategy": strategy, "every": every, "outer": outer, "compress": {"deltas": form}}


def formula(shape: tuple[int, ...], form: str) -> int:
    """Bytes of blocks of at most 128 values in rows, filled to multiples of 4, with a scale of 4 bytes each."""
    blocks = ceil(shape[-1] / 128)
    block = ceil(shape[-1] / blocks / 4) * 4
    return prod(shape[:-1]) * blocks * (block * {"int8": 8, "fp8": 8, "int4": 4, "int2": 2}[form] // 8 + 4)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("size", [5, 64, 130, 257])
def test_numpy_decodes_what_devices_encode(form: str, size: int) -> None:
    """To the values of JAX, and to the nearest code."""
    x = np.random.default_rng(0).normal(size=(3, 7, size)).astype(np.float32)
    x[0, 0] = 0
    message = np.asarray(encode(jnp.asarray(x), BITS[form]))
    assert message.nbytes == message_bytes(x.shape, BITS[form]) == formula(x.shape, form)
    found = decode(message, size, BITS[form])
    np.testing.assert_array_equal(found, np.asarray(decode_on_device(jnp.asarray(message), size, BITS[form])))
    np.testing.assert_array_equal(found[0, 0], 0)
    if form in CODES:
        block = ceil(size / ceil(size / 128) / 4) * 4
        for first in range(0, size, block):
            part = x[..., first : first + block]
            if form == "int2":  # of least squared error, see `quantized_blocks`
                lost = found[..., first : first + block] - part
                assert ((lost**2).sum(-1) <= 0.25 * (part**2).sum(-1)).all()
                continue
            gap = 2 * np.abs(part).max(-1, keepdims=True) / (CODES[form] - 1)
            assert (np.abs(found[..., first : first + block] - part) <= 0.501 * gap).all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", SHARDINGS)
def test_pushes_and_what_is_left_are_all_that_was_to_be_sent(layout: str, form: str) -> None:
    """In every layout, through two servers that cut a stack by its layers."""
    rng, leaves = np.random.default_rng(0), like(layout, 0)
    shares = partition(SPECS, 2)
    assert sum(("params", "stack", "w") in parts for parts in shares) == 2
    encoder = ShardEncoder(leaves, BITS[form])
    residual = {path: jax.device_put(np.zeros(x.shape, np.float32), x.sharding) for path, x in leaves.items()}
    sent = {path: np.zeros(spec.shape) for path, spec in SPECS.items()}
    wanted = {path: np.zeros(spec.shape) for path, spec in SPECS.items()}
    for _ in range(5):
        values = {path: rng.normal(size=spec.shape).astype(spec.dtype) for path, spec in SPECS.items()}
        pushed, residual = encoder(
            {path: jax.device_put(x, leaves[path].sharding) for path, x in values.items()}, residual
        )
        for parts in shares:
            pieces = pieces_of(pushed, parts)
            found = assemble(decoded(pieces), {path: part.spec(SPECS[path]) for path, part in parts.items()})
            for path, x in found.items():
                sent[path][parts[path].layers if x.ndim else ()] += x
        for path, x in values.items():
            wanted[path] += x.astype(np.float64)
    left = residual
    assert np.abs(left["params", "embed"]).max() > 0
    for path, spec in SPECS.items():
        assert left[path].sharding == leaves[path].sharding
        assert left[path].dtype == jnp.float32
        np.testing.assert_allclose(sent[path] + np.asarray(left[path]), wanted[path], atol=2e-5)
        if prod(spec.shape) < 1024:
            np.testing.assert_array_equal(np.asarray(left[path]), 0)
    of_embed = leaves["params", "embed"].sharding.shard_shape(SPECS["params", "embed"].shape)
    pieces = pieces_of(pushed, shares[0])["params", "embed"]
    assert {piece.values.nbytes for piece in pieces} == {formula(of_embed, form)}


class Recorded:
    """What two islands were to push, and what the servers decoded."""

    def __init__(self, sync: dict[str, Any], monkeypatch: pytest.MonkeyPatch, meshes: list[dict[str, int]]) -> None:
        self.wanted: dict[Any, Any] = {}
        self.sent: dict[Any, Any] = {}
        self._lock = threading.Lock()
        call = ShardEncoder.__call__

        def recorded(encoder: ShardEncoder, arrays: Any, residual: Any) -> Any:
            self._add(self.wanted, {path: np.asarray(x, np.float64) for path, x in arrays.items()})
            return call(encoder, arrays, residual)

        monkeypatch.setattr(ShardEncoder, "__call__", recorded)
        config = run_config(sync, servers=2)
        with LocalServer(config) as server:
            hold = server.servers.hold

            async def held(refs: list[Any]) -> Any:
                found = await hold(refs)
                if server.coordinator._has_values:  # not the initial values
                    for flat in found.refs:
                        self._add(self.sent, flat)
                return found

            monkeypatch.setattr(server.servers, "hold", held)
            self.islands = train_islands(config, meshes, server, Rows())

    def _add(self, totals: dict[Any, Any], values: Any) -> None:
        with self._lock:
            for path, x in values.items():
                totals[path] = totals.get(path, 0.0) + np.asarray(x, np.float64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("strategy", ["bsp", "diloco"])
def test_over_a_run_nothing_is_lost_but_what_is_still_to_be_sent(
    strategy: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = gradients(strategy, form) if strategy == "bsp" else deltas(strategy, form)
    found = Recorded(sync, monkeypatch, [{"fsdp": 4}, {"model": 2}])
    for name in "amb":
        left = sum(np.asarray(state["sync"]["residual"][name], np.float64) for _, state in found.islands)
        assert (np.abs(left).max() > 0) == (name == "m")
        total = found.sent["params", name] + left
        np.testing.assert_allclose(
            total, found.wanted["params", name], atol=1e-5 * np.abs(found.wanted["params", name]).max()
        )


def public(server: LocalServer) -> Any:
    """The matrix as islands hold it, from the server's state."""
    (state,) = server.servers.states
    (matrix,) = state["public"]
    return matrix


def exact(server: LocalServer) -> Any:
    (state,) = server.servers.states
    return state["rule"]["params"]


@pytest.mark.parametrize("form", FORMATS)
def test_what_islands_hold_is_bitwise_what_the_server_has_made_public(form: str) -> None:
    """After each read, after missing several, after joining late and after joining again."""
    config = run_config(gradients("asp", form))
    whole = 4 * (64 * 64 + 2 * 4 * 64)
    message = formula((64, 64), form) + 4 * 2 * 4 * 64
    with LocalServer(config, Time()) as server:
        first, second = OneIsland(server, config, 0), OneIsland(server, config, 1)
        for island, steps, missed in ((first, 1, 0), (second, 2, 1), (first, 1, 2), (second, 1, 1), (first, 3, 1)):
            metrics = island.step(steps)
            np.testing.assert_array_equal(island.params["m"], public(server))
            for name in "ab":
                np.testing.assert_array_equal(island.params[name], exact(server)[name])
            size = message * (missed + 1 if steps == 1 else 1)
            assert metrics["exchanged_bytes"] == message
            assert metrics["received_bytes"] == (size if size < whole else whole)
        assert np.abs(public(server) - exact(server)["m"]).max() > 0
        held = first.params["m"]
        second.step(12)  # more messages than the whole is
        assert np.abs(held - public(server)).max() > 0
        assert first.step()["received_bytes"] == whole
        np.testing.assert_array_equal(first.params["m"], public(server))
        late = OneIsland(server, config, 1)
        late.step()
        np.testing.assert_array_equal(late.params["m"], public(server))
        again = server.coordinator.status()["islands"]["1"]["received_bytes"]
        assert late.step()["received_bytes"] == message
        assert server.coordinator.status()["islands"]["1"]["received_bytes"] - again == message


def test_an_island_that_joins_while_others_begin_reads_their_version() -> None:
    """Its values are newer than they were when it said hello."""
    config = run_config(gradients("asp", "int8"))
    with LocalServer(config, Time()) as server:
        first, second = OneIsland(server, config, 0), OneIsland(server, config, 1)
        first.step(3)
        assert second.clock == 0
        second.step()
        np.testing.assert_array_equal(second.params["m"], public(server))


def server_of(form: str, momentum: float = 0.0) -> ServerProcess:
    outer = OuterConfig(lr=0.5, momentum=momentum)
    specs = {("params", "w"): Spec((8, 300), jnp.float32), ("params", "b"): Spec((300,), jnp.float32)}
    return ServerProcess(ExchangeRule(SyncConfig(strategy="diloco", outer=outer), of_changes=True), specs, BITS[form])


HEADER = Header((0,), (1.0,), (1.0,), 0, 1.0, (True,))


@pytest.mark.parametrize("form", FORMATS)
def test_public_values_become_the_exact_ones_when_updates_stop(form: str) -> None:
    rng, server = np.random.default_rng(0), server_of(form)
    start = {("params", "w"): rng.normal(size=(8, 300)), ("params", "b"): rng.normal(size=300)}
    start = {path: x.astype(np.float32) for path, x in start.items()}
    state, given, message, _ = server.begin(start)
    assert not message
    np.testing.assert_array_equal(given["params", "w"], start["params", "w"])
    push = {path: np.float32(0.1) * rng.normal(size=x.shape).astype(np.float32) for path, x in start.items()}
    differences, held = [], given
    for _ in range(16):
        state, given, message, sizes = server.update(state, HEADER, push)
        held, push = with_message(held, message), {path: np.zeros_like(x) for path, x in push.items()}
        for path, x in given.items():
            np.testing.assert_array_equal(held[path], x)
        assert isinstance(message["params", "w"], EncodedBlock)
        assert sizes == (4 * 2700, formula((8, 300), form) + 4 * 300)
        differences.append(np.abs(given["params", "w"] - state["rule"]["params"]["w"]).max())
    np.testing.assert_array_equal(given["params", "b"], state["rule"]["params"]["b"])
    if form in ("int8", "int4"):  # half a gap, which is 2 / (codes - 1) of the largest difference
        assert all(after <= before / (CODES[form] - 1) * 1.01 + 3e-7 for before, after in pairwise(differences))
    assert differences[0] > 1e-5
    assert differences[-1] <= 5e-7


def test_public_values_are_saved_and_read_with_the_server(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), str(tmp_path / "state.npz")
    values = [
        {("params", "w"): rng.normal(size=(8, 300)).astype(np.float32), ("params", "b"): np.ones(300, np.float32)}
        for _ in range(3)
    ]
    server = server_of("int2", 0.9)
    state, *_ = server.begin(values[0])
    state, given, *_ = server.update(state, HEADER, values[1])
    server.save(state, file)
    loaded, again, message, _ = server_of("int2", 0.9).load(file)
    assert not message
    assert np.abs(again["params", "w"] - loaded["rule"]["params"]["w"]).max() > 0.01
    after, expected = (server.update(each, HEADER, values[2])[1] for each in (loaded, state))
    for path, x in given.items():
        np.testing.assert_array_equal(again[path], x)
        np.testing.assert_array_equal(after[path], expected[path])


def test_messages_are_kept_while_they_are_fewer_bytes_than_the_whole() -> None:
    kept = RecentMessages()
    assert kept.since(0, 0) == ([], 0)
    for version in range(1, 6):
        kept.add(version, [f"{version}"], 30, 100)
    assert kept.since(2, 5) == ([["3"], ["4"], ["5"]], 90)
    assert kept.since(5, 5) == ([], 0)
    for held in (None, 1, 0, 6):  # has none, has missed too much, is of another run
        assert kept.since(held, 5) is None
    kept.add(6, ["6"], 100, 100)
    assert kept.since(5, 6) is None


def test_nothing_is_kept_of_updates_without_messages() -> None:
    config = run_config(gradients("asp", "none"), 1)
    with LocalServer(config, Time()) as server:
        island = OneIsland(server, config, 0)
        island.step(3)
        assert server.coordinator.version == 3
        assert server.coordinator._messages.kept == {}


def losses_of(sync: dict[str, Any]) -> Any:
    """The mean loss of each step of two islands; those that do not wait take their steps in turns."""
    config = run_config(sync)
    with LocalServer(config, Time()) as server:
        if sync["strategy"] in ("asp", "async_diloco"):
            islands = [OneIsland(server, config, index) for index in range(2)]
            return np.array([np.mean([island.step()["loss"] for island in islands]) for _ in range(STEPS)])
        found = train_islands(config, [{}] * 2, server, Rows())
    return np.mean([losses for losses, _ in found], 0)


@pytest.mark.parametrize("strategy", ["bsp", "asp", "diloco", "async_diloco"])
def test_runs_in_8_bits_are_close_to_those_in_float32(strategy: str) -> None:
    of = gradients if strategy in ("bsp", "asp") else deltas
    theirs, ours = losses_of(of(strategy, "none")), losses_of(of(strategy, "int8"))
    assert theirs[-8:].mean() < 0.75 * theirs[:2].mean()
    assert abs(ours[-8:].mean() / theirs[-8:].mean() - 1) < 0.05


def test_one_island_in_8_bits_is_close_to_training_alone() -> None:
    """And closer with what is lost added the next time."""
    theirs, _ = one_program({}, {"strategy": "bsp"}, Rows(), model={"type": "tiny_net:Wide"}, optimizer=ADAMW)

    def distance(form: str, feedback: bool) -> float:
        config = run_config(gradients("bsp", form, error_feedback=feedback), 1).model_copy(update={"steps": 12})
        with LocalServer(config) as server:
            ((_, state),) = train_islands(config, [{}], server, Rows())
        assert ("sync" in state) == feedback
        return float(np.abs(state["params"]["m"] - theirs["m"]).mean())

    assert distance("int8", True) < min(1e-3, 0.9 * distance("int8", False))  # a step of Adam is 0.01
    assert distance("int4", True) < min(1e-2, 0.9 * distance("int4", False))


@pytest.mark.parametrize("sync", [gradients("bsp", "int4"), deltas("diloco", "int4")], ids=["bsp", "diloco"])
def test_what_is_left_is_part_of_the_state_of_a_checkpoint(sync: dict[str, Any], tmp_path: Path) -> None:
    config = run_config(sync, 1)
    with LocalServer(config, Time()) as server:
        island = OneIsland(server, config, 0)
        island.step(8)
    assert np.abs(island.state["sync"]["residual"]["m"]).max() > 0
    manifest = {"config": config.model_dump(mode="json")}
    for form in (island.island, island.program.saved_synchronizer(manifest)):
        expected = form.abstract(island.program.one)
        assert jax.tree.structure(expected) == jax.tree.structure(island.state)
        for want, have in zip(jax.tree.leaves(expected), jax.tree.leaves(island.state), strict=True):
            assert (want.shape, want.dtype) == (have.shape, have.dtype)
            assert want.sharding.is_equivalent_to(have.sharding, have.ndim)
    assert set(island.island.merge(island.state)) == set(island.program.one)
    with Checkpointer(tmp_path, keep=1, timeout=60) as checkpoints:
        checkpoints.save(8, island.state, manifest=manifest)
        checkpoints.wait()
        restored, _ = restore_checkpoint(checkpoints, island.program, 8)
    for ours, expected in zip(jax.tree.leaves(restored), jax.tree.leaves(island.state), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(expected))


@pytest.mark.parametrize("sync", [gradients("asp", "int4"), deltas("diloco", "int4", 1)], ids=["asp", "diloco"])
def test_a_push_that_is_not_finite_leaves_nothing_to_be_sent(sync: dict[str, Any]) -> None:
    config = run_config(sync, 1)
    with LocalServer(config, Time()) as server:
        island = OneIsland(server, config, 0)
        island.step(2)
        assert np.abs(island.state["sync"]["residual"]["m"]).max() > 0
        island.state["params"]["a"] = island.state["params"]["a"] * np.nan
        assert island.step()["left_out"] == 1
        np.testing.assert_array_equal(np.asarray(island.state["sync"]["residual"]["m"]), 0)
        np.testing.assert_array_equal(island.params["m"], public(server))
        island.step()
        assert np.isfinite(island.params["m"]).all()
        assert 0 < np.abs(island.state["sync"]["residual"]["m"]).max() < np.inf


def test_a_push_that_is_dropped_leaves_what_was_to_be_sent_before(time: Time) -> None:
    config = run_config(gradients("asp", "int4"))
    with LocalServer(config, time) as server:
        first, second = OneIsland(server, config, 0), OneIsland(server, config, 1)
        first.step(1)
        second.step(1)
        before = np.asarray(second.state["sync"]["residual"]["m"])
        time.now = 11.0
        first.island.client.beat()
        server.door.call("check_silence")
        first.step(2)
        second.step(1)
        assert server.coordinator.status()["islands"]["1"]["dropped"] == 1
        np.testing.assert_array_equal(np.asarray(second.state["sync"]["residual"]["m"]), before)
        np.testing.assert_array_equal(second.params["m"], public(server))


@pytest.fixture
def time() -> Time:
    return Time()


def test_without_feedback_nothing_is_kept_and_public_values_still_follow() -> None:
    config = run_config(gradients("asp", "int8", error_feedback=False), 1)
    with LocalServer(config, Time()) as server:
        island = OneIsland(server, config, 0)
        island.step(3)
        assert "sync" not in island.state
        np.testing.assert_array_equal(island.params["m"], public(server))
        largest = np.abs(exact(server)["m"] - public(server)).max()
        assert 0 < largest < 2e-4  # steps of 0.01 in 255 codes


def test_an_island_in_another_format_is_refused() -> None:
    config, other = run_config(gradients("asp", "int8")), run_config(gradients("asp", "int4"))
    with LocalServer(config, Time()) as server:
        OneIsland(server, config, 0)
        island = open_island(other, island_program(other, {}, 1), 1, server.door)
        with pytest.raises(UserError, match="island 1: its sync is"):
            island.client.join()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["islands.count=2", "sync.compress.gradients=powersgd"],
            "sync.compress.gradients: islands send blocks of values, not powersgd; expected none, int8, fp8, int4 or "
            "int2",
        ),
        (["islands.count=2", "sync.compress.gradients=topk"], "not topk; expected none, int8, fp8, int4 or int2"),
        (["islands.count=2", "sync.compress.weights=int8"], "weights: islands gather weights as they are stored"),
        (["islands.count=2", "sync.compress.secondary=2"], "secondary: islands gather weights as they are stored"),
        (
            ["islands.count=2", "sync.strategy=asp", "sync.compress.deltas=int8"],
            "sync.compress.deltas: asp exchanges gradients; expected none (see sync.compress.gradients), or "
            "sync.strategy=diloco",
        ),
        (
            ["islands.count=2", "sync.strategy=async_diloco", "sync.every=10", "sync.compress.gradients=int8"],
            "sync.compress.gradients: async_diloco exchanges changes of parameters; expected none "
            "(see sync.compress.deltas), or bsp",
        ),
        (
            ["sync.strategy=ssp", "sync.compress.gradients=int8"],
            "sync.compress: ssp of replicas of one program sends float32; expected no compression, or islands",
        ),
    ],
)  # fmt: skip
def test_what_islands_cannot_do_is_refused_in_a_line(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as found:
        jaxtrain.load("quickstart", *overrides)
    lines = [line for line in str(found.value).splitlines() if "sync.compress" in line]
    assert len(lines) == 1
    assert message in lines[0]
