"""Tracker for TensorBoard."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.io.jsonl import AppendedFile


class TensorBoardTracker:
    """Writes event files to RUN_DIR/tensorboard with tensorboardX's messages.

    Every event is one write to an appending file in this thread. tensorboardX's SummaryWriter passes events to a thread
    through a short queue; if that thread dies of a full disk, the next `add_scalar` blocks forever. Its file writer
    syncs the disk with every flush, which takes milliseconds per step.
    """

    def __init__(self, run_dir: Path):
        self._folder = Path(run_dir) / "tensorboard"
        from tensorboardX.proto import event_pb2, summary_pb2
        from tensorboardX.record_writer import masked_crc32c

        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._checksum = masked_crc32c
        self._file: AppendedFile | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, so seconds come first. The rest makes the name unique.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{time.time_ns()}"
        self._file = AppendedFile(self._folder / name)
        self._write(file_version="brain.Event:2")
        self.rewind(int(info.get("step", 0)))

    def rewind(self, step: int) -> None:
        # Tells TensorBoard to discard values of later steps, also those of a killed run.
        session = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(step=step + 1, session_log=session)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        scalars = [value(tag=k, simple_value=float(v)) for k, v in values.items() if k != "step"]
        self._write(step=step, summary=self._summaries.Summary(value=scalars))

    def histograms(self, step: int, values: Mapping[str, Any]) -> None:
        value = self._summaries.Summary.Value
        shown = []
        for name, found in values.items():
            message = self._summaries.HistogramProto(
                min=float(found.edges[0]), max=float(found.edges[-1]), num=float(found.counts.sum()),
                sum=float(found.sum), sum_squares=float(found.sum_squares),
                bucket_limit=[float(edge) for edge in found.edges[1:]], bucket=[float(n) for n in found.counts],
            )  # fmt: skip
            shown.append(value(tag=name, histo=message))
        self._write(step=step, summary=self._summaries.Summary(value=shown))

    def event(self, kind: str, **fields: Any) -> None:
        """Does nothing: TensorBoard shows numbers only."""

    def artifact(self, path: Path) -> None:
        """Does nothing: TensorBoard shows numbers only."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _write(self, **fields: Any) -> None:
        """Appends an event in TFRecord framing: length, its checksum, data, its checksum."""
        if self._file is None:
            raise RuntimeError("not started")
        data = self._events.Event(wall_time=time.time(), **fields).SerializeToString()
        head = struct.pack("<Q", len(data))
        sums = [struct.pack("<I", self._checksum(part)) for part in (head, data)]
        self._file.append(head + sums[0] + data + sums[1])
