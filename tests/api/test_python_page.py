"""The example in docs/python.md runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "python.md"


def test_the_example_learns(tmp_path: Path):
    first = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    (tmp_path / "train.py").write_text(first)
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env["PYTHONPATH"] = str(PAGE.parents[1])
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    loss = float(done.stdout.splitlines()[-8].split()[0])
    assert loss < 1e-3, done.stdout[-500:]
    assert (tmp_path / "runs" / "run" / "checkpoints" / "100").is_dir()
