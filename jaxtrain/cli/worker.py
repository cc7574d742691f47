"""One process of a launched run, started by an agent: `python -m jaxtrain.cli.worker AGENT_PID RUN_DIR [OPTIONS]`."""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from jaxtrain.io.system import die_with
from jaxtrain.launch.exit_reasons import is_clean


def main(agent: int, directory: str, *options: str) -> NoReturn:
    """Goes on with a run, from step 0 where nothing is saved yet, and leaves with the command's exit code.

    A process that failed leaves at once: at a usual exit JAX waits for the others, who wait for it.
    """
    die_with(agent)
    from jaxtrain.cli.main import main as command

    try:
        code = command(["resume", directory, *options])
    except BaseException:
        traceback.print_exc()
        code = 1
    if is_clean(code):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.argv[0] = "jaxtrain"  # what the run says to go on with
    main(int(sys.argv[1]), *sys.argv[2:])
