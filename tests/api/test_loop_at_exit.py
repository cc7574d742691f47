"""A program that ends or fails within a loop of `steps` that a variable still holds: it ends, and the run is saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import linear_config

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PROGRAM = """
import jaxtrain
steps = jaxtrain.Trainer({config!r}, steps=50, simulate=2, mesh={{"data": 2}}, checkpoint={{"every": 50}}).steps()
for step in steps:
    if step.number == 3:
        {end}
print("left")
"""


@pytest.mark.parametrize(("end", "code"), [("break", 0), ("raise KeyError('mine')", 1)])
def test_a_program_that_holds_its_loop_ends_and_the_run_is_saved(tmp_path: Path, end: str, code: int):
    text = PROGRAM.format(config=str(linear_config(tmp_path, tmp_path / "runs")), end=end)
    base = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env = base | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [base.get("PYTHONPATH")])])}
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("left" in done.stdout) == (code == 0)
    assert done.stderr.count("Traceback") == code
    assert [path.name for path in (tmp_path / "runs/run/checkpoints").iterdir() if path.name.isdigit()] == ["3"]
