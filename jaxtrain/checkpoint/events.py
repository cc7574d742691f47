"""Events that `Checkpointer.poll` reports: one frozen record per thing that happened, each printable as one line.

`kind` and `shown()` are what a log says of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

SLOW = 0.5  # seconds of waiting for the save before that are worth a word


class _Warning:
    """Something that somebody should read: logged as its one line."""

    kind: ClassVar[str] = "warning"

    def shown(self) -> dict[str, Any]:
        return {"text": str(self)}


@dataclass(frozen=True)
class Committed:
    """A checkpoint is complete on disk: data, checksums and marker are written and fsynced.

    Attributes:
      step: optimizer step it holds.
      bytes: size on disk, summed over processes.
      seconds: from the call of `save` to the commit.
      stall: seconds `save` blocked its caller, `waited` included.
      waited: the part of `stall` spent waiting for the save before.
      deleted: older steps deleted after this commit.
      tries: how often it was written until it was whole.
    """

    step: int
    bytes: int
    seconds: float
    stall: float
    waited: float = 0.0
    deleted: tuple[int, ...] = ()
    tries: int = 1
    kind: ClassVar[str] = "save"

    def shown(self) -> dict[str, Any]:
        size, seconds, stall = f"{self.bytes / 2**20:.1f} MiB", round(self.seconds, 3), round(self.stall, 4)
        fields: dict[str, Any] = {"step": self.step, "size": size, "seconds": seconds, "stall": stall}
        if self.waited >= SLOW:
            fields["waited"] = round(self.waited, 3)
        return fields if self.tries == 1 else fields | {"tries": self.tries}

    def __str__(self) -> str:
        return f"checkpoint {self.step}: {self.bytes / 2**20:.1f} MiB in {self.seconds:.2f} s, stall {self.stall:.3f} s"


@dataclass(frozen=True)
class SaveFailed(_Warning):
    """A checkpoint was given up. The ones before it are untouched and the next save starts afresh."""

    step: int
    reason: str
    newest: int | None = None
    tries: int = 1

    def __str__(self) -> str:
        kept = "no earlier checkpoint exists" if self.newest is None else f"checkpoint {self.newest} stays the newest"
        often = "" if self.tries == 1 else f" in {self.tries} tries"
        return f"checkpoint {self.step} was not written{often}: {self.reason}; {kept}"


@dataclass(frozen=True)
class Retrying(_Warning):
    """A checkpoint, or its copy, could not be written and will be tried again after `wait` seconds.

    By several processes with the state of the step that they have come to then."""

    step: int
    reason: str
    wait: float
    number: str
    place: str | None = None

    def __str__(self) -> str:
        what = f"checkpoint {self.step} could not be " + (
            "written" if self.place is None else f"copied to {self.place}"
        )
        return f"{what}: {self.reason}; trying again in {self.wait:g} s ({self.number})"


@dataclass(frozen=True)
class SlowSave(_Warning):
    """A checkpoint was due while the one before was still being written: it waited for it, or was left out."""

    step: int
    before: int
    waited: float
    skipped: bool = False

    def __str__(self) -> str:
        waited = f"{self.waited:.1f} s"
        if self.skipped:
            return f"checkpoint {self.step} left out: checkpoint {self.before} is not written after another {waited}"
        advice = "writing takes longer than the steps between them, raise checkpoint.every"
        return f"checkpoint {self.step} waited {waited} for checkpoint {self.before}: {advice}"


@dataclass(frozen=True)
class SetAside(_Warning):
    """A checkpoint is not used any more: damaged (`bad-N`) or left behind by a rewind (`old-N`).

    `path` is its new name; None when it was only passed over, because a `Reader` renames nothing.
    """

    step: int
    reason: str
    path: str | None

    def __str__(self) -> str:
        return f"checkpoint {self.step} passed over: {self.reason}" + (f"; now {self.path}" if self.path else "")


@dataclass(frozen=True)
class Copied:
    """A checkpoint is complete in the durable tier, every byte read back. `bytes`; `seconds` it took."""

    step: int
    place: str
    bytes: int
    seconds: float
    deleted: tuple[int, ...] = ()
    kind: ClassVar[str] = "copy"

    def shown(self) -> dict[str, Any]:
        size = f"{self.bytes / 2**20:.1f} MiB"
        return {"step": self.step, "to": self.place, "size": size, "seconds": round(self.seconds, 3)}

    def __str__(self) -> str:
        return f"checkpoint {self.step}: copied to {self.place} in {self.seconds:.2f} s"


@dataclass(frozen=True)
class CopyFailed(_Warning):
    """A checkpoint is not in the durable tier, or (no `step`) the tier itself could not be read or tidied.

    The run's own folder is untouched."""

    step: int | None
    place: str
    reason: str

    def __str__(self) -> str:
        if self.step is None:
            return f"durable checkpoints in {self.place}: {self.reason}"
        return f"checkpoint {self.step} was not copied to {self.place}: {self.reason}"


@dataclass(frozen=True)
class Fetched(_Warning):
    """A checkpoint came back from the durable tier: the run's folder had none as new that is good."""

    step: int
    place: str
    seconds: float

    def __str__(self) -> str:
        return f"checkpoint {self.step} fetched from {self.place} in {self.seconds:.1f} s"


Event = Committed | SaveFailed | Retrying | SlowSave | SetAside | Copied | CopyFailed | Fetched
