"""Several processes on one folder: two writers, readers of what is deleted meanwhile, caches that two build."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from faulty_fs import mounted

from jaxtrain.checkpoint import Checkpointer, CheckpointReader, CheckpointStore, SaveFailed, SetAside, orbax
from jaxtrain.checkpoint import store as store_module
from jaxtrain.checkpoint.files import Lock, write_marker
from jaxtrain.cli.main import main
from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.token_cache import build as build_module
from jaxtrain.data.token_cache.build import build_cache
from jaxtrain.distributed.compile_cache import write_entries_atomically
from jaxtrain.errors import CheckpointError
from jaxtrain.io.atomic import write_atomic

SHARDING = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
LIKE = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=SHARDING)}


def save(folder: Path, *steps: int) -> None:
    with Checkpointer(folder, keep=9, waits=()) as checkpoints:
        for step in steps:
            checkpoints.save(step, {"w": jnp.full((64, 64), float(step))}, manifest={})


def restore(reader: CheckpointReader, step: int | None = None) -> float:
    found, _ = reader.restore(step, LIKE)
    assert float(found["w"].min()) == float(found["w"].max())
    return float(found["w"].min())


@pytest.mark.parametrize("moment", ["check", "read"])
def test_a_checkpoint_that_is_pruned_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str):
    save(tmp_path, 1, 2)
    real, name = (store_module.file_problem, "file_problem") if moment == "check" else (orbax.read, "read")
    pruned = []

    def prune_first(*args):
        if not pruned:
            pruned.append(CheckpointStore(tmp_path).delete("2") or save(tmp_path, 3))
        return real(*args)

    if moment == "check":
        monkeypatch.setattr(CheckpointStore.problem, "__defaults__", ((0, 1), prune_first))
        monkeypatch.setattr("jaxtrain.checkpoint.reader.file_problem", prune_first)
    else:
        monkeypatch.setattr(orbax, name, prune_first)
    with pytest.raises(CheckpointError) as error:
        restore(CheckpointReader(tmp_path), 2)
    assert str(error.value) == (
        f"checkpoint 2 was deleted while it was read: no checkpoint 2 in {tmp_path}; it has 1, 3"
    )
    CheckpointStore(tmp_path).delete("3")
    save(tmp_path, 2)
    pruned.clear()
    reader = CheckpointReader(tmp_path)
    assert restore(reader) == 3, "the newest one, whatever it is meanwhile"
    assert reader.poll() == [], "it is not damaged"


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a run does that was rewound: half of one and half of the other would be neither."""
    save(tmp_path, 2)
    read = orbax.read

    def replace_first(*args):
        CheckpointStore(tmp_path).delete("2")
        save(tmp_path, 2)
        return read(*args)

    monkeypatch.setattr(orbax, "read", replace_first)
    with pytest.raises(CheckpointError, match=r"checkpoint 2 in .* cannot be read: it was replaced while it was read"):
        restore(CheckpointReader(tmp_path), 2)


def test_a_reader_on_another_client_of_a_stale_file_system(tmp_path: Path):
    """Its names and attributes are cached, and open files that the other client deletes are stale."""
    with (
        mounted(tmp_path / "server", tmp_path / "one", stale=1.0) as one,
        mounted(tmp_path / "server", tmp_path / "other", stale=1.0) as other,
    ):
        save(one.path / "c", 1, 2)
        reader = CheckpointReader(other.path / "c")
        assert restore(reader) == 2
        CheckpointStore(one.path / "c").delete("2")
        assert restore(reader) == 1
        assert reader.poll() == []


def test_pruning_what_the_same_client_reads(tmp_path: Path):
    """NFS keeps an open file in its folder under another name, so that the folder cannot be deleted yet."""
    with mounted(tmp_path / "server", tmp_path / "shown") as shown:
        save(shown.path, 1, 2)
        store = CheckpointStore(shown.path)
        with open(store.path(1) / "state" / "_METADATA") as reader:
            store.delete("1")
            assert reader.read()
            assert store.folders() == [2]
            assert len(os.listdir(shown.path / ".trash")) == 1
        store.delete()
        assert os.listdir(shown.path / ".trash") == []


@pytest.mark.parametrize("when", ["check", "read"])
def test_a_read_error_at_restore(tmp_path: Path, when: str):
    with mounted(tmp_path / "disk", tmp_path / "shown") as shown:
        save(shown.path, 1, 2)
        shown.fail(errno.EIO, ("read",), match="/2/state/.*d/")
        with Checkpointer(shown.path) as checkpoints:
            if when == "check":
                assert checkpoints.latest_good() == 1
                (aside,) = checkpoints.poll()
                assert isinstance(aside, SetAside)
                assert "Input/output error" in str(aside)
                assert str(aside).endswith("bad-2")
            else:
                with pytest.raises(CheckpointError, match=r"checkpoint 2 in .* cannot be read: ") as error:
                    checkpoints.restore(2, LIKE, verify=False)
                assert "\n" not in str(error.value)
        assert shown.heal() > 0


HOLDER = """
import socket, sys, time
from pathlib import Path
from jaxtrain.checkpoint.files import Lock
if sys.argv[2:]:
    socket.sethostname(sys.argv[2])
lock = Lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(120)
"""


@pytest.mark.parametrize("host", ["", "another-host"])
def test_a_lock_is_refused_until_its_holder_is_dead(tmp_path: Path, host: str):
    other_host = ["unshare", "--user", "--map-root-user", "--uts"] if host else []
    if host and (not shutil.which("unshare") or subprocess.run([*other_host, "true"], check=False).returncode):
        pytest.skip("this user cannot have a host name of its own")
    command = [*other_host, sys.executable, "-c", HOLDER, str(tmp_path / ".lock"), *[host][: bool(host)]]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError) as error:
            Lock(tmp_path / ".lock")
        name = host or os.uname().nodename
        assert str(error.value).startswith(f"{tmp_path} is being written by process {holder.pid} on {name}: stop it")
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    Lock(tmp_path / ".lock").release()


def test_a_second_writer_that_no_lock_refused_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on a file system that does not tell other machines of locks."""
    first = Lock(tmp_path / ".lock")
    assert first.problem() is None
    monkeypatch.setattr("fcntl.flock", lambda *args: None)
    monkeypatch.setattr("socket.gethostname", lambda: "another-host")
    second = Lock(tmp_path / ".lock")
    assert first.problem() == f"{tmp_path} is now written by process {os.getpid()} on another-host"
    assert second.problem() is None
    (tmp_path / ".lock").unlink()
    assert first.problem() is None, "nobody else writes"
    second.release()
    first.release()


def test_a_folder_that_is_moved_during_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Orbax makes the folder anew, where nobody would look for the step."""
    folder, other, write = tmp_path / "run", tmp_path / "other", orbax.write
    monkeypatch.setattr(orbax, "write", lambda *args: (os.rename(folder, other), write(*args)))
    with Checkpointer(folder, waits=()) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(8)}, manifest={})
        checkpoints.wait()
        (failed,) = checkpoints.poll()
        assert isinstance(failed, SaveFailed)
        assert f"{folder} is gone: it was moved to {other}" in str(failed)
    assert CheckpointStore(folder).folders() == []


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize("has_locks", [True, False])
def test_several_builders_of_one_token_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool):
    """Without locks, and with the same process number, as containers on two machines may have."""
    (tmp_path / "corpus").mkdir()
    for index in range(40):
        (tmp_path / "corpus" / f"{index}.txt").write_text(f"{index} some text " * 300)
    source = SourceConfig(path=str(tmp_path / "corpus"))
    build_cache(source, "bytes", 0.1, tmp_path / "alone", shard_bytes=20_000)
    if not has_locks:

        def no_lock(*args):
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr("fcntl.flock", no_lock)
    problems, start = [], threading.Barrier(4)

    def build() -> None:
        start.wait(60)
        try:
            cache = build_cache(source, "bytes", 0.1, tmp_path / "cache", shard_bytes=20_000)
            cache.verify()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert problems == []
    assert files_of(tmp_path / "cache/tokens") == files_of(tmp_path / "alone/tokens")
    assert build_module._open_complete(next((tmp_path / "cache/tokens").iterdir())) is not None


def test_an_entry_of_the_compilation_cache_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from jax._src.lru_cache import LRUCache

    write_entries_atomically()
    cache, entry = LRUCache(str(tmp_path), max_size=-1), tmp_path / "key-cache"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OSError, match="No space left"):
            cache.put("key", b"a program")
    assert list(tmp_path.iterdir()) == []
    entry.write_bytes(b"a pro")  # left by a process that was killed, before entries were written whole
    cache.put("key", b"a program")
    assert cache.get("key") == b"a program"
    assert [path.name for path in tmp_path.iterdir()] == ["key-cache"]


def test_two_processes_of_one_number_write_a_file(tmp_path: Path):
    """Each writes its whole content, and the last one to be renamed stays."""
    contents, start = [bytes([letter]) * 300_000 for letter in b"abcd"], threading.Barrier(4)

    def write(content: bytes) -> None:
        start.wait(60)
        for _ in range(5):
            write_atomic(tmp_path / "file", content)
            assert (tmp_path / "file").read_bytes() in contents

    problems = []
    threads = [threading.Thread(target=lambda c=content: _collect(problems, write, c)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def _collect(problems: list[BaseException], function, *args) -> None:
    try:
        function(*args)
    except BaseException as error:
        problems.append(error)


def test_every_report_of_a_run_that_is_being_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Metrics and events end anywhere in a line, and a save is in progress."""
    whole = {
        "metrics.jsonl": "".join(f'{{"step": {step}, "loss": {9 - step}.5, "eval/loss": 2.5}}\n' for step in (1, 2, 3)),
        "events.jsonl": '{"time": "2026-01-01T00:00:00+00:00", "kind": "start", "name": "run", "steps": 9}\n'
        '{"time": "2026-01-01T00:00:09+00:00", "kind": "save", "step": 2, "size": "1 MiB", "seconds": 0.5}\n',
    }
    save(tmp_path / "checkpoints", 1)
    unfinished = tmp_path / "checkpoints/2"
    unfinished.mkdir()
    (unfinished / "half").write_text("half")
    for name, text in whole.items():
        last = text.rindex("\n", 0, -1) + 1
        for cut in range(last, len(text), 7):
            for other, content in whole.items():
                (tmp_path / other).write_text(content[:cut] if other == name else content)
            assert main(["report", str(tmp_path)]) == 0
            assert "of 9" in capsys.readouterr().out
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert "unfinished" in capsys.readouterr().out
    write_marker(unfinished, {"format": 1, "step": 2, "half": True})  # of a version that writes other fields
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
