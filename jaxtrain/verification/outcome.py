"""Results of a verification."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.io.figure import Displayed
from jaxtrain.verification.candidates import Candidate
from jaxtrain.verification.compare import Verdict


@dataclass(frozen=True)
class LayoutResult:
    """Result of one layout on one mesh: its verdict and its collectives per step, or the error."""

    candidate: Candidate
    verdict: Verdict | None
    collectives: str = ""
    error: str = ""

    @property
    def is_equal(self) -> bool:
        """True if it ran and equals one device."""
        return self.verdict is not None and self.verdict.is_equal


@dataclass(frozen=True, repr=False)
class Outcome(Displayed):
    """Outcome of a verification.

    Args:
        rows: one per layout and mesh.
        changes: `key: old -> new` of the shrunk config.
        refused: layout -> why no mesh of these devices fits it.
        devices: number of devices.
        steps: number of steps.
        notes: what the model does that equal layouts do not show, a line each.
    """

    rows: list[LayoutResult]
    changes: list[str]
    refused: dict[str, str]
    devices: int
    steps: int
    notes: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        """True if layouts were compared, and all equal one device."""
        return bool(self.rows) and all(row.is_equal for row in self.rows)
