"""Exceptions of the package, and helpers that word their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

SHOWN = 60  # characters of a value that a message repeats
LISTED = 50  # problems that one error lists


class UserError(ValueError):
    """An error that the user can correct. The message says what is wrong, where, and what would be right.

    The command line prints it without a traceback. Any other exception is a fault of the program, or of a user's own
    model or data, and keeps its traceback.
    """


class DataError(UserError):
    """Bad input data. One line: what is wrong, in which file, what would be right."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, found, read or used. One line."""


class ScheduleError(UserError):
    """A pipeline schedule cannot be built, or a table is not a valid schedule. One line for each problem."""


class ModelFileError(UserError):
    """A file of a Hugging Face model cannot be read or written."""


class ModelConfigError(UserError):
    """A config.json cannot be read as our model, or our model cannot be written as that architecture."""


class PeerMemoryError(Exception):
    """The memory of a node cannot be reached, or does not hold what was asked for. One line."""


class ProtocolError(ValueError):
    """A message that the protocol between launcher processes does not know."""


class TrainingError(RuntimeError):
    """Training cannot continue, or its result cannot be saved. One line."""


class NotSavedError(TrainingError):
    """Training ended, and its last checkpoint is not on disk."""


class DivergedError(TrainingError):
    """Loss or gradients stay non-finite or spike again and again: no later state is worth keeping."""


class CorruptionError(TrainingError):
    """A device computes wrong results or holds wrong bits."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a config.

    Args:
        where: `FILE:LINE`, `command line`, `default`, or empty if unknown.
        key: dotted key, or empty if the problem concerns a whole file.
        message: what is wrong; what would be right.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return clean(": ".join(part for part in (self.where, self.key, self.message) if part))


class ConfigError(UserError):
    """Problems of a config at once; `str()` gives one line for each."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(dict.fromkeys(problems), key=_file_and_line)
        lines = [str(problem) for problem in self.problems[:LISTED]]
        if len(self.problems) > LISTED:
            lines.append(f"... and {len(self.problems) - LISTED} more")
        super().__init__("\n".join(lines))


def _file_and_line(problem: Problem) -> tuple[str, int]:
    """Sort key: the file, then the line."""
    file, _, line = problem.where.rpartition(":")
    return (file, int(line)) if line.isdecimal() else (problem.where, 0)


def clean(text: str) -> str:
    """The text as one printable line: control characters, line ends and lone surrogates are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def shown(value: Any) -> str:
    """A value as a message repeats it: short, one line."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section of keys" if value else "an empty section {}"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    text = f'"{value[: SHOWN + 1]}"' if isinstance(value, str) else str(value)
    return clean(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def close(word: str, choices: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The choices (at most two) that look like `word`, best first."""
    return difflib.get_close_matches(str(word)[:SHOWN], [str(choice) for choice in choices], n=2, cutoff=cutoff)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` (did you mean `x`?)`, or nothing where no choice is close."""
    found = close(word, choices)
    return f" (did you mean {' or '.join(f'`{name}`' for name in found)}?)" if found else ""


def join(words: Iterable[Any], last: str = "or") -> str:
    """`a, b or c`."""
    parts = [str(word) for word in words]
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} {last} {parts[-1]}" if parts else "none"


def locate(problems: Iterable[Problem], provenance: Mapping[str, str]) -> list[Problem]:
    """Problems found on a finished config, with the places its values came from filled in.

    Args:
        problems: as the mesh doctor gives them, with keys but without places.
        provenance: dotted key -> place, from `jaxtrain.core.resolve.resolve`.
    """
    return [p if p.where else replace(p, where=_source(p.key, provenance)) for p in problems]


def _source(key: str, provenance: Mapping[str, str]) -> str:
    """The place of a key, else of the first key under it that was given."""
    if key in provenance:
        return provenance[key]
    under = [where for name, where in provenance.items() if name.startswith(key + ".") and where != "default"]
    return under[0] if under else ""
