"""A model and data so small that a whole run takes a second, and what the tests read of a run's folder."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

import jaxtrain
from jaxtrain.checkpoint import CheckpointStore
from jaxtrain.config.schema import Config
from jaxtrain.nn.env import constant
from jaxtrain.trackers.console import ConsoleTracker

SIZE = 24


class Linear(nnx.Module):
    """y ~ x w + b."""

    def __init__(self, *, env, rngs):
        self.env = env
        self.w = env.param(rngs, ("features",), (SIZE,), constant(0.0))
        self.b = env.param(rngs, (None,), (8,), constant(0.0))

    def loss(self, batch, key):
        error = batch["x"] @ self.env.weight(self.w) + self.env.weight(self.b).sum() - batch["y"]
        return {"square": (jnp.sum(error**2), jnp.float32(error.size))}


class Rows:
    """Random rows by batch; the targets of some batches are far off, and of some not finite."""

    def __init__(self, split, seed, global_batch, spikes=(), broken=(), until=None):
        """`until`: [step, folder]: batches from there on wait half a second each until a later checkpoint is there."""
        self.split, self.rows, self.spikes, self.broken = split, global_batch, spikes, broken
        self.until = until

    def batch(self, step, rows=None):
        if self.until and step >= self.until[0]:
            self._wait()
        rng = np.random.default_rng(step)
        x = rng.normal(size=(self.rows, SIZE)).astype(np.float32)
        y = (x.sum(1) + rng.normal(size=self.rows)).astype(np.float32)
        y = y * (1000 if step in self.spikes else 1) * (np.nan if step in self.broken else 1)
        if self.split == "train":
            SEEN.append(step)
        return {"x": x[rows], "y": y[rows].astype(np.float32)}

    def _wait(self):
        first, deadline = self.until[0], time.monotonic() + 0.5
        while (CheckpointStore(self.until[1]).latest() or 0) < first and time.monotonic() < deadline:
            time.sleep(0.01)


SEEN: list[int] = []  # batches that were read, in order


def config(tmp_path: Path, **changes) -> Config:
    base = {
        "dir": str(tmp_path), "steps": 12, "precision": "fp32", "simulate": 8,
        "model": {"type": "tiny:Linear"}, "data": {"type": "tiny:Rows", "global_batch": 8},
        "optimizer": {"lr": 1e-2}, "schedule": {"name": "constant"}, "layout": "ddp", "mesh": {"data": 8},
        "rules": {"batch": "data"}, "checkpoint": {"every": 4, "keep": 10}, "log": {"tensorboard": False},
    }  # fmt: skip
    return Config(**{k: {**base[k], **v} if isinstance(base.get(k), dict) else v for k, v in (base | changes).items()})


def train(config: Config, resume: bool = False, **options):
    screen = ConsoleTracker(config.steps, console=Console(file=io.StringIO(), width=200), live=False)
    return jaxtrain.train(config, run_dir=config.run_dir, resume=resume, console=screen, **options)


def records(run_dir: Path, name: str = "metrics") -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / f"{name}.jsonl").read_text().splitlines()]


def events(run_dir: Path, kind: str) -> list[dict]:
    return [event for event in records(run_dir, "events") if event["kind"] == kind]


def losses(run_dir: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(run_dir)}


def saved(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in (Path(run_dir) / "checkpoints").iterdir() if path.name.isdecimal())
