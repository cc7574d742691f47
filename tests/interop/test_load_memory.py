"""Memory of loading, by the benchmark that measures it, at its smallest. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/import_memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_loading_takes_little_besides_the_shards(tmp_path: Path):
    """A model of 560 MB whose feed-forward weights are stacked to more than the bound."""
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path / "out.json")]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["shards"] == row["model"] > 5 * 10**8
    assert row["peak"] > row["shards"]
    assert row["besides"] < 1.5 * row["largest"], row
