"""Runs of a linear model on each kind of data, for tests of one and of several processes."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtrain

ROWS, STEPS, STOP = 8, 11, 5  # rows of a batch, steps of a run, and where it is interrupted
START = np.ones((4, 2), np.float32)
TARGET = np.arange(8, dtype=np.float32).reshape(4, 2)


class Linear(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.ones((4, 2)), out_sharding=(None, "mlp"))

    def __call__(self, x):
        return x @ self.weight


def squares(model, batch):
    return jnp.square(model(batch["x"]) - batch["y"]).mean()


def batch_of(step: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(step).standard_normal((ROWS, 4)).astype(np.float32)
    return {"x": x, "y": x @ TARGET}


def batches(count: int = 100, first: int = 0) -> Iterator[dict[str, np.ndarray]]:
    for step in range(first, count):
        yield batch_of(step)


class ByStep:
    """`batch(step, rows)`."""

    def batch(self, step, rows=None):
        return {key: value if rows is None else value[rows] for key, value in batch_of(step).items()}


class Counting:
    """An iterable whose iterator has a state; counts the batches that are read of all its iterators."""

    def __init__(self, count: int = 100) -> None:
        self.count, self.read = count, 0

    def __iter__(self):
        return CountingIterator(self)


class CountingIterator:
    def __init__(self, data: Counting) -> None:
        self.data, self.next = data, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next >= self.data.count:
            raise StopIteration
        self.next, self.data.read = self.next + 1, self.data.read + 1
        return batch_of(self.next - 1)

    def get_state(self):
        return {"next": self.next, "bytes": b"\x00\xff", "pair": (1, np.arange(2))}

    def set_state(self, state):
        assert state["bytes"] == b"\x00\xff"
        assert state["pair"][0] == 1
        self.next = state["next"]


def columns(count: int = 20) -> dict[str, np.ndarray]:
    """All rows of some batches."""
    found = list(batches(count))
    return {key: np.concatenate([batch[key] for batch in found]) for key in ("x", "y")}


def grain_batches():
    import grain

    rows = columns()
    source = grain.MapDataset.range(len(rows["x"])).shuffle(seed=3)
    return source.map(lambda i: {key: value[i] for key, value in rows.items()}).batch(ROWS, drop_remainder=True)


def grain_loader():
    import grain

    class Read(grain.transforms.Map):
        def map(self, element):
            return {key: value[element] for key, value in columns().items()}

    sampler = grain.samplers.IndexSampler(160, shuffle=True, seed=3, num_epochs=1)
    operations = [Read(), grain.transforms.Batch(ROWS, drop_remainder=True)]
    return grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 160, 1), sampler=sampler, operations=operations, worker_count=0
    )


def datasets_rows():
    import datasets

    return datasets.Dataset.from_dict({key: value.tolist() for key, value in columns().items()}).cast(
        datasets.Features(
            {"x": datasets.List(datasets.Value("float32")), "y": datasets.List(datasets.Value("float32"))}
        )
    )


def datasets_stream():
    return datasets_rows().to_iterable_dataset(num_shards=4).batch(ROWS)


class TorchRows:
    """A torch `Dataset` in all but its base: a length and an index."""

    def __len__(self):
        return 160

    def __getitem__(self, index):
        import torch

        return {key: torch.from_numpy(value[index]) for key, value in columns().items()}


def torch_loader():
    import torch

    rows = columns()
    items = [{key: value[i] for key, value in rows.items()} for i in range(160)]
    return torch.utils.data.DataLoader(items, batch_size=ROWS)


def torch_stateful_loader():
    from torchdata.stateful_dataloader import StatefulDataLoader

    rows = columns()
    return StatefulDataLoader([{key: value[i] for key, value in rows.items()} for i in range(160)], batch_size=ROWS)


# kind -> (what makes the data, the package it needs, how a resumed run finds its place)
SAVED, READ = "data: resumed from its saved state", f"data: resumed by reading over {STOP} batches"
KINDS: dict[str, tuple[Callable[[], Any], str | None, str | None]] = {
    "by step": (ByStep, None, None),
    "arrays": (columns, None, None),
    "function": (lambda: batches, None, READ),
    "generator": (lambda: batches(), None, READ),
    "list": (lambda: list(batches(20)), None, READ),
    "with state": (Counting, None, SAVED),
    "iterator with state": (lambda: iter(Counting()), None, SAVED),
    "grain": (grain_batches, "grain", SAVED),
    "grain loader": (grain_loader, "grain", SAVED),
    "datasets": (datasets_rows, "datasets", None),
    "datasets stream": (datasets_stream, "datasets", SAVED),
    "torch rows": (TorchRows, "torch", None),
    "torch loader": (torch_loader, "torch", READ),
    "torch stateful loader": (torch_stateful_loader, "torchdata", SAVED),
}


def missing(kind: str) -> str | None:
    """Returns the package that a kind of data needs and that is not here."""
    package = KINDS[kind][1]
    return package if package and importlib.util.find_spec(package) is None else None


def trainer(folder: Path, name: str, data: Any, console: Any = None, **more: Any) -> jaxtrain.Trainer:
    keys = {"name": name, "dir": str(folder), "steps": STEPS, "precision": "fp32", "log": {"tensorboard": False}} | more
    if "epochs" in keys:
        del keys["steps"]
    objects = {"model": Linear, "loss": squares, "optimizer": optax.sgd(0.1), "data": data, "console": console}
    return jaxtrain.Trainer({"data": {"global_batch": ROWS}}, **keys, **objects)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def plain_losses(data: list[dict[str, np.ndarray]]) -> list[float]:
    """The same run in NumPy."""
    weight, found = START, []
    for batch in data:
        error = batch["x"] @ weight - batch["y"]
        found.append(float(np.square(error).mean()))
        weight = weight - 0.1 * 2 * batch["x"].T @ error / error.size
    return found


def interrupt(run: jaxtrain.Trainer, at: int = STOP) -> None:
    """Trains for some steps; batches after them are read ahead."""
    for step in run.steps():
        if step.number == at:
            break


def launch(script: str, folder: Path, *arguments: str, count: int = 2, timeout: float = 280) -> list[tuple[int, str]]:
    """Runs a script of this folder in several processes. Returns the exit code and the output of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    base = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    base["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    running = []
    for index in range(count):
        here = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), *arguments]
        running.append(
            subprocess.Popen(command, env=base | here, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        return [(process.wait(), output) for process in running for output in [process.communicate(timeout=timeout)[0]]]
    finally:
        for process in running:
            process.kill()
