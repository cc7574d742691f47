"""Verdicts where code that compiles fast loses a part of the gradient of a maximum: the code that trains decides."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from regression import Linear, Points, squares

import jaxtrain
from jaxtrain.verification import verify

TEMPLATES = Path(__file__).parents[2] / "configs" / "templates"


def test_a_maximum_behind_a_batch_norm_is_equal():
    """The classifier of `jaxtrain init`, in a process of its own: the flags of these tests compile fast, too."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    options = ["step.microbatches=1", "model.options={width: 8}", "--layouts", "ddp", "--steps", "1"]
    command = [sys.executable, "-m", "jaxtrain.cli.main", "verify", "classifier.yaml", *options]
    done = subprocess.run(command, cwd=TEMPLATES, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL: 2 layouts" in done.stdout


def test_the_second_recording_decides(monkeypatch):
    """One that differs in the code that compiles fast alone is equal; one that differs in both is not."""
    config = {"model": {"options": {}}, "data": {"global_batch": 16}}
    compiled = []  # (of several devices, as trained)

    class Faulty(verify.Recorder):
        def __init__(self, program, batch, as_trained=False):
            super().__init__(program, batch)
            self._is_wrong = program.layout.sizes.get("data", 1) > 1 and (not as_trained or wrong_in_both)
            compiled.append((program.layout.sizes.get("data", 1) > 1, as_trained))

        def record(self, batches):
            found = super().record(batches)
            changed = {path: 2 * array for path, array in found.gradients.items()}
            return replace(found, gradients=changed) if self._is_wrong else found

    monkeypatch.setattr(verify, "Recorder", Faulty)
    for wrong_in_both in (False, True):
        compiled.clear()
        outcome = jaxtrain.verify(
            config, layouts=["ddp"], devices=8, steps=1, model=Linear, loss=squares, data=Points()
        )
        assert outcome.is_equal is not wrong_in_both
        assert {(False, True), (True, True)} <= set(compiled)  # the reference and the layout, once more
