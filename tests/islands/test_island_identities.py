"""Islands through the server against one program: bit for bit where the sums are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_net
from local_islands import LocalServer, Rows, agreed, island_program, train_islands

from jaxtrain.core.placement import Placer
from jaxtrain.core.program import build_program
from jaxtrain.islands.rows import IslandRows

SUPPORT = Path(__file__).parents[1] / "support"
STEPS = 12
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.05, "betas": [0.9, 0.9]}
ADAMW: dict[str, Any] = {"name": "adamw", "lr": 0.02, "weight_decay": 0.1}
LEFT = {"type": "tiny_net:Left"}  # see there: bit for bit on any processor
MUON: dict[str, Any] = {"name": "muon", "lr": 0.02}
DILOCO = {"strategy": "diloco", "every": 3}


def one_program(mesh: dict[str, int], sync: dict[str, Any], data: Rows, **changes: Any) -> tuple[Any, list[float]]:
    """Trains replicas of one program; returns what they agree on, and the losses."""
    config = tiny_net.config(mesh=mesh, sync=sync, steps=STEPS, **changes)
    program = build_program(config, None, jax.devices()[: int(np.prod(list(mesh.values())))], tiny_net.rows(0))
    place = Placer(data.batch, program.sharder, tiny_net.ROWS, False)
    state, losses = program.init(), []
    for step in range(STEPS):
        state, metrics = program.step_at(step)(state, place(step))
        losses.append(float(metrics["loss"]))
    return jax.device_get(program.agreed(state)["params"]), losses


def of_islands(meshes: list[dict[str, int]], sync: dict[str, Any], data: Rows, **changes: Any) -> tuple[Any, Any]:
    """Trains islands; returns what each agrees on, and the mean of their losses."""
    islands = {"count": len(meshes), **changes.pop("islands", {})}
    config = tiny_net.config(sync=sync, islands=islands, steps=STEPS, **changes)
    with LocalServer(config) as server:
        found = train_islands(config, meshes, server, data)
    return [agreed(state) for _, state in found], np.mean([losses for losses, _ in found], 0)


def check(ours: Any, theirs: Any, rtol: float | None = None) -> None:
    for each in ours:
        for name, expected in theirs.items():
            if rtol is None:
                np.testing.assert_array_equal(each[name], expected)
            else:
                np.testing.assert_allclose(each[name], expected, rtol=rtol, atol=rtol)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW, MUON], ids=lambda each: each["name"])
@pytest.mark.parametrize("count", [2, 4])
def test_a_bound_of_0_is_bulk_synchronous_bit_for_bit(count: int, optimizer: dict[str, Any]) -> None:
    """Without clipping, which by the order in which XLA sums a norm differs between two programs already."""
    changes = {"model": LEFT, "optimizer": optimizer | {"grad_clip_norm": None}}
    theirs, losses = one_program({"replica": count}, {"strategy": "bsp"}, Rows(), **changes)
    for sync in ({"strategy": "bsp"}, {"strategy": "ssp", "stale": {"bound": 0}}):
        ours, mean = of_islands([{}] * count, sync, Rows(), **changes)
        check(ours, theirs)
        np.testing.assert_allclose(mean, losses, rtol=1e-6)


def test_clipping_and_uneven_tokens_are_those_of_the_whole_batch() -> None:
    changes = {"optimizer": ADAMW | {"grad_clip_norm": 0.5}}
    data = Rows(weights="uneven")
    theirs, _ = one_program({"replica": 2}, {"strategy": "bsp"}, data, **changes)
    for servers in (1, 2):
        ours, _ = of_islands([{}, {}], {"strategy": "bsp"}, data, islands={"servers": servers}, **changes)
        check(ours, theirs, 2e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("servers", [0, 2])
@pytest.mark.parametrize("weights", ["even", "uneven"])
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("strategy", ["diloco", "local_sgd"])
def test_rounds_are_those_of_one_program(strategy: str, count: int, weights: str, servers: int) -> None:
    """To rounding: programs of tests are compiled in a cheap way, which fuses fewer products with sums."""
    sync, changes, data = DILOCO | {"strategy": strategy}, {"optimizer": ADAMW}, Rows(weights=weights)
    theirs, losses = one_program({"replica": count}, sync, data, **changes)
    ours, mean = of_islands([{}] * count, sync, data, islands={"servers": servers}, **changes)
    check(ours, theirs, 2e-6)
    if weights == "even":
        np.testing.assert_allclose(mean, losses, rtol=1e-6)


def test_rounds_are_those_of_one_program_bit_for_bit_when_compiled_as_in_use() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(SUPPORT / "island_identities.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    differences = json.loads(done.stdout.splitlines()[-1])
    assert len(differences) == 15
    assert differences == dict.fromkeys(differences, 0.0)


def test_islands_of_different_layouts_are_islands_of_one() -> None:
    changes = {"optimizer": ADAMW}
    alike, _ = of_islands([{}, {}], DILOCO, Rows(), **changes)
    for servers in (0, 2):
        mixed, _ = of_islands([{"fsdp": 4}, {"model": 2}], DILOCO, Rows(), islands={"servers": servers}, **changes)
        check(mixed, alike[0], 2e-6)
    stale, _ = of_islands([{}, {}], {"strategy": "bsp"}, Rows(), **changes)
    mixed, _ = of_islands([{"fsdp": 2, "model": 2}, {"data": 2}], {"strategy": "bsp"}, Rows(), **changes)
    check(mixed, stale[0], 2e-6)


@pytest.mark.parametrize("strategy", ["asp", "bsp"])
def test_one_island_is_training_alone(strategy: str) -> None:
    """Serial SGD: nothing is between its read and its push."""
    changes = {"optimizer": ADAMW | {"grad_clip_norm": 0.5}}
    theirs, losses = one_program({}, {"strategy": "bsp"}, Rows(), **changes)
    ours, mean = of_islands([{}], {"strategy": strategy}, Rows(), **changes)
    check(ours, theirs, 1e-6)
    np.testing.assert_allclose(mean, losses, rtol=1e-6)


def test_moving_averages_are_those_of_one_program() -> None:
    changes = {"model": LEFT, "optimizer": SGD | {"grad_clip_norm": None, "ema_decay": 0.5}}
    config = tiny_net.config(mesh={"replica": 2}, steps=STEPS, **changes)
    program = build_program(config, None, jax.devices()[:2], tiny_net.rows(0))
    place, state = Placer(Rows().batch, program.sharder, tiny_net.ROWS, False), program.init()
    for step in range(STEPS):
        state, _ = program.step(state, place(step))
    run = tiny_net.config(sync={"strategy": "bsp"}, islands={"count": 2}, steps=STEPS, **changes)
    with LocalServer(run) as server:
        found = train_islands(run, [{}, {}], server)
    for _, ours in found:
        for name, expected in state["ema"].items():
            np.testing.assert_allclose(ours["ema"][name], expected, rtol=1e-6)


def test_the_bound_holds_between_islands_of_different_speeds() -> None:
    """The clocks that the server logs, of islands that really sleep."""
    sync = {"strategy": "ssp", "stale": {"bound": 2}}
    config = tiny_net.config(sync=sync, islands={"count": 4}, steps=20, optimizer=SGD)
    with LocalServer(config) as server:
        train_islands(config, [{}] * 4, server, pauses=lambda island, step: 0.02 * (island == 3) + 0.002 * island)
        pushes = server.pushes()
    assert len(pushes) == 4 * 20
    assert max(push["ahead"] for push in pushes) <= 2
    assert max(push["ahead"] for push in pushes if push["island"] != 3) == 2  # they were held back
    assert max(push["staleness"] for push in pushes) > 0


def test_the_rows_of_islands_are_those_of_the_batch() -> None:
    config = tiny_net.config(sync=DILOCO, islands={"count": 4})
    program = island_program(config, {}, 0)
    assert program.config.data.global_batch == tiny_net.ROWS // 4
    whole = Rows().batch(3)
    parts = [IslandRows(Rows(), island, 4) for island in range(4)]
    for name, values in whole.items():
        np.testing.assert_array_equal(np.concatenate([part.batch(3)[name] for part in parts]), values)
        np.testing.assert_array_equal(parts[2].batch(3, slice(1, 3))[name], values[9:11])
