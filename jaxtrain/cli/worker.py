"""Worker process of a launched run. An agent starts it: `python -m jaxtrain.cli.worker AGENT_PID RUN_DIR [OPTIONS]`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from jaxtrain.io.system import exit_with_parent
from jaxtrain.launch.exit_reasons import is_clean_exit


def main(agent: int, directory: str, *options: str) -> NoReturn:
    """Resumes a run, from step 0 if no checkpoint exists, and exits with the exit code of `jaxtrain resume`.

    After a failure the process exits at once: a normal exit would wait inside JAX for the other processes, which
    wait for this one.
    """
    exit_with_parent(agent)
    from jaxtrain.cli.main import main as command

    try:
        code = command(["resume", directory, *options])
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
