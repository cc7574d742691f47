"""Islands as tasks of a job of a real Slurm, as docs/islands.md starts them; a requeued job goes on.

Needs root, Ray, and the packages slurm-wlm and munge.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from launched import free_address
from launched_islands import clocks
from small_islands import CONFIG
from test_slurm import said, slurm, until

__all__ = ["slurm"]
pytest.importorskip("ray", reason="islands on a cluster need Ray")
PAGE = Path(__file__).parents[2] / "docs/islands.md"


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_requeued_job_of_islands_goes_on(tmp_path: Path, slurm: dict[str, str]) -> None:
    text, config, job = tmp_path / "text.txt", tmp_path / "my.yaml", tmp_path / "job.sh"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    config.write_text(CONFIG.format(dir=tmp_path, text=text))
    script = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), re.DOTALL)
    assert script is not None
    line = script[1].replace("--islands 4", "--islands 2").replace("-N4", f"-N2 -o {tmp_path}/out")
    line = line.replace("PORT=6379", f"PORT={free_address().rpartition(':')[2]}")
    job.write_text(line.replace("my.yaml", f"{config} steps=100 islands.heartbeat=1"))
    environ = {**slurm, "PATH": os.pathsep.join([os.path.dirname(sys.executable), slurm["PATH"]])}
    environ |= {"PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    number = said(["sbatch", "--parsable", str(job)], environ)
    output = lambda: (tmp_path / "out").read_text() if (tmp_path / "out").exists() else "nothing"  # noqa: E731
    run, queue = tmp_path / "run", ["squeue", "-h"]
    try:
        until(lambda: min(clocks(run)) >= 8, output)
        said(["scontrol", "requeue", number], environ)
        until(lambda: not said([*queue, "-t", "running,completing"], environ), output)
        until(lambda: min(clocks(run)) >= 100, output)
        until(lambda: not said(queue, environ), output)
    finally:
        said(["scancel", number], environ)
        until(lambda: not said(queue, environ), output)
    assert "step 100" in output()
    assert not (tmp_path / "run-2").exists()
