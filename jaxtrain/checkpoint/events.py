"""What `Checkpointer.poll` reports: one frozen record per thing that happened, each printable as one line."""

from __future__ import annotations

from dataclasses import dataclass


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
    """

    step: int
    bytes: int
    seconds: float
    stall: float
    waited: float = 0.0
    deleted: tuple[int, ...] = ()

    def shown(self) -> dict[str, int | float | str]:
        """What a log says of it."""
        size, seconds, stall = f"{self.bytes / 2**20:.1f} MiB", round(self.seconds, 3), round(self.stall, 4)
        return {"step": self.step, "size": size, "seconds": seconds, "stall": stall}

    def __str__(self) -> str:
        return f"checkpoint {self.step}: {self.bytes / 2**20:.1f} MiB in {self.seconds:.2f} s, stall {self.stall:.3f} s"


@dataclass(frozen=True)
class Failed:
    """A checkpoint was not written. The ones before it are untouched and the next save starts afresh."""

    step: int
    reason: str
    newest: int | None = None

    def __str__(self) -> str:
        kept = "no earlier checkpoint exists" if self.newest is None else f"checkpoint {self.newest} stays the newest"
        return f"checkpoint {self.step} was not written: {self.reason}; {kept}"


@dataclass(frozen=True)
class SetAside:
    """A checkpoint is not used any more: damaged (`bad-N`) or left behind by a rewind (`old-N`).

    `path` is its new name; None when it was only passed over, because a `Reader` renames nothing.
    """

    step: int
    reason: str
    path: str | None

    def __str__(self) -> str:
        return f"checkpoint {self.step} passed over: {self.reason}" + (f"; now {self.path}" if self.path else "")


Event = Committed | Failed | SetAside
