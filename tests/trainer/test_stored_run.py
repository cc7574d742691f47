"""A run that version 0.1.0 wrote, with checkpoint format 1, opens and goes on in this version.

`python tests/trainer/test_stored_run.py` writes stored_run.tar.xz anew, which only a new format calls for: then the old
one stays beside it.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

STORED = Path(__file__).with_name("stored_run.tar.xz")
SAVED, STEPS = 8, 12


def test_it_goes_on_with_the_losses_of_a_run_that_never_stopped(tmp_path: Path):
    import tiny

    from jaxtrain.checkpoint.files import FORMAT
    from jaxtrain.checkpoint.store import CheckpointStore
    from jaxtrain.core.resolve import resolve

    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path, filter="data")
    run, expected = tmp_path / "run", json.loads((tmp_path / "losses.json").read_text())
    content = CheckpointStore(run / "checkpoints").read(SAVED)
    assert content["format"] == 1 <= FORMAT
    config, _ = resolve(run / "config.yaml", f"steps={STEPS}", f"dir={tmp_path}", paths=False, checks=())
    tiny.train(config, resume=True)
    found = tiny.losses(run)
    assert sorted(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([found[step] for step in sorted(found)], expected, rtol=1e-6)
    assert tiny.events(run, "resume")[-1]["step"] == SAVED


def store() -> None:
    """Writes the archive: a run of 8 steps, and the losses of one of 12."""
    import tiny

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        whole = tiny.train(tiny.config(folder, name="whole", steps=STEPS, log={"every": 1}))
        tiny.train(tiny.config(folder, name="run", steps=SAVED, log={"every": 1}, checkpoint={"every": SAVED}))
        losses = tiny.losses(whole.run_dir)
        (folder / "losses.json").write_text(json.dumps([losses[step] for step in sorted(losses)]))
        with tarfile.open(STORED, "w:xz") as archive:
            for name in ("losses.json", *(f"run/{part}" for part in ("config.yaml", "metrics.jsonl", "events.jsonl"))):
                archive.add(folder / name, name)
            archive.add(folder / "run/checkpoints" / str(SAVED), f"run/checkpoints/{SAVED}")


if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    store()
