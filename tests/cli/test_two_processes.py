"""Two real processes over gloo give the run of one process, write once, and read only their own rows."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.placement import Placer
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import resolve_layout
from jaxtrain.sharding.sharder import Sharder

CONFIG = """
dir: {dir}/runs
simulate: 4
steps: 6
precision: fp32
model: {{embed: 32, layers: 2, heads: 4, mlp: 64}}
data:
  sources: [{{path: {dir}/corpus}}]
  sequence: 32
  global_batch: 4
  cache_dir: {dir}/cache
  workers: 1
  validation_fraction: 0.2
optimizer: {{lr: 1.0e-3}}
checkpoint: {{every: 3}}
"""
EXPERTS = (
    "model.moe={num_experts: 4, top_k: 2, shared_experts: 1, capacity_factor: 1.25}",
    "model.moe.load_balance_loss=0.01",
)
# What one process trains, and two of which every axis but `model` spans both.
ALONE = {"dense": ("layout=fsdp_tp", "mesh.model=2"), "experts": ("layout=fsdp", *EXPERTS)}
TOGETHER = {
    "dense": {
        "fsdp_tp": ("layout=fsdp_tp", "mesh.model=2"),
        "cp_ring": ("layout=cp_ring",),
        "pp": ("layout=pp", "mesh.pipeline=2", "mesh.data=2", "step.microbatches=2"),
    },
    "experts": {"ep_tp": ("layout=ep_tp", "mesh.expert=2", *EXPERTS)},
}
PAIRS = [(kind, name) for kind, runs in TOGETHER.items() for name in runs]
# Runs, one after the other: starting Python and JAX takes longer than any of them.
SCRIPT = """
import json, sys, threading
from jax.experimental import multihost_utils
from jaxtrain.cli.main import main

gather = multihost_utils.process_allgather

def on_the_main_thread(*args, **options):
    assert threading.current_thread() is threading.main_thread(), "a collective beside the step's: it can hang"
    return gather(*args, **options)

multihost_utils.process_allgather = on_the_main_thread
for name, changes in json.loads(sys.argv[1]).items():
    if code := main(["train", "config.yaml", f"name={name}", *changes]):
        sys.exit(code)
"""


def launch(place: Path, runs: dict[str, tuple[str, ...]], count: int) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Code generation as cheap as in this process: compiling is most of the time.
    base = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    running = []
    for index in range(count):
        here = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-c", SCRIPT, json.dumps(runs)]
        running.append(
            subprocess.Popen(
                command, cwd=place, env=base | here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = [(process, *process.communicate(timeout=250)) for process in running]
    return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, out, err in results]


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r]


def trained(place: Path) -> None:
    """One process trains the runs of ALONE there, and a pair those of TOGETHER; the second says nothing."""
    (place / "corpus").mkdir()
    rng = random.Random(1)
    for index in range(50):
        (place / "corpus" / f"{index}.txt").write_text("".join(rng.choices("abcdef ", k=rng.randint(50, 400))))
    (place / "config.yaml").write_text(CONFIG.format(dir=place))
    (one,) = launch(place, ALONE, 1)
    assert one.returncode == 0, one.stderr
    first, second = launch(place, {name: changes for runs in TOGETHER.values() for name, changes in runs.items()}, 2)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    # Gloo's threads write over each other's lines.
    quiet = [line for line in second.stdout.splitlines() if line and "[Gloo]" not in line and "peer ranks" not in line]
    assert quiet == []


def test_two_processes_equal_one(tmp_path: Path):
    """All in one test, so that no two workers start processes for a part of them each."""
    trained(tmp_path)
    for kind, name in PAIRS:
        expected, got = losses(tmp_path / "runs" / kind), losses(tmp_path / "runs" / name)
        assert len(got) == 6, name
        assert got == pytest.approx(expected, rel=1e-5), name


def test_a_process_asks_only_for_its_rows(monkeypatch):
    """As seen from a process that holds half of the devices."""
    cfg = Config(mesh={"data": 4, "model": 2}, rules={"batch": "data"})
    sharder = Sharder(make_mesh(resolve_layout(cfg.layout, cfg.mesh, cfg.rules, 8), jax.devices()), cfg.rules)
    asked = []

    def fetch(step, rows):
        asked.append(rows)
        return {"x": np.arange(16).reshape(8, 2)[rows]}

    mine = {jax.devices()[i]: (slice(0, 2) if i < 2 else slice(2, 4),) for i in range(4)}
    with monkeypatch.context() as patch:
        patch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", lambda self, shape: mine)
        placer = Placer(fetch, sharder, 8, has_sequence=False)
    np.testing.assert_array_equal(placer.local_rows, [0, 1, 2, 3])
