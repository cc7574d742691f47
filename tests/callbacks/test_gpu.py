"""On a GPU: a killed run goes on as if nothing had happened. Needs JAXTRAIN_TEST_PLATFORMS=cuda,cpu."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

KEYS = (
    "steps=30", "schedule.warmup_steps=5", "checkpoint.every=10", "checkpoint.keep_best=0", "eval.every=null",
    "simulate=null", "log.sample_tokens=0", "layout=ddp", "precision=bf16", "data.global_batch=16", "data.sequence=256",
    "data.cache_dir=cache", "model.embed=256", "model.heads=4", "model.kv_heads=4", "model.mlp=704",
)  # fmt: skip


def has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:
        return False


def run(folder: Path, *words: str) -> int:
    # Sums of the embedding's gradient add up in any order otherwise: XLA's own option, which the manual names.
    env = os.environ | {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env |= {"JAX_PLATFORMS": jax.devices()[0].platform.replace("gpu", "cuda")}
    command = [sys.executable, "-m", "jaxtrain.cli.main", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, timeout=240).returncode


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.skipif(not has_gpu(), reason="no GPU")
def test_a_killed_run_ends_as_if_nothing_had_happened(tmp_path):
    config = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    assert run(tmp_path, "train", config, *KEYS, "name=whole") == 0
    assert (
        run(tmp_path, "train", config, *KEYS, "name=killed", "debug.faults=[{kind: kill, step: 17}]") == -signal.SIGKILL
    )
    assert run(tmp_path, "resume", "runs/killed") == 0
    whole, killed = (losses(tmp_path / "runs" / name) for name in ("whole", "killed"))
    assert len(whole) == 30
    assert killed == whole
