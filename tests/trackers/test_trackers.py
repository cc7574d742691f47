"""Trackers: what is written, what survives a kill, what happens on resume and when one fails."""

import json
import os
import struct
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.io.jsonl import AppendedFile, read_records, truncate_after
from jaxtrain.trackers.base import TrackerList, build_trackers
from jaxtrain.trackers.files import JsonlTracker
from jaxtrain.trackers.mlflow import MLflowTracker
from jaxtrain.trackers.tensorboard import TensorBoardTracker
from jaxtrain.trackers.uploads import UploadQueue
from jaxtrain.trackers.wandb import WandbTracker


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(run_dir: Path) -> list[int]:
    return [record["step"] for record in lines(run_dir / "metrics.jsonl")]


def write(run_dir: Path, start: int, end: int, close: bool = True) -> None:
    files = JsonlTracker(run_dir)
    files.start({"step": start, "name": "run"})
    for step in range(start + 1, end + 1):
        files.log(step, {"step": step, "loss": 1 / step})
    if close:
        files.close()


def test_files(tmp_path):
    files = JsonlTracker(tmp_path / "run")
    files.start({"step": 0, "name": "run", "config": {"seed": 1}, "flops": "as stated", "path": Path("/x")})
    files.log(1, {"loss": np.float32(2.5), "tokens": np.int64(1024), "mfu": 0.5})
    files.event("save", step=1, seconds=0.25)
    files.close()
    assert lines(tmp_path / "run/metrics.jsonl") == [{"step": 1, "loss": 2.5, "tokens": 1024, "mfu": 0.5}]
    start, save = lines(tmp_path / "run/events.jsonl")
    assert (start["kind"], start["name"], start["flops"], start["path"]) == ("start", "run", "as stated", "/x")
    assert "config" not in start  # it is in config.yaml
    assert (save["kind"], save["step"], save["seconds"]) == ("save", 1, 0.25)
    assert start["time"] <= save["time"]


def test_numbers_that_are_not_finite_are_valid_json(tmp_path):
    files = JsonlTracker(tmp_path)
    files.start({"step": 0})
    files.log(1, {"loss": float("nan"), "a": float("inf"), "b": np.float32("-inf"), "nested": [float("nan")]})
    files.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert np.isnan(float(record["loss"]))
    assert (float(record["a"]), float(record["b"])) == (np.inf, -np.inf)


def test_resume_cuts_what_the_dead_run_wrote_beyond_its_checkpoint(tmp_path):
    write(tmp_path, 0, 10, close=False)
    write(tmp_path, 6, 12)
    assert steps(tmp_path) == list(range(1, 13))
    start, resume = lines(tmp_path / "events.jsonl")
    assert (start["kind"], resume["kind"], resume["step"], resume["cut"]) == ("start", "resume", 6, 4)
    write(tmp_path, 12, 14)
    assert steps(tmp_path) == list(range(1, 15))
    assert "cut" not in lines(tmp_path / "events.jsonl")[-1]


def test_starting_afresh_in_an_old_folder_leaves_nothing_behind(tmp_path):
    write(tmp_path, 0, 5)
    write(tmp_path, 0, 2)
    assert steps(tmp_path) == [1, 2]


def test_broken_lines_are_removed(tmp_path):
    write(tmp_path, 0, 3)
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "lo')
    write(tmp_path, 3, 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert [e["kind"] for e in lines(tmp_path / "events.jsonl")] == ["start", "resume"]


def test_cut_replaces_the_file_at_once(tmp_path, monkeypatch):
    write(tmp_path, 0, 5)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.io.atomic.os.replace", killed)
    with pytest.raises(KeyboardInterrupt):
        truncate_after(tmp_path / "metrics.jsonl", 2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_nothing_is_lost_when_the_process_dies(tmp_path):
    code = f"""
import os
from pathlib import Path
from jaxtrain.trackers.base import JsonlTracker
files = JsonlTracker(Path({str(tmp_path)!r}))
files.start({{"step": 0}})
for step in range(1, 51):
    files.log(step, {{"loss": 1.0}})
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert steps(tmp_path) == list(range(1, 51))


class Broken:
    def __init__(self, method):
        self._method = method

    def __getattr__(self, name):
        def call(*args, **kwargs):
            if name == self._method:
                raise OSError("No space left\n on device")

        return call


@pytest.mark.parametrize("method", ["start", "log", "event", "artifact", "close"])
def test_a_failing_tracker_is_reported_once_and_dropped(tmp_path, method):
    said = []
    observers = TrackerList([Broken(method), JsonlTracker(tmp_path)], report=said.append)
    observers.start({"step": 0})
    for step in (1, 2):
        observers.log(step, {"loss": 1.0})
        observers.event("eval", step=step)
    observers.artifact(tmp_path / "loss.png")
    observers.close()
    assert said == [f"tracker Broken dropped, training continues: {method}: No space left on device"]
    assert steps(tmp_path) == [1, 2]


NEEDS_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


@NEEDS_FULL
def test_a_full_disk_does_not_stop_training(tmp_path):
    said, files = [], JsonlTracker(tmp_path)
    observers = TrackerList([files], report=said.append)
    observers.start({"step": 0})
    file = files._files["metrics.jsonl"]._file
    disk, full = os.dup(file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    for step in (1, 2):
        observers.log(step, {"loss": 1.0})
    assert said == [
        "tracker JsonlTracker: metrics.jsonl cannot be written (No space left on device): kept in memory until it can"
    ]
    assert steps(tmp_path) == []
    os.dup2(disk, file)
    observers.log(3, {"loss": 1.0})
    assert steps(tmp_path) == [1, 2, 3]
    os.dup2(full, file)
    observers.log(4, {"loss": 1.0})
    observers.close()
    assert len(said) == 2
    assert said[1].endswith("close: the last 1 records of metrics.jsonl are lost (No space left on device)")
    for descriptor in (disk, full):
        os.close(descriptor)


@NEEDS_FULL
def test_what_is_kept_of_a_full_disk_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(AppendedFile, "LIMIT", 100)
    said, files = [], JsonlTracker(tmp_path)
    observers = TrackerList([files], report=said.append)
    observers.start({"step": 0})
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, files._files["metrics.jsonl"]._file)
    os.close(full)
    for step in range(10):
        observers.log(step, {"loss": 1.0})
    assert len(said) == 2
    assert "dropped, training continues: log: metrics.jsonl cannot be written" in said[1]
    assert observers.members == []


def test_a_record_written_in_part_is_completed(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:7]))
    file = AppendedFile(tmp_path / "lines")
    for line in (b"the first line\n", b"the second line\n"):
        file.append(line)
    file.close()
    assert (tmp_path / "lines").read_bytes() == b"the first line\nthe second line\n"


def test_interrupts_pass(tmp_path):
    class Interrupted:
        def log(self, step, values):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        TrackerList([Interrupted()]).log(1, {})


def test_only_the_main_process_writes(tmp_path):
    assert build_trackers(Config().log, "run", tmp_path / "run", is_main=False) == []
    assert not (tmp_path / "run").exists()
    kinds = [type(t) for t in build_trackers(Config().log, "run", tmp_path, is_main=True)]
    assert kinds == [JsonlTracker, TensorBoardTracker]
    without = build_trackers(Config(log={"tensorboard": False}).log, "run", tmp_path, is_main=True)
    assert [type(t) for t in without] == [JsonlTracker]


@pytest.mark.parametrize(("key", "module"), [("wandb", "wandb"), ("mlflow", "mlflow")])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, key, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"^log\.{key} needs the package {module}: pip install 'jaxtrain\[{key}\]'$"):
        build_trackers(Config(log={key: True}).log, "run", tmp_path, is_main=True)


def tensorboard_events(folder: Path) -> list:
    """Events of all files in order, from the TFRecord framing: length, its checksum, data, its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            events.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return events


def test_tensorboard(tmp_path):
    for start in (0, 2):
        board = TensorBoardTracker(tmp_path)
        board.start({"step": start})
        board.log(start + 1, {"step": start + 1, "loss": 0.5, "eval/loss": float("nan")})
        events = tensorboard_events(tmp_path / "tensorboard")  # before close: nothing waits in a buffer
        board.event("save", step=1)
        board.close()
    scalars = [{v.tag: v.simple_value for v in e.summary.value} | {"step": e.step} for e in events if e.summary.value]
    assert [(s["step"], s["loss"]) for s in scalars] == [(1, 0.5), (3, 0.5)]
    assert np.isnan(scalars[0]["eval/loss"])
    assert [e.step for e in events if e.HasField("session_log")] == [1, 3]  # forget from here on


def test_a_folder_that_is_deleted_before_its_turn_is_passed_over(tmp_path):
    def send(folder: Path) -> None:
        sent.append(folder.name)
        if folder.name == "2":
            folder.rmdir()
        (folder / "data").read_bytes()

    sent: list[str] = []
    for names, failed in ((["1", "2"], None), (["3"], FileNotFoundError)):
        uploads = UploadQueue()
        for name in names:
            if name != "1":
                (tmp_path / name).mkdir()
            uploads.add(send, tmp_path / name)
        with pytest.raises(failed) if failed else nullcontext():
            uploads.close()
    assert sent == ["2", "3"]


def checkpoint(folder: Path, step: int) -> Path:
    path = folder / f"checkpoints/{step}"
    path.mkdir(parents=True)
    (path / "data").write_bytes(b"weights" * step)
    return path


def test_wandb_offline_joins_the_same_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="needs jaxtrain[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = set()
    for start in (0, 2):
        tracker = WandbTracker("project", "run", tmp_path)
        tracker.start({"step": start, "config": {"model": {"layers": 2}}})
        tracker.log(start + 1, {"step": start + 1, "loss": 1.0})
        tracker.event("save", step=1)
        tracker.artifact(checkpoint(tmp_path, start + 1))
        tracker.close()
        ids.add((tmp_path / "wandb.id").read_text())
    assert len(ids) == 1
    wandb.teardown()  # its service writes what is left
    runs = list((tmp_path / "wandb").glob(f"offline-run-*{ids.pop()}"))
    assert len(runs) == 2
    recorded = b"".join(file.read_bytes() for run in runs for file in run.glob("*.wandb"))
    assert recorded.count(b"step-1") == recorded.count(b"step-3") == 1


def test_mlflow_joins_the_same_run(tmp_path, monkeypatch):
    tracking = pytest.importorskip("mlflow.tracking", reason="needs jaxtrain[mlflow]")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for start in (0, 2):
        tracker = MLflowTracker("experiment", "run", tmp_path)
        tracker.start({"step": start, "config": {"model": {"layers": 2}}})
        for step in (start + 1, start + 2):
            tracker.log(step, {"step": step, "loss": 1 / step})
        tracker.artifact(checkpoint(tmp_path, start + 1))
        tracker.close()
    client = tracking.MlflowClient((tmp_path / "mlflow").absolute().as_uri())
    run = client.get_run((tmp_path / "mlflow.id").read_text())
    assert run.data.params == {"model.layers": "2"}
    assert [a.path for a in client.list_artifacts(run.info.run_id, "checkpoints")] == ["checkpoints/1", "checkpoints/3"]
    assert client.list_artifacts(run.info.run_id, "checkpoints/3")[0].path == "checkpoints/3/data"
    assert sorted(m.step for m in client.get_metric_history(run.info.run_id, "loss")) == [1, 2, 3, 4]


def test_read_lines_of_a_missing_file(tmp_path):
    assert list(read_records(tmp_path / "none.jsonl")) == []


def test_no_jax_is_imported():
    modules = ["trackers.base", "trackers.console", "trackers.uploads", "reports.layout_table"]
    modules += ["reports.loss_plot", "models.flops", "planning.hardware.peak", "trackers.meter"]
    code = "import sys\n" + "".join(f"import jaxtrain.{module}\n" for module in modules)
    code += "assert not {'jax', 'wandb', 'mlflow', 'matplotlib', 'tensorboardX'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
