"""Exit codes of workers: their meaning in words, and which of several is the cause."""

from __future__ import annotations

import signal

from jaxtrain.exit_codes import HUNG, SAVED, USAGE


def is_clean_exit(code: int) -> bool:
    """Returns whether a worker finished, or saved after a signal."""
    return code in (0, SAVED)


def shell_exit_code(code: int) -> int:
    """Converts `Popen.returncode` to the exit code of a shell: 128 + N for signal N."""
    return 128 - code if code < 0 else code


def describe_exit(code: int) -> str:
    """Describes an exit, to follow the worker's name: `was killed by signal 9`."""
    if code == -signal.SIGABRT:
        return "aborted (signal 6)"
    if code < 0:
        return f"was killed by signal {-code}"
    descriptions = {
        0: "finished",
        USAGE: "refused its input (exit code 2)",
        HUNG: "was hung (exit code 70)",
        SAVED: "saved and stopped (exit code 75)",
    }
    return descriptions.get(code, f"failed with exit code {code}")


def cause_rank(code: int, is_ended_by_jax: bool) -> int:
    """Ranks exits of workers that end together: the lowest is the cause, the others follow from it.

    Args:
        code: exit code, negative for a signal. 1 is also that of a collective that failed because a worker was lost.
        is_ended_by_jax: whether JAX aborted the worker because another one was lost.
    """
    return 2 if is_clean_exit(code) else 1 if code == 1 or is_ended_by_jax else 0
