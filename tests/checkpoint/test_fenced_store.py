"""Saves of launched jobs with a consensus store: those of a generation that was given up do not count."""

from __future__ import annotations

import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from memory_store import MemoryStore

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.checkpoint.events import Committed, Retrying, SaveFailed
from jaxtrain.checkpoint.files import Lock
from jaxtrain.checkpoint.store import FencedStore
from jaxtrain.distributed import save_fence as fences
from jaxtrain.distributed.job_store import JobStore
from jaxtrain.distributed.save_fence import SaveFence, save_fence
from jaxtrain.errors import CheckpointError


class Job:
    """Job whose leader is the test, and the folder of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder / "checkpoints", MemoryStore()
        self.jobs = JobStore(self.store, "/job")
        self.leadership = self.jobs.lead("host", 1, self.store.grant_lease(1))
        self.generation = self.saved_at = 0

    def begin(self) -> SaveFence:
        """Starts the next generation."""
        self.generation += 1
        number = self.jobs.begin_generation(self.leadership, self.saved_at, self.generation, f"state {self.generation}")
        self.saved_at = number
        return SaveFence("etcd://nowhere:1", "/job", self.generation, number)

    def open(self, fence: SaveFence, **options) -> Checkpointer:
        return Checkpointer(self.folder, fence=fence, **{"waits": (), **options})

    def names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if not name.startswith("."))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    job = Job(tmp_path)
    monkeypatch.setattr(fences, "open_etcd", lambda url: job.store)
    return job


def save(checkpoints: Checkpointer, step: int) -> list:
    checkpoints.save(step, {"a": jnp.full(8, float(step))}, manifest={})
    checkpoints.finish()
    return checkpoints.poll()


def value(checkpoints: Checkpointer, step: int | None = None) -> float:
    state, _ = checkpoints.restore(step, {"a": jnp.zeros(8)})
    return float(state["a"][0])


def test_a_generation_that_was_given_up_changes_nothing(job: Job):
    with job.open(job.begin()) as old:
        assert isinstance(save(old, 1)[0], Committed)
        with job.open(job.begin()) as new:  # the first one's process was only stopped: it still has the lock
            assert new.latest() == 1
            events = save(old, 2)
            assert isinstance(events[0], SaveFailed)
            assert "a newer generation of this job has started" in str(events[0])
            assert job.names() == ["1"]
            assert isinstance(save(new, 2)[0], Committed)
            assert isinstance(save(old, 3)[0], SaveFailed)
            assert (new.latest(), job.names(), value(new)) == (2, ["1", "2"], 2.0)


def stop(*_: object) -> None:
    raise OSError("the process does not go on")


def test_a_save_that_was_recorded_counts_although_its_process_stopped_there(job: Job, monkeypatch: pytest.MonkeyPatch):
    old = job.open(job.begin())
    save(old, 1)
    with monkeypatch.context() as patch:
        patch.setattr(FencedStore, "_rename", stop)
        patch.setattr(old._saver, "_clean_up", lambda step, reason: reason)
        old.save(2, {"a": jnp.full(8, 2.0)}, manifest={})
        old.wait()
    assert job.names() == ["1", "2.generation-1"]
    with job.open(job.begin()) as new:
        assert (new.latest(), job.names(), value(new)) == (2, ["1", "2"], 2.0)
        old.store._rename(old.store.writing_path(2), 2)  # the old process wakes
        assert (job.names(), value(new)) == (["1", "2"], 2.0)


def test_what_was_not_recorded_is_deleted_but_not_what_a_newer_generation_writes(job: Job):
    fences = [job.begin(), job.begin(), job.begin()]
    for fence in fences:
        (job.folder / f"7.generation-{fence.generation}").mkdir(parents=True)
        (job.folder / f"7.generation-{fence.generation}.orbax-checkpoint-tmp-1").mkdir()
    with job.open(fences[1]):
        assert job.names() == ["7.generation-3", "7.generation-3.orbax-checkpoint-tmp-1"]
    with Checkpointer(job.folder):  # a run without a store
        assert job.names() == []


def test_a_store_that_does_not_answer_costs_a_try(job: Job):
    with job.open(job.begin(), waits=(0.01,)) as checkpoints:
        save(checkpoints, 1)
        record = job.jobs.record_save
        tries = []

        def fail_once(jobs: JobStore, *given) -> None:
            tries.append(given)
            job.store.is_reachable = len(tries) > 1
            try:
                record(*given)
            finally:
                job.store.is_reachable = True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(JobStore, "record_save", fail_once)
            events = save(checkpoints, 2)
        assert [type(event) for event in events] == [Retrying, Committed]
        assert "not reachable" in events[0].reason
        assert job.names() == ["1", "2"]


def test_the_lock_of_another_run_is_respected(job: Job):
    job.folder.mkdir()
    lock = Lock(job.folder / ".lock")
    with pytest.raises(CheckpointError, match="is being written by process"):
        job.open(job.begin())
    lock.release()


def test_a_worker_learns_its_fence_from_its_environment():
    fence = SaveFence("etcd://a:1,b:2", "/job", 3, 44)
    assert save_fence({fences.VARIABLE: fence.as_text()}) == fence
    assert save_fence({}) is None
