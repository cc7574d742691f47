"""The example in docs/own-models.md runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-models.md"


def write_files(folder: Path) -> None:
    for text in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / re.match(r"# (\S+)", text)[1]).write_text(text)


def run(folder: Path, *command: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env["PYTHONPATH"] = f"{folder}:{PAGE.parents[1]}"
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_example_learns_and_is_the_same_on_another_layout(tmp_path: Path):
    write_files(tmp_path)
    metrics = {}
    for layout in ("fsdp", "zero1"):
        run(tmp_path, "-m", "jaxtrain.cli.main", "train", "mine.yaml", f"layout={layout}", f"name={layout}")
        lines = (tmp_path / "runs" / layout / "metrics.jsonl").read_text().splitlines()
        metrics[layout] = [json.loads(line) for line in lines]
    losses = {layout: [row["loss"] for row in rows if "loss" in row] for layout, rows in metrics.items()}
    assert metrics["fsdp"][-1]["samples"] == 60 * 32
    assert "tokens_per_sec" not in metrics["fsdp"][-1]
    assert losses["fsdp"][-1] < 0.35 < losses["fsdp"][0]
    assert max(abs(a - b) for a, b in zip(losses["fsdp"], losses["zero1"], strict=True)) < 1e-3


def test_the_script_and_the_weights_of_torch(tmp_path: Path):
    write_files(tmp_path)
    run(tmp_path, "script.py")
    assert (tmp_path / "runs" / "stripes" / "checkpoints" / "60").is_dir()
    rng = np.random.default_rng(0)
    shapes = {"conv.weight": (16, 1, 3, 3), "conv.bias": (16,), "head.weight": (2, 16), "head.bias": (2,)}
    shapes |= {f"norm.{name}": (16,) for name in ("weight", "bias", "running_mean", "running_var")}
    stored = {name: rng.uniform(0.1, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(stored | {"norm.num_batches_tracked": np.array(3, np.int64)}, tmp_path / "convnet.safetensors")
    printed = run(tmp_path, "-m", "jaxtrain.cli.main", "train", "continued.yaml", "steps=1", "eval.every=1")
    assert "weights   8 of 8 variables" in printed
    assert "norm.num_batches_tracked" in printed
