"""Runs on file systems that are slow, stale, full, read-only or failing, and in folders that are moved or deleted."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from commands import Commands, linear_config, text_config
from faulty_fs import CHANGES, GROWTH, mounted


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(monkeypatch, capsys)


@contextmanager
def tmpfs(path: Path, options: str) -> Iterator[Path]:
    """A new file system in memory. Skips the test if this user cannot mount it."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only, also for root."""
    mount = ["mount", "--bind", str(folder), str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def names(folder: Path) -> set[str]:
    """Everything in a run's folder but the content of its committed checkpoints."""
    found = (path.relative_to(folder) for path in folder.rglob("*"))
    return {str(path) for path in found if len(path.parts) < 3 and not path.name.endswith(".png")}


def expected_names(*steps: int) -> set[str]:
    files = {"config.yaml", "metrics.jsonl", "events.jsonl", "layout.txt", "checkpoints"}
    return files | {f"checkpoints/{name}" for name in (".lock", ".trash", *map(str, steps))}


def test_a_slow_file_system_with_stale_listings(tmp_path: Path, run: Commands):
    """As NFS with its caches: a run on one client, and readers on another one."""
    with (
        mounted(tmp_path / "server", tmp_path / "one", delay=0.001, stale=1.0) as one,
        mounted(tmp_path / "server", tmp_path / "other", delay=0.001, stale=1.0) as other,
    ):
        seen = []

        def read(step: int) -> None:
            if step in (8, 11):
                for command in (("report",), ("checkpoint", "ls")):
                    seen.append(run(*command, other.path / "runs/run").code)

        run.after_step = read
        config = text_config(tmp_path, one.path / "runs", one.path / "cache")
        assert run("train", config, "steps=9").code == 0
        assert run("resume", one.path / "runs/run", "steps=12").code == 0
        assert len(seen) == 4
        assert set(seen) <= {0, 2}  # 2: the first reader may see no checkpoint yet
        assert sorted(tiny.losses(one.path / "runs/run")) == list(range(1, 13))
        shown = run("eval", other.path / "runs/run")
        assert shown.code == 0
        assert '"step": 12' in shown.out[-1]
        assert names(one.path / "runs/run") == expected_names(9, 12)


@pytest.mark.parametrize(
    ("error", "operations"),
    [("EDQUOT", GROWTH), ("EROFS", CHANGES), ("EIO", (*GROWTH, "fsync"))],
    ids=["quota", "read-only", "I/O error"],
)
def test_a_disk_that_refuses_for_a_while_costs_saves_and_no_line(
    tmp_path: Path, run: Commands, recwarn, error: str, operations: tuple[str, ...]
):
    before = set(threading.enumerate())
    with mounted(tmp_path / "disk", tmp_path / "shown") as disk:

        def disturb(step: int) -> None:
            if step == 4:
                wait_for_save(disk.path / "runs/run", 3)
                recwarn.clear()  # until its checkpointer exists, a run does not hide the coroutines of earlier tests
                disk.fail(getattr(errno, error), operations)
            if step == 10:
                time.sleep(0.5)
                assert disk.heal() > 0

        run.after_step = disturb
        done = run("train", linear_config(tmp_path, disk.path / "runs"))
        assert done.code == 0, done
        warnings = [line for line in done.out if "could not be written" in line or "was not written" in line]
        assert warnings, done.out
        assert all("checkpoint 6 " in line or "checkpoint 9 " in line for line in warnings), warnings
        assert os.strerror(getattr(errno, error)) in warnings[0]
        assert len(warnings) <= 2 * 4
        assert sum("kept in memory" in line for line in done.out) <= 2
        assert done.err == []
        assert waiting_writers() - before == set(), "they hold up the process's exit"
        assert [str(one.message) for one in recwarn if "never awaited" in str(one.message)] == []
        folder = disk.path / "runs/run"
        assert sorted(tiny.losses(folder)) == list(range(1, 13))
        assert [event["step"] for event in tiny.events(folder, "save")][-1] == 12
        assert names(folder) == expected_names(*tiny.saved(folder))
        assert tiny.saved(folder)[-1] == 12


def waiting_writers() -> set[threading.Thread]:
    """Threads of orbax that wait for a folder which nobody will create any more."""
    return {thread for thread in threading.enumerate() if thread.name in ("array_type_handler", "asyncio_0")}


def wait_for_save(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while step not in [event["step"] for event in tiny.events(folder, "save")] and time.monotonic() < deadline:
        if (folder / f"checkpoints/{step}/jaxtrain.json").exists():
            break
        time.sleep(0.01)
    time.sleep(0.3)  # it prunes


def test_a_disk_that_stays_read_only_ends_the_run_with_what_was_lost(tmp_path: Path, run: Commands):
    with mounted(tmp_path / "disk", tmp_path / "shown") as disk:

        def disturb(step: int) -> None:
            if step == 4:
                wait_for_save(disk.path / "runs/run", 3)
                disk.fail(errno.EROFS, CHANGES)

        run.after_step = disturb
        done = run("train", linear_config(tmp_path, disk.path / "runs"))
        assert done.code == 1
        assert done.one_line() == "jaxtrain: the last checkpoint (step 12) could not be written, see above"
        assert any("records of events.jsonl are lost (Read-only file system)" in line for line in done.out)
        disk.heal()
        run.after_step = lambda step: None
        again = run("resume", disk.path / "runs/run")
        assert again.code == 0
        assert any("restored  checkpoint 3 " in line for line in again.out)


def test_a_disk_without_inodes(tmp_path: Path, run: Commands):
    with tmpfs(tmp_path / "disk", "size=64m,nr_inodes=200") as disk:
        filler = disk / "filler"

        def disturb(step: int) -> None:
            if step == 4:
                wait_for_save(disk / "runs/run", 3)
                filler.mkdir()
                for number in range(os.statvfs(disk).f_ffree):
                    (filler / str(number)).touch()
            if step == 10:
                time.sleep(0.5)
                shutil.rmtree(filler)

        run.after_step = disturb
        done = run("train", linear_config(tmp_path, disk / "runs"))
        assert done.code == 0, done
        assert sum("the disk is full" in line for line in done.out) in range(1, 9)
        assert tiny.saved(disk / "runs/run")[-1] == 12
        assert names(disk / "runs/run") == expected_names(*tiny.saved(disk / "runs/run"))


def test_read_only_folders_are_refused_in_one_line_and_can_be_read(tmp_path: Path, run: Commands):
    config = text_config(tmp_path, tmp_path / "runs")
    assert run("train", config, "steps=2").code == 0
    folder = tmp_path / "runs/run"
    with read_only(tmp_path / "runs"), read_only(tmp_path / "cache"):
        for refused in (run("train", config, "name=other"), run("resume", folder, "steps=4")):
            assert refused.code == 2
            assert "Read-only file system: " in refused.one_line()
        for file in (tmp_path / "corpus").iterdir():  # as on another machine, where their hashes are not known
            os.utime(file, (1, 1))
        for command in (("report",), ("eval",), ("checkpoint", "verify")):
            assert run(*command, folder).code == 0


@pytest.mark.parametrize("what", ["moved", "deleted", "taken"])
def test_a_run_whose_folder_is_gone_ends_in_one_line(tmp_path: Path, run: Commands, what: str):
    folder, other = tmp_path / "runs/run", tmp_path / "elsewhere"

    def disturb(step: int) -> None:
        if step == 4:
            wait_for_save(folder, 3)
        if step == 4 and what == "moved":
            os.rename(folder, other)
        elif step == 4 and what == "deleted":
            shutil.rmtree(folder)
        elif step == 4:
            (folder / "checkpoints/.lock").write_text("process 1 on another-host")
        if step > 4:
            time.sleep(0.25)

    run.after_step = disturb
    done = run("train", linear_config(tmp_path, tmp_path / "runs"), "steps=200")
    assert done.code == 2
    gone = f"jaxtrain: {folder}/checkpoints is "
    how = {
        "moved": f"gone: it was moved to {other}/checkpoints", "deleted": "gone: it was moved or deleted",
        "taken": "now written by process 1 on another-host",
    }  # fmt: skip
    assert done.one_line().startswith(gone + how[what] + "; the run ends after step ")
    if what == "moved":
        assert tiny.saved(other) == [3]
        assert tiny.events(other, "stop")[-1]["reason"].startswith("CheckpointError")
        run.after_step = lambda step: None
        assert run("resume", other, "steps=12").code == 0
    if what != "taken":
        assert not [path for path in folder.rglob("*") if path.is_file()], "it saved where nobody looks"


def test_a_finished_run_that_is_moved(tmp_path: Path, run: Commands, monkeypatch: pytest.MonkeyPatch):
    assert run("train", text_config(tmp_path, tmp_path / "runs"), "steps=4").code == 0
    (tmp_path / "archive").mkdir()
    moved = tmp_path / "archive/old run"
    os.rename(tmp_path / "runs/run", moved)
    monkeypatch.chdir(tmp_path / "archive")
    resumed = run("resume", "old run", "steps=6")
    assert resumed.code == 0
    assert resumed.out[-1].endswith("resume 'old run' steps=12")
    for command in ("report", "eval"):
        assert run(command, "old run").code == 0
    assert run("generate", "old run", "--prompt", "aa", "--tokens", "2").code == 0
    assert run("checkpoint", "verify", "old run").code == 0
    assert run("export", "old run", "--to", tmp_path / "exported").code == 0
    assert not (tmp_path / "runs/run").exists()
    assert tiny.saved(moved)[-1] == 6


@pytest.mark.matrix
def test_two_runs_of_one_name_that_build_one_cache(tmp_path: Path):
    """Each has a folder of its own, or the second is refused in one line; both read a whole cache."""
    config = text_config(tmp_path, tmp_path / "runs")
    command = [sys.executable, "-m", "jaxtrain.cli.main", "train", str(config)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    runs = [subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes) for _ in range(2)]
    outcomes = sorted((process.communicate(timeout=400)[1], process.returncode) for process in runs)
    codes = [code for _, code in outcomes]
    assert sorted(codes) in ([0, 0], [0, 2]), outcomes
    for text, code in outcomes:
        if code:
            (line,) = text.splitlines()
            assert "is being written by process" in line or "already holds a run" in line
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == codes.count(0)
    losses = [tiny.losses(folder) for folder in folders]
    assert all(one == losses[0] for one in losses)
    assert sorted(losses[0]) == list(range(1, 13))
    assert not list((tmp_path / "cache").rglob("*.tmp"))
