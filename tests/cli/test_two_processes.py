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
from jaxtrain.mesh.devices import make_mesh
from jaxtrain.mesh.layout import resolve
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.train.batches import Placer

CONFIG = """
name: run
dir: {dir}/runs
simulate: 4
steps: 6
precision: fp32
layout: fsdp_tp
mesh: {{fsdp: 2, model: 2}}
model: {{embed: 32, layers: 2, heads: 2, mlp: 64}}
data:
  sources: [{{path: {dir}/corpus}}]
  sequence: 32
  global_batch: 4
  cache: {dir}/cache
  workers: 1
  validation: 0.2
optimizer: {{lr: 1.0e-3}}
checkpoint: {{every: 3}}
compile_cache: null
"""


def launch(place: Path, name: str, count: int) -> list[subprocess.CompletedProcess]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    base = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    running = []
    for index in range(count):
        here = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-m", "jaxtrain.cli.main", "train", "config.yaml", f"name={name}"]
        running.append(
            subprocess.Popen(
                command, cwd=place, env=base | here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    results = [(process, *process.communicate(timeout=300)) for process in running]
    return [subprocess.CompletedProcess(p.args, p.returncode, out, err) for p, out, err in results]


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r]


def test_two_processes_equal_one(tmp_path):
    (tmp_path / "corpus").mkdir()
    rng = random.Random(1)
    for index in range(50):
        (tmp_path / "corpus" / f"{index}.txt").write_text("".join(rng.choices("abcdef ", k=rng.randint(50, 400))))
    (tmp_path / "config.yaml").write_text(CONFIG.format(dir=tmp_path))
    (one,) = launch(tmp_path, "one", 1)
    assert one.returncode == 0, one.stderr
    first, second = launch(tmp_path, "two", 2)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    # Gloo's threads write over each other's lines.
    quiet = [line for line in second.stdout.splitlines() if line and "[Gloo]" not in line and "peer ranks" not in line]
    assert quiet == []
    expected, got = losses(tmp_path / "runs/one"), losses(tmp_path / "runs/two")
    assert len(got) == 6
    assert got == pytest.approx(expected, rel=1e-5)


def test_a_process_asks_only_for_its_rows(monkeypatch):
    """As seen from a process that holds half of the devices."""
    cfg = Config(mesh={"data": 4, "model": 2}, rules={"batch": "data"})
    sharder = Sharder(make_mesh(resolve(cfg, 8), jax.devices()), cfg.rules)
    asked = []

    def fetch(step, rows):
        asked.append(rows)
        return {"x": np.arange(16).reshape(8, 2)[rows]}

    mine = {jax.devices()[i]: (slice(0, 2) if i < 2 else slice(2, 4),) for i in range(4)}
    with monkeypatch.context() as patch:
        patch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", lambda self, shape: mine)
        placer = Placer(fetch, sharder, 8, sequence=False)
    np.testing.assert_array_equal(placer.local, [0, 1, 2, 3])
