"""Messages between islands and the coordinator of their server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtrain.errors import TrainingError, UserError
from jaxtrain.islands.partition import Parts, Spec
from jaxtrain.islands.server.rules import Rule
from jaxtrain.islands.trees import Path
from jaxtrain.sharding.quantized_blocks import Bits


class RefusedError(UserError):
    """An island may not take part. One line: what differs, and what would be right."""


class SessionOverError(Exception):
    """The island was silent for too long, or the coordinator has started again: it must join anew."""


class NobodyError(Exception):
    """Nobody has values: all islands that had them have left."""


class LostValueError(TrainingError):
    """A value cannot be read, because the process that has put it has ended. One line."""


@dataclass(frozen=True)
class Hello:
    """An island that wants to take part.

    Attributes:
        island: its index.
        facts: what all islands must have in common, by name: run, version, strategy, model, data.
        specs: tensors that the server holds.
        rule: what it makes of pushes.
        bits: of a value that travels in few bits, both ways; 0: none does.
    """

    island: int
    facts: Mapping[str, str]
    specs: Mapping[Path, Spec]
    rule: Rule = field(repr=False)
    bits: Bits = 0

    def check(self, first: Hello) -> None:
        """Raises RefusedError unless an island fits the first one."""
        for name, expected in first.facts.items():
            found = self.facts.get(name, "none")
            if found != expected:
                message = f"island {self.island}: its {name} is {found}"
                raise RefusedError(f"{message}; expected {expected}, as island {first.island} has")


class Welcome(NamedTuple):
    """Answer to a `Hello`.

    Attributes:
        session: to be named in every message.
        clock: number of steps after which the island begins.
        parts: what each server holds.
        given: references to what the servers hold, one each; None: they wait for the initial values of this island.
        version: updates that the servers have made.
    """

    session: int
    clock: int
    parts: list[Parts]
    given: list[Any] | None
    version: int


@dataclass(frozen=True)
class Push:
    """Values that an island has computed.

    Attributes:
        clock: its steps.
        tokens: that it has trained on since its last push.
        refs: references to its pieces, those of all its processes for each server.
        nbytes: of these.
        loss: of its last step, for the status.
    """

    clock: int
    tokens: float
    refs: list[list[Any]] = field(repr=False)
    nbytes: int = 0
    loss: float | None = None


class Pulled(NamedTuple):
    """Values that an island reads.

    Attributes:
        given: references to what the servers hold, one each.
        version: updates that they have made.
        clock: step from which the island goes on; later than its own if it was left behind.
        metrics: of the update: staleness, islands that pushed, those that were left out.
        messages: of the updates since those that the island holds: references of each, one for each server; None: it
            reads all that the servers hold.
    """

    given: list[Any]
    version: int
    clock: int
    metrics: dict[str, float]
    messages: list[list[Any]] | None = None
