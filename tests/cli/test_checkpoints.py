"""`jaxtrain checkpoint`: what it says of good, damaged, unfinished and set aside steps; what it refuses to delete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.checkpoint import CheckpointStore, files
from jaxtrain.cli.main import main
from jaxtrain.reports.checkpoint_listing import tensor_bytes

MANIFEST = {
    "config": {"name": "x", "checkpoint": {"keep_best": 1, "best_metric": "eval/loss"}},
    "mesh": {"data": 2, "fsdp": 4}, "devices": 8, "processes": 2, "versions": {"jax": "0.10.2", "flax": ""},
}  # fmt: skip
TENSORS = {"params/w": [[4, 25], "float32"], "params/b": [[100], "bfloat16"], "step": [[], "int32"]}


def commit(store: CheckpointStore, number: int, **changes) -> None:
    """A step of three files with a marker, as a save writes it."""
    folder, step = store.path(number), number
    (folder / "state" / "d").mkdir(parents=True)
    names = ["state/manifest", "state/d/0", "state/d/1"]
    for index, name in enumerate(names):
        (folder / name).write_bytes(bytes([step]) * (500 + index))
    sealed = files.flush_and_digest(folder, names)
    content = {
        "format": files.FORMAT, "step": step, "time": 1.7e9 + step, "files": sealed, "bytes": 1503, "tensors": TENSORS,
        "metrics": {"eval/loss": 1 / step if step != 10 else 0.001}, "manifest": MANIFEST,
    }  # fmt: skip
    files.write_marker(folder, content | changes)


@pytest.fixture
def run(tmp_path) -> Path:
    """Steps 10 (the best), 20, 30, 40 good; 50 has a flipped bit, 60 lacks a byte, 70 no marker; 15 was set aside."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.directory.mkdir(parents=True)
    for step in (10, 15, 20, 30, 40, 50, 60, 70):
        commit(store, step)
    (store.path(50) / "state/d/0").write_bytes(b"\0" + bytes([50]) * 500)
    os.truncate(store.path(60) / "state/d/1", 501)
    (store.path(70) / files.MARKER).unlink()
    store.set_aside(15, "bad")
    return tmp_path / "run"


def said(capsys, *arguments: object, code: int = 0) -> str:
    assert main(["checkpoint", *map(str, arguments)]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


def test_ls(run, capsys):
    lines = said(capsys, "ls", run).splitlines()
    assert lines[0].split() == ["step", "time", "size", "state", "metrics", "written", "by"]
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[1:]}
    assert list(rows) == ["10", "20", "30", "40", "50", "60", "70", "bad-15"]
    assert "1.5 KiB good eval/loss 0.05 2 processes, data 2 x fsdp 4" in rows["20"]
    assert "good" in rows["50"], "a flipped bit is seen by reading only"
    assert "damaged: state/d/1 has 501 bytes instead of 502" in rows["60"]
    assert rows["70"] == "unfinished"
    assert "set aside" in rows["bad-15"]
    found = {row["name"]: row for row in json.loads(said(capsys, "ls", run, "--json"))}
    assert found["20"]["metrics"] == {"eval/loss": 0.05}
    assert (found["20"]["processes"], found["20"]["mesh"], found["20"]["bytes"]) == (2, {"data": 2, "fsdp": 4}, 1503)
    assert [row["state"] for row in found.values()] == [*["good"] * 5, "damaged", "unfinished", "set aside"]


def test_inspect(run, capsys):
    text = said(capsys, "inspect", run, "--step", 20)
    assert "params/w  float32   4x25                  400 B" in text
    assert "params/b  bfloat16  100                   200 B" in text
    assert "3 tensors, 201 numbers, 604 B" in text
    assert "versions  jax 0.10.2\n" in text
    assert "written   by 2 processes, data 2 x fsdp 4" in text
    assert said(capsys, "inspect", run).startswith("step      60"), "its marker is whole"
    content = json.loads(said(capsys, "inspect", run, "--step", 20, "--json"))
    assert content == files.read_marker(run / "checkpoints" / "20")
    assert "it has 10, 20, 30, 40, 50, 60" in said(capsys, "inspect", run, "--step", 99, code=2)


def test_verify_names_each_damaged_file(run, capsys):
    lines = said(capsys, "verify", run, code=1).splitlines()
    assert lines == [
        *(f"{step}: good, every byte read" for step in (10, 20, 30, 40)),
        "50: damaged: state/d/0 has another checksum than when it was written",
        "60: damaged: state/d/1 has 501 bytes instead of 502",
        "70: unfinished, not read",
        "bad-15: set aside, not read",
    ]
    assert said(capsys, "verify", run, "--step", 20, "--step", 40) == (
        "20: good, every byte read\n40: good, every byte read\n"
    )
    (run / "checkpoints/40/state/manifest").unlink()
    assert said(capsys, "verify", run, "--step", 40, code=1) == "40: damaged: state/manifest is missing\n"
    assert "no checkpoint 99" in said(capsys, "verify", run, "--step", 99, code=2)


def test_prune_keeps_the_newest_and_the_best(run, capsys):
    store = CheckpointStore(run / "checkpoints")
    size = sum(path.stat().st_size for step in (20, 30) for path in store.path(step).rglob("*") if path.is_file())
    assert said(capsys, "prune", run, "--keep", 3, "--dry-run") == f"would delete 20, 30 ({size / 1024:.1f} KiB)\n"
    assert store.folders() == [10, 20, 30, 40, 50, 60, 70]
    assert said(capsys, "prune", run, "--keep", 3).startswith("deleted 20, 30 (")
    assert store.folders() == [10, 40, 50, 60, 70]
    assert said(capsys, "prune", run, "--step", 60, "--step", 70, "--set-aside").startswith("deleted 60, 70, bad-15 (")
    assert sorted(os.listdir(store.directory)) == [".lock", ".trash", "10", "40", "50"]
    assert os.listdir(store.directory / ".trash") == []
    assert said(capsys, "prune", run, "--keep", 9) == "nothing to delete\n"


def test_prune_never_deletes_the_last_good_one(run, capsys):
    store = CheckpointStore(run / "checkpoints")
    before = store.folders()
    names = [argument for step in (10, 20, 30, 40) for argument in ("--step", step)]
    # 50 and 60 would stay, and look whole to whoever reads no bytes or no sizes.
    assert "40 is the last good one" in said(capsys, "prune", run, *names, code=2)
    assert "40 is the last good one" in said(capsys, "prune", run, *names, "--dry-run", code=2)
    assert store.folders() == before
    assert said(capsys, "prune", run, *names[2:]).startswith("deleted 20, 30, 40 (")
    assert "expected --keep of at least 1" in said(capsys, "prune", run, "--keep", 0, code=2)


def test_prune_waits_for_no_run(run, capsys):
    holder = files.Lock(run / "checkpoints" / ".lock")
    try:
        text = said(capsys, "prune", run, "--keep", 1, code=2)
        assert f"is being written by process {os.getpid()} on" in text
        assert "its own checkpoint.keep prunes" in text
        assert CheckpointStore(run / "checkpoints").folders() == [10, 20, 30, 40, 50, 60, 70]
        said(capsys, "prune", run, "--keep", 3, "--dry-run")  # what only looks works beside a live run
        said(capsys, "ls", run)
        said(capsys, "inspect", run)
        said(capsys, "verify", run, "--step", 20)
    finally:
        holder.release()


def test_rewind_sets_later_steps_aside_here_and_in_the_durable_tier(run, tmp_path, capsys):
    store, copies = CheckpointStore(run / "checkpoints"), CheckpointStore(tmp_path / "far" / "run")
    for step in (20, 40):
        commit(copies, step)
    (run / "config.yaml").write_text(f"checkpoint: {{durable: {tmp_path}/far}}\n")
    holder = files.Lock(run / "checkpoints" / ".lock")
    assert "is being written by process" in said(capsys, "rewind", run, "--step", 30, code=2)
    holder.release()
    assert (store.marked(), copies.marked()) == ([10, 20, 30, 40, 50, 60], [20, 40])
    text = said(capsys, "rewind", run, "--step", 30)
    assert text == f"set aside as old-40, old-50, old-60\nnext  jaxtrain resume {run}  # from step 30\n"
    assert (store.marked(), copies.marked(), store.latest()) == ([10, 20, 30], [20], 30)
    assert [name for _, name in store.aside()] == ["bad-15", "old-40", "old-50", "old-60"]
    assert said(capsys, "rewind", run, "--step", 30).startswith("nothing is later than 30\n")


def test_a_step_that_the_run_deletes_meanwhile_is_no_damage(run, capsys, monkeypatch):
    store = CheckpointStore(run / "checkpoints")
    read = files.digest

    def reading(source, target=None):
        if store.path(20).exists():
            store.delete("20")
        return read(source, target)

    monkeypatch.setattr("jaxtrain.checkpoint.durable.digest", reading)
    assert said(capsys, "verify", run, "--step", 20) == "20: deleted meanwhile\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ls", "nowhere"), "nowhere: no checkpoints found; expected a run directory"),
        (("prune", "RUN"), "expected --keep N, --step N or --set-aside"),
        (("ls", "RUN", "--keep", 2), "checkpoint ls: --keep belongs to another action"),
        (("inspect", "RUN", "--step", 10, "--step", 20), "expected one --step"),
        (("prune", "RUN", "--step", 11), "no checkpoint 11 in"),
        (("rewind", "RUN", "--step", 11), "no checkpoint 11 in"),
        (("rewind", "RUN"), "checkpoint rewind: expected one --step, to go back to"),
        (("verify", "RUN", "--durable"), "config.yaml"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, message):
    text = said(capsys, *(run if word == "RUN" else word for word in arguments), code=2)
    assert message in text
    assert text.count("\n") == 1


def test_the_durable_copies(run, tmp_path, capsys):
    copies = CheckpointStore(tmp_path / "far" / "run")
    commit(copies, 20)
    commit(copies, 40)
    (run / "config.yaml").write_text(f"checkpoint: {{durable: {tmp_path}/far}}\n")
    assert [line.split()[0] for line in said(capsys, "ls", run, "--durable").splitlines()[1:]] == ["20", "40"]
    assert said(capsys, "verify", run, "--durable").count("good, every byte read") == 2
    (copies.path(40) / "state/manifest").write_bytes(bytes([1]) * 500)
    assert "40: damaged: state/manifest has another checksum" in said(capsys, "verify", run, "--durable", code=1)
    assert said(capsys, "verify", copies.directory, "--step", 20) == "20: good, every byte read\n"


def test_a_marker_that_somebody_wrote_shows_no_control_characters_and_no_traceback(run, capsys):
    store = CheckpointStore(run / "checkpoints")
    evil = "\x1b]0;evil\x07"
    commit(store, 80, tensors={evil: [[1], "float32"]}, metrics={evil: 1.0}, manifest={evil: evil, "mesh": 3})
    for action in ("ls", "inspect"):
        text = said(capsys, action, run)
        assert "\x1b" not in text
        assert "evil" in text
    for changes in ({"files": {"a": 3}}, {"tensors": {"w": 1}}, {"time": "now"}, {"metrics": {"a": "b"}}, {"step": 8}):
        store.delete("80")
        commit(store, 80, **changes)
        assert "80" in said(capsys, "ls", run)
        assert "80: damaged: jaxtrain.json" in said(capsys, "verify", run, "--step", 80, code=1)


def test_bytes_of_tensors():
    kinds = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "bool": 1, "int8": 1, "uint32": 4, "complex64": 8}
    for dtype, size in kinds.items():
        assert tensor_bytes([3, 5], dtype) == 15 * size
    assert tensor_bytes([], "float32") == 4
    assert tensor_bytes([0, 4], "float32") == 0


def test_it_answers_without_jax(run):
    code = f"import sys; from jaxtrain.cli.main import main; main(['checkpoint', 'verify', {str(run)!r}]); "
    code += "sys.exit('jax' in sys.modules or 'orbax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode == 0
