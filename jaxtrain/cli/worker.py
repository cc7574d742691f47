"""Process of a launched run, which ends with the one that starts it: `python -m jaxtrain.cli.worker PARENT_PID ...`.

The arguments that follow are those of `jaxtrain`, such as `resume RUN_DIR`.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from jaxtrain.io.system import exit_with_parent
from jaxtrain.launch.exit_reasons import is_clean_exit


def main(parent: int, *arguments: str) -> NoReturn:
    """Runs a command of jaxtrain, and exits with its exit code.

    After a failure the process exits at once: a normal exit would wait inside JAX for the other processes, which
    wait for this one.
    """
    exit_with_parent(parent)
    from jaxtrain.cli.main import main as command

    try:
        code = command(list(arguments))
    except BaseException:
        traceback.print_exc()
        code = 1
    if is_clean_exit(code):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.argv[0] = "jaxtrain"  # the name in the command that the run prints for resuming
    main(int(sys.argv[1]), *sys.argv[2:])
