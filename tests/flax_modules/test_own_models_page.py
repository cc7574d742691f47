"""The example in docs/own-models.md runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own-models.md"


def test_the_example_learns_and_is_the_same_on_another_layout(tmp_path: Path):
    for text in re.findall(r"```(?:python|yaml)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (tmp_path / re.match(r"# (\S+)", text)[1]).write_text(text)
    metrics = {}
    for layout in ("fsdp", "zero1"):
        command = [
            sys.executable,
            "-m",
            "jaxtrain.cli.main",
            "train",
            "mine.yaml",
            f"layout={layout}",
            f"name={layout}",
        ]
        env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
        env["PYTHONPATH"] = f"{tmp_path}:{PAGE.parents[1]}"
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-2000:]
        lines = (tmp_path / "runs" / layout / "metrics.jsonl").read_text().splitlines()
        metrics[layout] = [json.loads(line) for line in lines]
    losses = {layout: [row["loss"] for row in rows if "loss" in row] for layout, rows in metrics.items()}
    assert metrics["fsdp"][-1]["samples"] == 60 * 32
    assert "tokens_per_sec" not in metrics["fsdp"][-1]
    assert losses["fsdp"][-1] < 0.35 < losses["fsdp"][0]
    assert max(abs(a - b) for a, b in zip(losses["fsdp"], losses["zero1"], strict=True)) < 1e-3
