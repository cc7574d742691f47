"""Exceptions of the package and helpers that format their messages."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

MAX_VALUE_LENGTH = 60  # characters of a value that a message quotes
MAX_PROBLEMS = 50  # problems that one error lists


class UserError(ValueError):
    """An error that the user can correct. The message says what is wrong, where, and what would be right.

    The command line prints it without a traceback. Any other exception is a bug, or comes from a user's own model or
    dataset class, and keeps its traceback.
    """


class DataError(UserError):
    """Bad input data. One line: what is wrong, in which file, what would be right."""


class EndOfData(DataError):
    """An iterable has no more batches."""


class BatchError(DataError):
    """A training batch is bad, as all processes know. The state before it is saved."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, found, read or used. One line."""


class ScheduleError(UserError):
    """A pipeline schedule cannot be built, or a table is not a valid schedule. One line for each problem."""


class ModelFileError(UserError):
    """A file of a Hugging Face model cannot be read or written."""


class ModelConfigError(UserError):
    """A config.json cannot be converted to a `model` section, or the reverse."""


class PeerMemoryError(Exception):
    """The memory of another node cannot be reached, or lacks the requested data. One line."""


class ProtocolError(ValueError):
    """A launcher process received a message that its protocol does not define."""


class TrainingError(RuntimeError):
    """Training cannot continue, or its result cannot be saved. One line."""


class UnreadableBatchError(BatchError, TrainingError):
    """A user's code raised while it made a batch. Another try may succeed."""


class NotSavedError(TrainingError):
    """Training ended but its last checkpoint is not on disk."""


class DivergedError(TrainingError):
    """Loss or gradients stay non-finite or keep spiking."""


class CorruptionError(TrainingError):
    """A device computed wrong results or its memory was corrupted."""


@dataclass(frozen=True)
class Problem:
    """One problem in a config.

    Args:
        where: location: `FILE:LINE`, `command line`, `default`, or empty if unknown.
        key: dotted key, or empty if the problem concerns a whole file.
        message: what is wrong; what would be right.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return escape_unprintable(": ".join(part for part in (self.where, self.key, self.message) if part))


class ConfigError(UserError):
    """Lists every problem of a config; `str()` gives one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(dict.fromkeys(problems), key=_file_and_line)
        lines = [str(problem) for problem in self.problems[:MAX_PROBLEMS]]
        if len(self.problems) > MAX_PROBLEMS:
            lines.append(f"... and {len(self.problems) - MAX_PROBLEMS} more")
        super().__init__("\n".join(lines))


def _file_and_line(problem: Problem) -> tuple[str, int]:
    """Returns the sort key of a problem."""
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (problem.where, 0)


def escape_unprintable(text: str) -> str:
    """Returns the text as one printable line: control characters, line ends and lone surrogates are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def format_value(value: Any) -> str:
    """Returns a config value in the short, one-line form in which messages quote it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section of keys" if value else "an empty section {}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(cast('list[Any]', value))}"
    text = f'"{value[: MAX_VALUE_LENGTH + 1]}"' if isinstance(value, str) else str(value)
    return format_name(text)


def format_name(name: str) -> str:
    """Returns a name from a file in the short, one-line form in which messages quote it."""
    return escape_unprintable(name if len(name) <= MAX_VALUE_LENGTH else name[:MAX_VALUE_LENGTH] + "...")


def close_matches(word: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """Returns at most two choices that resemble `word`, best first."""
    return difflib.get_close_matches(str(word)[:MAX_VALUE_LENGTH], [str(c) for c in choices], n=2, cutoff=cutoff)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ` (did you mean `x`?)`, or an empty string if no choice is close."""
    matches = close_matches(word, choices)
    return f" (did you mean {' or '.join(f'`{name}`' for name in matches)}?)" if matches else ""


def join_words(words: Iterable[Any], last: str = "or") -> str:
    """Joins words as `a, b or c`; `none` if there are none."""
    *parts, end = [str(word) for word in words] or ["none"]
    return f"{', '.join(parts)} {last} {end}" if parts else end


def add_locations(problems: Iterable[Problem], provenance: Mapping[str, str]) -> list[Problem]:
    """Fills in where the values of problems were set.

    Args:
        problems: problems of a resolved config, with keys but without locations.
        provenance: dotted key -> location, from `jaxtrain.core.resolve.resolve`.

    Returns:
        the problems with their locations.
    """
    return [p if p.where else replace(p, where=_location(p.key, provenance)) for p in problems]


def _location(key: str, provenance: Mapping[str, str]) -> str:
    """Returns the location of a key, or of the first key below it that was set; empty if there is none."""
    if key in provenance:
        return provenance[key]
    below = (where for name, where in provenance.items() if name.startswith(key + ".") and where != "default")
    return next(below, "")


def describe_error(error: Exception) -> str:
    """Describes an error in one line: its class, and the first line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
