"""How workers end, in words and as exit codes. No JAX."""

from __future__ import annotations

import signal

from jaxtrain.exit_codes import HUNG, SAVED, USAGE

# What JAX does to the others when one is lost comes after what was done to that one.
_SECONDARY = (-signal.SIGABRT, 1)


def is_clean(code: int) -> bool:
    """Whether a worker ended as it should: done, or saved after a signal."""
    return code in (0, SAVED)


def exit_code(code: int) -> int:
    """The code to pass on for a worker's, as `Popen.returncode` has it: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def words(code: int) -> str:
    """How a worker ended, after its name: `was killed by signal 9`."""
    if code < 0:
        return f"was killed by signal {-code}"
    said = {
        0: "finished",
        USAGE: "refused its input (exit code 2)",
        HUNG: "was hung (exit code 70)",
        SAVED: "saved and stopped (exit code 75)",
    }
    return said.get(code, f"failed with exit code {code}")


def rank_of_cause(code: int) -> int:
    """Among workers that end together, those with the lowest are the cause and the others its victims."""
    return 2 if is_clean(code) else 1 if code in _SECONDARY else 0
