"""Two real processes decide alike: they skip, go back, save again and stop together; a fault is one's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from faults import debug

from jaxtrain.config import dump_yaml

# Several runs, one after the other: starting Python and JAX takes longer than any of them.
SCRIPT = """
import sys
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.cli.main import main
Checkpointer.__init__.__kwdefaults__["waits"] = (0.05,)
codes = [main(["train", f"{name}.yaml"]) for name in sys.argv[1:]]
print("codes", *codes, flush=True)
"""


def launch(place: Path, *names: str) -> list[tuple[str, str]]:
    """What each of two processes said on stdout and stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    base = {k: v for k, v in os.environ.items() if k != "JAX_NUM_CPU_DEVICES"}
    path = os.pathsep.join([str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")])
    running = []
    for index in range(2):
        here = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "-c", SCRIPT, *names]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, cwd=place, env=base | here | {"PYTHONPATH": path}, **pipes))
    return [process.communicate(timeout=250) for process in running]


def test_two_processes_decide_alike(tmp_path):
    bad = {"spikes": [25], "broken": [30]}
    back = {
        "steps": 40,
        "guard": {
            "spike": {"action": "rollback", "threshold": 20.0, "rollback_steps": 4, "skip_batches": 4},
            "replica_check_every": 8,
        },
        "data": {"options": bad},
        "simulate": 4,
    }
    small = {"mesh": {"data": 4}}
    until = {"options": {"until": [31, str(tmp_path / "full/checkpoints")]}}
    full = {"steps": 50, "checkpoint": {"every": 30}, "data": until, "simulate": 4}
    configs = {
        "full": tiny.config(tmp_path, **full, **small, name="full", debug=debug("full_disk@30/1")),
        "back": tiny.config(tmp_path, **back, **small, name="back"),
        "flip": tiny.config(
            tmp_path, **small, simulate=4, name="flip", guard={"replica_check_every": 4}, debug=debug("flip@7/1")
        ),
    }
    for name, config in configs.items():
        (tmp_path / f"{name}.yaml").write_text(dump_yaml(config))
    outputs = launch(tmp_path, *configs)
    for out, err in outputs:
        assert "codes 0 0 1" in out, out + err
        (said,) = [line for line in err.splitlines() if line.startswith("jaxtrain: ")]
        assert "silent corruption at step 7: params/" in said
        assert ", process 1" in said
        assert said.endswith("checkpoint 4 is the last good one")
    first, last = tiny.events(tmp_path / "full", "save")
    assert 34 <= first["step"] < 50
    assert (first["tries"], last["step"], last.get("tries")) == (2, 50, None)
    assert tiny.saved(tmp_path / "full") == [first["step"], 50]
    (warning,) = tiny.events(tmp_path / "full", "warning")
    assert warning["text"].startswith("checkpoint 30 could not be written: process 1: the disk is full")
    assert warning["text"].endswith("trying again in 0.05 s (2 of 2)")
    assert [event["step"] for event in tiny.events(tmp_path / "back", "rollback")] == [20]
    assert [event["step"] for event in tiny.events(tmp_path / "back", "skipped")] == [27]
    assert [json.loads(line)["fault"] for line in (tmp_path / "flip/faults.jsonl").read_text().splitlines()] == [
        "flip@step:7/1"
    ]
    alone = tiny.train(tiny.config(tmp_path, **back | {"simulate": 8}, name="alone"))
    expected, got = (list(tiny.losses(run).values()) for run in (alone.run_dir, tmp_path / "back"))
    finite = [index for index, loss in enumerate(expected) if loss != "nan"]
    assert len(finite) == len(got) - 1 == 39
    assert [got[i] for i in finite] == pytest.approx([expected[i] for i in finite], rel=1e-5)
