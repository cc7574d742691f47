"""Time and loss of `jaxtrain train quickstart` in an empty folder, with empty caches.

python benchmarks/quickstart.py [--out FILE]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Runs the command and prints the table."""
    parser = common.parser(__doc__)
    args = parser.parse_args()
    words = ["steps=20", "schedule.warmup_steps=5", "eval.every=20", "checkpoint.every=20"] if args.quick else []
    with tempfile.TemporaryDirectory() as name:
        env = os.environ | {"HOME": name, "XDG_CACHE_HOME": f"{name}/cache", "PYTHONPATH": str(ROOT)}
        begin = time.perf_counter()
        command = [sys.executable, "-m", "jaxtrain.cli.main", "train", "quickstart", *words]
        subprocess.run(command, cwd=name, env=env, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - begin
        lines = (Path(name) / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    result = {"seconds": seconds, "steps": records[-1]["step"], "eval/loss": losses[-1]}
    print(common.title(common.machine()))
    print(common.table([result]))
    common.report("quickstart", args, result, common.machine())


if __name__ == "__main__":
    main()
