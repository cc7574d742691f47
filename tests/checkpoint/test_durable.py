"""Durable tier in a folder and in an object store: verified copies from which a run is restored."""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointStore,
    Committed,
    Copied,
    CopyFailed,
    Fetched,
    Retrying,
    SetAside,
    files,
)
from jaxtrain.checkpoint.durable import (
    FolderTier,
    ObjectStoreTier,
    fetch_step,
    open_tier,
    run_location,
)
from jaxtrain.errors import DataError

SHAPE = (64, 64)


@pytest.fixture(params=["folder", "bucket", "s3"])
def place(request, tmp_path) -> str:
    """Where the tier is: nothing is there yet."""
    if request.param == "folder":
        return str(tmp_path / "far" / "run")
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/far/run"
    pytest.importorskip("fsspec", reason="needs fsspec (jaxtrain[remote])")
    return f"memory://{uuid.uuid4().hex}/run"


def state(step: int):
    return {"w": jnp.full(SHAPE, float(step)), "step": jnp.int32(step)}


def restored(checkpoints: Checkpointer, step: int | None = None) -> tuple[int, float]:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state(0))
    found, _ = checkpoints.restore(step, like)
    assert float(found["w"].min()) == float(found["w"].max())
    return int(found["step"]), float(found["w"].min())


def run(folder: Path, place: str, *steps: int, **options) -> list:
    with Checkpointer(folder, durable=place, **{"keep": 9, "waits": (), **options}) as checkpoints:
        for step in steps:
            checkpoints.save(step, state(step), manifest={"step": step}, metrics={"loss": 1.0 / step})
            checkpoints.wait()
            checkpoints._copier.wait()
        checkpoints.finish()
        return checkpoints.poll()


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(raw)


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damage(place: str, step: int) -> None:
    """Flips a bit in the largest file of a copy."""
    if "://" not in place:
        return flip(largest(Path(place) / str(step)))
    tier = open_tier(place)
    assert isinstance(tier, ObjectStoreTier)
    name = max(tier.content(step)["files"].items(), key=lambda item: item[1][0])[0]
    raw = bytearray(tier._fs.cat_file(tier._path(step, name)))
    raw[len(raw) // 2] ^= 4
    tier._fs.pipe_file(tier._path(step, name), bytes(raw))


def test_copies_are_made_when_due_and_of_the_last_step(tmp_path, place):
    events = run(tmp_path / "run", place, 2, 4, 6, 8, 9, durable_every=4)
    copied = [event for event in events if isinstance(event, Copied)]
    assert [event.step for event in copied] == [4, 8, 9]
    assert copied[0].fields().keys() == {"step", "to", "size", "seconds"}
    tier, here = open_tier(place), CheckpointStore(tmp_path / "run")
    assert tier.steps() == [4, 8, 9]
    for step in tier.steps():
        assert tier.marker(step) == (here.path(step) / files.MARKER).read_bytes()
        content = tier.content(step)
        assert len(content["files"]) > 5
        for name, expected in content["files"].items():
            assert tier.file_problem(step, name, expected) is None
            assert tier.open(step, name).read() == (here.path(step) / name).read_bytes()
    assert [info.step for info in here.steps()] == [2, 4, 6, 8, 9]


def test_each_tier_keeps_the_newest_and_the_best(tmp_path, place):
    with Checkpointer(tmp_path / "run", durable=place, keep=1, keep_best=1, best="loss", waits=()) as checkpoints:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5)):
            checkpoints.save(step, state(step), manifest={}, metrics={"loss": loss})
            checkpoints.wait()
            checkpoints._copier.wait()
    assert open_tier(place).steps() == [2, 4]
    assert set(CheckpointStore(tmp_path / "run").marked()) == {2, 4}


def test_a_lost_folder_is_restored(tmp_path, place):
    run(tmp_path / "run", place, 1, 2)
    shutil.rmtree(tmp_path / "run")
    with Checkpointer(tmp_path / "run", durable=place) as checkpoints:
        assert not checkpoints.is_empty()
        assert restored(checkpoints) == (2, 2.0)
        (event,) = checkpoints.poll()
        assert isinstance(event, Fetched)
        assert place.removeprefix("memory:/") in str(event)
        assert checkpoints.origin(2) == event.location
        assert checkpoints.save(3, state(3), manifest={})
        assert restored(checkpoints, 1) == (1, 1.0)
    assert [info.step for info in CheckpointStore(tmp_path / "run").steps()] == [1, 2, 3]


def test_a_damaged_step_is_replaced_by_its_copy_and_a_damaged_copy_by_the_step_before(tmp_path, place):
    run(tmp_path / "run", place, 1, 2)
    flip(largest(tmp_path / "run" / "2"))
    with Checkpointer(tmp_path / "run", durable=place) as checkpoints:
        assert restored(checkpoints) == (2, 2.0)
        aside, fetched = checkpoints.poll()
        assert isinstance(aside, SetAside)
        assert isinstance(fetched, Fetched)
    assert (tmp_path / "run" / "bad-2").is_dir()
    flip(largest(tmp_path / "run" / "2"))
    damage(place, 2)
    with Checkpointer(tmp_path / "run", durable=place) as checkpoints:
        assert restored(checkpoints) == (1, 1.0)
        first, second = checkpoints.poll()
        assert Path(first.path).name == "bad-2.1"
        assert "another checksum" in second.reason
        assert second.path is None
        assert checkpoints.origin(1) == str(tmp_path / "run")
        checkpoints.save(2, state(2), manifest={})
        checkpoints.finish()
        assert isinstance(checkpoints.poll()[-1], Copied), "the damaged copy is replaced"
    tier = open_tier(place)
    assert not any(tier.file_problem(2, *item) for item in tier.content(2)["files"].items())


def test_a_rewound_step_is_not_restored(tmp_path, place):
    run(tmp_path / "run", place, 1, 2, 3)
    with Checkpointer(tmp_path / "run", durable=place) as checkpoints:
        assert checkpoints.rewind(1) == [2, 3]
        assert restored(checkpoints) == (1, 1.0)
    assert open_tier(place).steps() == [1]


def failing(monkeypatch, times: int) -> None:
    """The next so many copies fail."""
    left = [times]
    for kind in (FolderTier, ObjectStoreTier):

        def put(self, step, source, real=kind.put):
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(errno.ETIMEDOUT, "the store does not answer")
            return real(self, step, source)

        monkeypatch.setattr(kind, "put", put)


def test_a_failing_store_is_retried_and_costs_copies_only(tmp_path, place, monkeypatch):
    failing(monkeypatch, 1)
    kinds = [type(event) for event in run(tmp_path / "run", place, 1, waits=(0.01,))]
    assert kinds == [Committed, Retrying, Copied]
    failing(monkeypatch, 100)
    events = run(tmp_path / "run", place, 2, 3, waits=(0.01,))
    assert [type(event) for event in events] == 2 * [Committed, Retrying, CopyFailed]
    assert "the store does not answer (2 tries)" in str(events[-1])
    assert CheckpointStore(tmp_path / "run").latest() == 3
    assert open_tier(place).steps() == [1]


def test_a_newer_copy_replaces_one_that_waits_for_its_retry(tmp_path, place, monkeypatch):
    failing(monkeypatch, 1)
    with Checkpointer(tmp_path / "run", durable=place, waits=(60.0,), keep=1) as checkpoints:
        checkpoints.save(1, state(1), manifest={})
        deadline = time.monotonic() + 30
        while not any(isinstance(event, Retrying) for event in checkpoints.poll()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert checkpoints._copier.held() == {1}
        checkpoints.save(2, state(2), manifest={})
        checkpoints.finish()
        assert [type(event) for event in checkpoints.poll() if not isinstance(event, Committed)] == [CopyFailed, Copied]
    assert open_tier(place).steps() == [2]


def test_a_step_is_kept_while_it_is_copied_and_remains_of_killed_copies_are_deleted(tmp_path, place, monkeypatch):
    goes_on = threading.Event()
    for kind in (FolderTier, ObjectStoreTier):
        monkeypatch.setattr(kind, "put", lambda *args, real=kind.put: (goes_on.wait(30), real(*args))[1])
    tier = open_tier(place)
    with Checkpointer(tmp_path / "run", durable=place, keep=1) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), manifest={})
            checkpoints.wait()
        assert [info.step for info in checkpoints.steps()] == [1, 2]
        if isinstance(tier, ObjectStoreTier):
            tier._fs.pipe_file(tier._path(77, "state/x"), b"left by a killed copy")
        else:
            (Path(place) / "77.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
        goes_on.set()
        checkpoints.finish()
        checkpoints.save(3, state(3), manifest={})
        checkpoints.finish()
        assert [event.step for event in checkpoints.poll() if isinstance(event, Copied)] == [1, 2, 3]
        assert [info.step for info in checkpoints.steps()] == [3]
    assert tier.steps() == [3]
    if isinstance(tier, ObjectStoreTier):
        assert tier._folders() == [3]
    else:
        assert sorted(os.listdir(place)) == [".trash", "3"]


def test_damage_during_the_copy_is_detected(tmp_path, place, monkeypatch):
    def write_wrong(source, target=None):
        if target is None:
            return files.digest(source)
        content = source.read()
        target.write(b"\0" + content[1:])
        return files.digest(io.BytesIO(content))

    monkeypatch.setattr("jaxtrain.checkpoint.durable.digest", write_wrong)
    event = run(tmp_path / "run", place, 1)[-1]
    assert isinstance(event, CopyFailed)
    assert "the copy is damaged" in event.reason
    assert open_tier(place).steps() == []


def test_an_unreadable_tier_does_not_count_as_empty(tmp_path, place, monkeypatch):
    for kind in (FolderTier, ObjectStoreTier):
        monkeypatch.setattr(kind, "steps", lambda self: (_ for _ in ()).throw(OSError(errno.EIO, "away")))
    with Checkpointer(tmp_path / "run", durable=place) as checkpoints:
        with pytest.raises(CheckpointError, match=r"cannot be listed: OSError: .*away"):
            checkpoints.is_empty()
        checkpoints.save(1, state(1), manifest={})
        assert restored(checkpoints) == (1, 1.0), "one tier is enough to go on"


def rewritten(folder: Path, **changes) -> None:
    """A marker with other content, and a right digest of it."""
    content = files.read_marker(folder) | changes
    files.write_marker(folder, content)


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "state/../../../outside", "state//x", ".", ""])
def test_a_marker_cannot_name_files_outside_of_its_step(tmp_path, name):
    run(tmp_path / "run", str(tmp_path / "far"), 1)
    (tmp_path / "outside").write_bytes(b"secret")
    expected = list(files.digest_file(tmp_path / "outside"))
    rewritten(tmp_path / "far" / "1", files={name: expected})
    tier, target = FolderTier(tmp_path / "far"), CheckpointStore(tmp_path / "other" / "deep")
    target.directory.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="which is outside of the checkpoint"):
        fetch_step(tier, 1, target)
    with pytest.raises(CheckpointError, match="which is outside of the checkpoint"):
        FolderTier(tmp_path / "third").put(1, tmp_path / "far" / "1")
    assert sorted(tmp_path.rglob("*")) == before
    assert "outside of the checkpoint" in (CheckpointStore(tmp_path / "far").problem(1) or "")


def test_a_link_cannot_lead_outside_of_its_step(tmp_path):
    run(tmp_path / "run", str(tmp_path / "far"), 1)
    name = largest(tmp_path / "run" / "1")
    name.rename(tmp_path / "outside")
    name.symlink_to(tmp_path / "outside")
    problem = CheckpointStore(tmp_path / "run").problem(1)
    assert problem is not None
    assert "a link that leaves the checkpoint" in problem


def test_locations(tmp_path, monkeypatch):
    assert run_location(None, tmp_path / "run") is None
    assert run_location("s3://bucket/x/", Path("runs/a")) == "s3://bucket/x/a"
    monkeypatch.chdir(tmp_path)
    assert run_location("far", Path(".")) == f"far/{tmp_path.name}"
    assert isinstance(open_tier(f"file://{tmp_path}"), FolderTier)
    with pytest.raises((CheckpointError, DataError), match="nosuch"):
        open_tier("nosuch://bucket/run")


def test_a_password_in_the_url_is_not_shown():
    pytest.importorskip("fsspec", reason="needs fsspec (jaxtrain[remote])")
    assert open_tier("memory://user:pass@host/run").location == "memory://host/run"


class Killed(BaseException):
    """Stands for kill -9: nothing in the package catches it, but `finally` runs."""


def step_of_small_files(store: CheckpointStore, step: int) -> None:
    folder = store.path(step)
    (folder / "state" / "d").mkdir(parents=True)
    names = ["a", "state/b", "state/d/c"]
    for name in names:
        (folder / name).write_bytes(bytes([step]) * 500)
    content = {
        "format": files.FORMAT,
        "step": step,
        "time": 0,
        "bytes": 1500,
        "files": files.flush_and_digest(folder, names),
    }
    files.write_marker(folder, content | {"manifest": {}, "metrics": {}, "tensors": {}})


def test_killed_before_any_file_operation_of_a_copy_only_whole_copies_are_listed(tmp_path, monkeypatch):
    """`finally` is what a kill does not run, so it is made to do nothing."""
    here = CheckpointStore(tmp_path / "run")
    for step in (1, 2):
        step_of_small_files(here, step)
    monkeypatch.setattr("jaxtrain.checkpoint.durable._remove", lambda path: None)
    for kill_at in range(1, 200):
        far = tmp_path / f"far{kill_at}"
        tier = FolderTier(far)
        tier.put(1, here.path(1))
        left = kill_at

        def patched(real):
            def operation(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    raise Killed
                return real(*args, **kwargs)

            return operation

        finished = False
        with monkeypatch.context() as patch:
            for name in ("rename", "mkdir", "fsync"):
                patch.setattr(os, name, patched(getattr(os, name)))
            try:
                tier.put(2, here.path(2))
                finished = True
            except Killed:
                pass
        assert tier.steps() in ([1], [1, 2])
        assert [CheckpointStore(far).problem(step) for step in tier.steps()] == [None] * len(tier.steps())
        tier.put(2, here.path(2))
        tier.clean()
        assert tier.steps() == [1, 2]
        assert sorted(os.listdir(far)) in (["1", "2"], [".trash", "1", "2"])
        shutil.rmtree(far)
        if finished:
            break
    assert finished
    assert kill_at > 12
