"""Exit codes of workers: their meaning in words, and which of several is the cause."""

from __future__ import annotations

import signal

from jaxtrain.exit_codes import HUNG, SAVED, USAGE

# Codes of workers that JAX or a failed collective ended because another worker was lost.
_SECONDARY = (-signal.SIGABRT, 1)


def is_clean_exit(code: int) -> bool:
    """Returns whether a worker finished, or saved after a signal."""
    return code in (0, SAVED)


def shell_exit_code(code: int) -> int:
    """Converts `Popen.returncode` to the exit code of a shell: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Describes an exit, to follow the worker's name: `was killed by signal 9`."""
    if code < 0:
        return f"was killed by signal {-code}"
    descriptions = {
        0: "finished",
        USAGE: "refused its input (exit code 2)",
        HUNG: "was hung (exit code 70)",
        SAVED: "saved and stopped (exit code 75)",
    }
    return descriptions.get(code, f"failed with exit code {code}")


def cause_rank(code: int) -> int:
    """Ranks exits of workers that end together: the lowest is the cause, the others follow from it."""
    return 2 if is_clean_exit(code) else 1 if code in _SECONDARY else 0
