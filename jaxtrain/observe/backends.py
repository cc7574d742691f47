"""Trackers on other people's formats: TensorBoard, Weights & Biases, MLflow. Each imports its package when made."""

from __future__ import annotations

import importlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.config.errors import UserError
from jaxtrain.observe.tracker import APPEND, append, valid


class TensorBoard:
    """Event files in RUN_DIR/tensorboard, made of tensorboardX's messages.

    Every event is one write to an appending file in this thread. tensorboardX's SummaryWriter hands events to a
    thread through a short queue, and when that thread dies of a full disk the next `add_scalar` waits for ever; its
    file writer syncs the disk with every flush, milliseconds a step.
    """

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / "tensorboard"
        self._events = _import("tensorboardX.proto.event_pb2", "")
        self._summaries = _import("tensorboardX.proto.summary_pb2", "")
        self._checksum = _import("tensorboardX.record_writer", "").masked_crc32c
        self._file: int | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names: seconds first. The rest keeps two starts apart.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = os.open(self._folder / name, APPEND, 0o644)
        self._write(file_version="brain.Event:2")
        self.rewind(int(info.get("step", 0)))

    def rewind(self, step: int) -> None:
        # Tells TensorBoard to forget what was written for later steps, by a dead run too.
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step + 1, session_log=session)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        scalars = [value(tag=k, simple_value=float(v)) for k, v in values.items() if k != "step"]
        self._write(step=step, summary=self._summaries.Summary(value=scalars))

    def event(self, kind: str, **fields: Any) -> None:
        """TensorBoard shows numbers only."""

    def artifact(self, path: Path) -> None:
        """TensorBoard shows numbers only."""

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, **fields: Any) -> None:
        """Appends an event in TFRecord framing: length, its checksum, data, its checksum."""
        if self._file is None:
            raise RuntimeError("not started")
        data = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        head = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (head, data)]
        append(self._file, head + sums[0] + data + sums[1])


class Uploads:
    """Hands folders on in a thread of its own, one after the other: the loop does not wait for a server."""

    def __init__(self) -> None:
        self._pool, self._sent = ThreadPoolExecutor(1), []

    def add(self, send: Callable[[Path], Any], folder: Path) -> None:
        """`send(folder)`, unless the folder is deleted before its turn or meanwhile."""
        self._sent.append(self._pool.submit(self._try, send, folder))

    def close(self) -> None:
        """Waits for all; raises what the first that failed raised."""
        self._pool.shutdown()
        for sent in self._sent:
            sent.result()

    @staticmethod
    def _try(send: Callable[[Path], Any], folder: Path) -> None:
        try:
            if folder.exists():
                send(folder)
        except OSError:
            if folder.exists():
                raise


class WandB:
    """A Weights & Biases run in RUN_DIR/wandb. A resumed run joins the same one by the id kept beside it.

    Steps that the server has already are ignored by it, with those of a dead run the same numbers anyway. Works
    without a network under WANDB_MODE=offline.
    """

    def __init__(self, project: str, name: str, run_dir: Path):
        self._wandb = _import("wandb", "wandb")
        self._project, self._name, self._dir, self._run = project, name, Path(run_dir), None
        self._uploads = Uploads()

    def start(self, info: Mapping[str, Any]) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        known = _remembered(self._dir / "wandb.id")
        self._run = self._wandb.init(
            project=self._project, name=self._name, dir=str(self._dir), id=known, resume="allow" if known else None,
            config=valid(info.get("config", {})),
        )  # fmt: skip
        (self._dir / "wandb.id").write_text(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._started().log({k: v for k, v in values.items() if k != "step"}, step=step)

    def event(self, kind: str, **fields: Any) -> None:
        self._started().summary[f"last_{kind}"] = {k: str(v) for k, v in fields.items()}

    def artifact(self, path: Path) -> None:
        if Path(path).is_dir():
            self._uploads.add(self._folder, Path(path))
        else:
            self._started().save(str(path), base_path=str(Path(path).parent), policy="now")

    def rewind(self, step: int) -> None:
        """W&B takes no step twice: the first record of each stays."""

    def _folder(self, folder: Path) -> None:
        """Checkpoints are versions of one artifact, `checkpoints-ID`."""
        kind = folder.parent.name
        artifact = self._wandb.Artifact(f"{kind}-{self._started().id}", type=kind)
        artifact.add_dir(str(folder))
        own = f"step-{folder.name}" if folder.name.isdecimal() else folder.name
        self._started().log_artifact(artifact, aliases=["latest", own])

    def close(self) -> None:
        if self._run is not None:
            try:
                self._uploads.close()
            finally:
                self._run.finish()
                self._run = None

    def _started(self) -> Any:
        if self._run is None:
            raise RuntimeError("not started")
        return self._run


class MLflow:
    """An MLflow run at MLFLOW_TRACKING_URI, by default a file store in RUN_DIR/mlflow. Resumes join the same run."""

    def __init__(self, experiment: str, name: str, run_dir: Path):
        self._mlflow = _import("mlflow", "mlflow")
        self._experiment, self._name, self._dir, self._run = experiment, name, Path(run_dir), None
        self._sent: Any = None
        self._uploads = Uploads()

    def start(self, info: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._dir.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow 3 wants a database for new work, which mlflow-skinny can not open; this is its own way to opt out.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (self._dir / "mlflow").absolute().as_uri()
        self._client = MlflowClient(uri)
        self._run = _remembered(self._dir / "mlflow.id")
        if self._run is None:
            found = self._client.get_experiment_by_name(self._experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
            self._run = self._client.create_run(experiment, run_name=self._name).info.run_id
            (self._dir / "mlflow.id").write_text(self._run)
            for key, value in _flat(info.get("config", {})).items():
                self._client.log_param(self._run, key, str(value)[:500])
        else:
            self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(k, float(v), now, step) for k, v in values.items() if k != "step"]
        # Sent by MLflow's own threads: the loop does not wait for a server.
        self._sent = self._client.log_batch(self._run, metrics, synchronous=False)

    def event(self, kind: str, **fields: Any) -> None:
        self._client.set_tag(self._run, f"last_{kind}", str(valid(fields))[:500])

    def artifact(self, path: Path) -> None:
        if Path(path).is_dir():
            self._uploads.add(partial(self._folder, self._run), Path(path))
        else:
            self._client.log_artifact(self._run, str(path))

    def rewind(self, step: int) -> None:
        """MLflow keeps both records of a step, by their time."""

    def _folder(self, run: str | None, folder: Path) -> None:
        self._client.log_artifacts(run, str(folder), f"{folder.parent.name}/{folder.name}")

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            if self._sent is not None:
                self._sent.wait()
            try:
                self._uploads.close()
            finally:
                self._client.set_terminated(run)


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        hint = f"jaxtrain[{extra}]" if extra else "jaxtrain"
        raise UserError(f"log.{extra or 'tensorboard'} needs {error.name or module}: pip install '{hint}'") from None


def _remembered(path: Path) -> str | None:
    """The id of the run to join, or None."""
    return path.read_text().strip() or None if path.exists() else None


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
