"""Memory that loading needs, measured by the smallest case of its benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/import_memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs Linux's /proc")
def test_loading_needs_little_more_than_the_shards(tmp_path: Path):
    """Loads a model of 560 MB whose stacked feed-forward weights exceed the bound."""
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path / "out.json")]
    env = os.environ | {"JAX_COMPILATION_CACHE_DIR": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert row["shards"] == row["model"] > 5 * 10**8
    assert row["peak"] > row["shards"]
    assert row["besides"] < 1.5 * row["largest"], row
