"""Commands run in this process, with a tiny run that a test can disturb after any step."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.callbacks.base import Callback
from jaxtrain.checkpoint import Checkpointer
from jaxtrain.cli.main import main

COMMON = """
name: run
dir: {dir}
simulate: 8
steps: 12
precision: fp32
layout: ddp
mesh: {{data: 8}}
optimizer: {{lr: 1.0e-2}}
checkpoint: {{every: 3, keep: 2}}
log: {{tensorboard: false, sample_tokens: 0}}
"""
LINEAR = """
model: {type: "tiny:Linear"}
data: {type: "tiny:Rows", global_batch: 8}
rules: {batch: data}
schedule: {name: constant}
"""
TEXT = """
model: {{embed: 16, layers: 1, heads: 1, mlp: 32}}
data:
  sources: [{{path: {corpus}}}]
  sequence: 32
  global_batch: 8
  validation_fraction: 0.1
  cache_dir: {cache}
  workers: 1
schedule: {{warmup_steps: 2}}
eval: {{every: 6, batches: 1}}
"""


@dataclass
class Done:
    """A command that has ended: its exit code, and the lines that it printed."""

    code: int
    out: list[str]
    err: list[str]

    def one_line(self) -> str:
        """The error, which must be one line."""
        (line,) = self.err
        assert line.startswith("jaxtrain: ")
        return line


class Commands:
    """Runs commands; `after_step` is called in a run after each of its steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.after_step: Callable[[int], Any] = lambda step: None
        self._capsys = capsys
        commands = self

        class Disturb(Callback):
            def on_step_end(self, trainer: Any, step: int) -> None:
                commands.after_step(step)

        monkeypatch.setattr("jaxtrain.callbacks.samples.Samples", Disturb)
        patient = functools.partial(Checkpointer, waits=(0.3,) * 3)
        monkeypatch.setattr("jaxtrain.trainer.setup.Checkpointer", patient)

    def __call__(self, *arguments: object) -> Done:
        self._capsys.readouterr()
        interrupt = signal.getsignal(signal.SIGINT)
        try:
            code = main([str(argument) for argument in arguments])
        finally:
            signal.signal(signal.SIGINT, interrupt)
        printed = self._capsys.readouterr()
        return Done(code, printed.out.splitlines(), printed.err.splitlines())


def linear_config(folder: Path, runs: Path) -> Path:
    """A config of a run of a second in `runs`, written to `folder`."""
    path = folder / "linear.yaml"
    path.write_text(COMMON.format(dir=runs) + LINEAR)
    return path


def text_config(folder: Path, runs: Path, cache: Path | None = None) -> Path:
    """A config of a language model of a few seconds in `runs`, written to `folder` with its text."""
    corpus, rng = folder / "corpus", random.Random(1)
    if not corpus.exists():
        corpus.mkdir()
        for index in range(30):
            words = (rng.choice("abcdefgh") * rng.randint(1, 9) for _ in range(rng.randint(10, 100)))
            (corpus / f"{index}.txt").write_text(" ".join(words))
    path = folder / f"text-{runs.parent.name}-{runs.name}.yaml"
    path.write_text((COMMON + TEXT).format(dir=runs, corpus=corpus, cache=cache or folder / "cache"))
    return path
