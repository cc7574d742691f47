"""Events that `Checkpointer.poll` returns: frozen records, each printable as one line.

`kind` and `fields()` are the kind and fields of the logged event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

SLOW = 0.5  # seconds of waiting for the previous save from which on it is reported


class _Warning:
    """Event logged as a warning with its one line."""

    kind: ClassVar[str] = "warning"

    def fields(self) -> dict[str, Any]:
        return {"text": str(self)}


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Committed:
    """A checkpoint is complete on disk: data, checksums and marker are written and flushed.

    Attributes:
      step: optimizer step of the state.
      bytes: size on disk, summed over processes.
      seconds: from the call of `save` to the commit.
      stall: seconds that `save` blocked its caller, including `waited`.
      waited: seconds of `stall` spent waiting for the previous save.
      deleted: older steps deleted after this commit.
      tries: number of attempts that it took.
    """

    step: int
    bytes: int
    seconds: float
    stall: float
    waited: float = 0.0
    deleted: tuple[int, ...] = ()
    tries: int = 1
    kind: ClassVar[str] = "save"

    def fields(self) -> dict[str, Any]:
        seconds, stall = round(self.seconds, 3), round(self.stall, 4)
        fields = {"step": self.step, "size": _mebibytes(self.bytes), "seconds": seconds, "stall": stall}
        if self.waited >= SLOW:
            fields["waited"] = round(self.waited, 3)
        return fields if self.tries == 1 else fields | {"tries": self.tries}

    def __str__(self) -> str:
        return f"checkpoint {self.step}: {_mebibytes(self.bytes)} in {self.seconds:.2f} s, stall {self.stall:.3f} s"


@dataclass(frozen=True)
class SaveFailed(_Warning):
    """A checkpoint was given up. Earlier ones are untouched, and later saves are not affected."""

    step: int
    reason: str
    newest: int | None = None
    tries: int = 1

    def __str__(self) -> str:
        kept = "no earlier checkpoint exists" if self.newest is None else f"checkpoint {self.newest} stays the newest"
        tries = "" if self.tries == 1 else f" in {self.tries} tries"
        return f"checkpoint {self.step} was not written{tries}: {self.reason}; {kept}"


@dataclass(frozen=True)
class Retrying(_Warning):
    """A save, or a copy to `location`, failed and will be tried again after `wait` seconds.

    A single process retries with the same values; several processes with the state of a later step.
    """

    step: int
    reason: str
    wait: float
    number: str
    location: str | None = None

    def __str__(self) -> str:
        failed = "written" if self.location is None else f"copied to {self.location}"
        text = f"checkpoint {self.step} could not be {failed}: {self.reason}"
        return f"{text}; trying again in {self.wait:g} s ({self.number})"


@dataclass(frozen=True)
class SlowSave(_Warning):
    """A checkpoint was due while the previous one was being written: it waited `waited` seconds, or was skipped."""

    step: int
    before: int
    waited: float
    skipped: bool = False

    def __str__(self) -> str:
        waited = f"{self.waited:.1f} s"
        if self.skipped:
            return f"checkpoint {self.step} skipped: checkpoint {self.before} is not written after another {waited}"
        advice = "writing takes longer than the steps between them, raise checkpoint.every"
        return f"checkpoint {self.step} waited {waited} for checkpoint {self.before}: {advice}"


@dataclass(frozen=True)
class SetAside(_Warning):
    """A checkpoint is not used any more: damaged (`bad-N`) or left behind by a rewind (`old-N`).

    `path` is its new name; None if it was only skipped, because a `CheckpointReader` renames nothing.
    """

    step: int
    reason: str
    path: str | None

    def __str__(self) -> str:
        return f"checkpoint {self.step} skipped: {self.reason}" + (f"; now {self.path}" if self.path else "")


@dataclass(frozen=True)
class Copied:
    """A checkpoint is complete in the durable tier, every byte read back."""

    step: int
    location: str
    bytes: int
    seconds: float
    deleted: tuple[int, ...] = ()
    kind: ClassVar[str] = "copy"

    def fields(self) -> dict[str, Any]:
        size, seconds = _mebibytes(self.bytes), round(self.seconds, 3)
        return {"step": self.step, "to": self.location, "size": size, "seconds": seconds}

    def __str__(self) -> str:
        return f"checkpoint {self.step}: copied to {self.location} in {self.seconds:.2f} s"


@dataclass(frozen=True)
class CopyFailed(_Warning):
    """A checkpoint was not copied to the durable tier, or (`step` is None) the tier cannot be read or cleaned.

    The run's own folder is untouched.
    """

    step: int | None
    location: str
    reason: str

    def __str__(self) -> str:
        if self.step is None:
            return f"durable checkpoints in {self.location}: {self.reason}"
        return f"checkpoint {self.step} was not copied to {self.location}: {self.reason}"


@dataclass(frozen=True)
class Fetched(_Warning):
    """A checkpoint was copied from the durable tier, because the run's folder has no good one as new."""

    step: int
    location: str
    seconds: float

    def __str__(self) -> str:
        return f"checkpoint {self.step} fetched from {self.location} in {self.seconds:.1f} s"


Event = Committed | SaveFailed | Retrying | SlowSave | SetAside | Copied | CopyFailed | Fetched
