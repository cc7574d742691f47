"""Cases of data for each of two processes, one after the other: starting Python and JAX takes longer than most of them.

Usage: data_processes.py FOLDER KINDS. Each process writes what it saw to FOLDER/results-N.json.
"""

import io
import json
import sys
from pathlib import Path

import data_runs
import jax
from data_runs import ROWS, batch_of, batches, interrupt, losses, trainer
from rich.console import Console

import jaxtrain
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trainer.data import batch_reader

jaxtrain.initialize(simulate=2)
folder, kinds, me = Path(sys.argv[1]), json.loads(sys.argv[2]), jax.process_index()
batch_reader.DIGEST_EVERY = 3
DDP = {"simulate": 2, "mesh": {"data": 2}}
results = {}


def shown():
    return ConsoleTracker(1, console=Console(file=io.StringIO(), width=200))


def attempt(name, data, resume=False, stop=None, **more):
    console, found = shown(), {}
    more = {"run_dir": folder / name, "resume": True} | more if resume else more
    run = trainer(folder, name, data, console=console, **(DDP | more))
    try:
        if stop:
            interrupt(run, stop)
        else:
            result = run.fit()
            found = {"step": result.step, "stopped_by": result.stopped_by}
            found["eval"] = result.metrics.get("eval/loss")
    except (jaxtrain.UserError, RuntimeError) as error:
        found = {"error": str(error), "kind": type(error).__name__}
    text = console.console.file.getvalue().splitlines()
    found["data"] = [line for line in text if line.startswith("data:")]
    steps = sorted(int(path.name) for path in (folder / name / "checkpoints").glob("[0-9]*"))
    results[name] = results.get(name, {}) | found | {"saved": steps}


def local(count=100):
    index, shards = jaxtrain.data_shard()
    results["shard"] = [index, shards]
    rows = ROWS // shards
    for step in range(count):
        yield {key: value[index * rows : (index + 1) * rows] for key, value in batch_of(step).items()}


class Local(data_runs.Counting):
    """Local rows, whose iterator has a state."""

    def __iter__(self):
        return LocalIterator(self)


class LocalIterator(data_runs.CountingIterator):
    def __next__(self):
        index, shards = jaxtrain.data_shard()
        rows = ROWS // shards
        return {key: value[index * rows : (index + 1) * rows] for key, value in super().__next__().items()}

    def get_state(self):
        return super().get_state() | {"process": me}

    def set_state(self, state):
        assert state["process"] == me
        super().set_state(state)


def bad(index, then):
    for step in range(100):
        if step == index and me == 1:
            if then is None:
                raise KeyError("missing")
            yield {key: value + then for key, value in batch_of(step).items()}
        else:
            yield batch_of(step)


for kind in kinds:
    make, name = data_runs.KINDS[kind][0], kind.replace(" ", "-")
    attempt(name, make(), stop=data_runs.STOP)
    attempt(name, make(), resume=True)
attempt("ends", lambda: batches(6 if me else 100))
attempt("ends-at-once", lambda: batches(2 if me else 100))
attempt("ends-both", lambda: batches(9 - me))
attempt("exact", lambda: batches(data_runs.STEPS))
attempt("raises", lambda: bad(6, None))
attempt("raises", lambda: batches(), resume=True)
attempt("raises-first", lambda: bad(0, None))
attempt("differs-first", lambda: bad(0, 1.0))
attempt("differs", lambda: bad(3, 1.0))
attempt("local", local, rows="local", stop=data_runs.STOP)
attempt("local", local, rows="local", resume=True)
results["local"]["shard"] = results.pop("shard")
attempt("local-ends", lambda: local(100 if me else 7), rows="local")
attempt("tensor", local, rows="local", mesh={"data": 1, "model": 2}, layout="tp")
results["tensor"]["shard"] = results.pop("shard")
attempt("local-state", Local(), rows="local", stop=data_runs.STOP)
attempt("local-state", Local(), rows="local", resume=True)
attempt("local-arrays", data_runs.columns(), rows="local")
attempt("eval", lambda: batches(), eval_data=lambda: batches(52 if me else 53, first=50), eval={"every": 4})
attempt(
    "by-step-raises",
    type(
        "Raises",
        (data_runs.ByStep,),
        {
            "batch": lambda self, step, rows=None: (
                1 / 0 if step == 7 and me else data_runs.ByStep.batch(self, step, rows)
            )
        },
    )(),
)
for name in list(results):
    if (folder / name / "metrics.jsonl").exists() and me == 0:
        results[name]["losses"] = losses(folder / name)
(folder / f"results-{me}.json").write_text(json.dumps(results))
