"""Tracker for MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxtrain.io.jsonl import to_json
from jaxtrain.io.packages import import_optional
from jaxtrain.trackers.uploads import UploadQueue, flatten, read_run_id


class MLflowTracker:
    """Logs to an MLflow run at MLFLOW_TRACKING_URI, by default a file store in RUN_DIR/mlflow. Resumes continue it."""

    def __init__(self, experiment: str, name: str, run_dir: Path):
        self._mlflow = import_optional("mlflow", "log.mlflow", "mlflow")
        self._experiment, self._name, self._dir, self._run = experiment, name, Path(run_dir), None
        self._sent: Any = None
        self._uploads = UploadQueue()

    def start(self, info: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._dir.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow 3 wants a database for new stores, which mlflow-skinny cannot open; this variable opts out.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (self._dir / "mlflow").absolute().as_uri()
        self._client = MlflowClient(uri)
        self._run = read_run_id(self._dir / "mlflow.id")
        if self._run is None:
            existing = self._client.get_experiment_by_name(self._experiment)
            experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
            self._run = self._client.create_run(experiment, run_name=self._name).info.run_id
            (self._dir / "mlflow.id").write_text(self._run)
            for key, value in flatten(info.get("config", {})).items():
                self._client.log_param(self._run, key, str(value)[:500])
        else:
            self._client.update_run(self._run, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(k, float(v), now, step) for k, v in values.items() if k != "step"]
        # MLflow's own threads send it: the loop does not wait for a server.
        self._sent = self._client.log_batch(self._run, metrics, synchronous=False)

    def event(self, kind: str, **fields: Any) -> None:
        self._client.set_tag(self._run, f"last_{kind}", str(to_json(fields))[:500])

    def artifact(self, path: Path) -> None:
        if Path(path).is_dir():
            self._uploads.add(partial(self._folder, self._run), Path(path))
        else:
            self._client.log_artifact(self._run, str(path))

    def rewind(self, step: int) -> None:
        """Does nothing: MLflow keeps both records of a step, by their time."""

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
