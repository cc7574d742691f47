"""Tracker for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.io.jsonl import to_json
from jaxtrain.io.packages import import_optional
from jaxtrain.trackers.uploads import UploadQueue, read_run_id


class WandbTracker:
    """Logs to a Weights & Biases run in RUN_DIR/wandb. A resumed run continues it by the id in RUN_DIR/wandb.id.

    The server ignores steps that it has already; a resumed run repeats the same numbers. WANDB_MODE=offline works
    without a network.
    """

    def __init__(self, project: str, name: str, run_dir: Path):
        self._wandb = import_optional("wandb", "log.wandb", "wandb")
        self._project, self._name, self._dir, self._run = project, name, Path(run_dir), None
        self._uploads = UploadQueue()

    def start(self, info: Mapping[str, Any]) -> None:
        self._dir.mkdir(parents=True, exist_ok=True)
        run_id = read_run_id(self._dir / "wandb.id")
        self._run = self._wandb.init(
            project=self._project, name=self._name, dir=str(self._dir), id=run_id, resume="allow" if run_id else None,
            config=to_json(info.get("config", {})),
        )  # fmt: skip
        (self._dir / "wandb.id").write_text(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._started().log({k: v for k, v in values.items() if k != "step"}, step=step)

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        shown = {k: self._wandb.Histogram(np_histogram=(v.counts, v.edges)) for k, v in values.items()}
        self._started().log(shown, step=step)

    def event(self, kind: str, **fields: Any) -> None:
        self._started().summary[f"last_{kind}"] = {k: str(v) for k, v in fields.items()}

    def artifact(self, path: Path) -> None:
        if Path(path).is_dir():
            self._uploads.add(self._folder, Path(path))
        else:
            self._started().save(str(path), base_path=str(Path(path).parent), policy="now")

    def rewind(self, step: int) -> None:
        """Does nothing: W&B keeps the first record of each step."""

    def _folder(self, folder: Path) -> None:
        """Logs a checkpoint as a version of the artifact `checkpoints-ID`."""
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
