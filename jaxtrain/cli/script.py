"""Start of a user's script: `python -m jaxtrain.cli.script AGENT_PID VARIABLE VALUE COMMAND...`.

The command takes the place of this process, which ends with its agent.
"""

from __future__ import annotations

import os
import sys

from jaxtrain.exit_codes import USAGE
from jaxtrain.io.system import exit_with_parent


def main(agent: int, variable: str, value: str, *command: str) -> None:
    """Runs a command with an environment variable in place of this process."""
    exit_with_parent(agent)
    try:
        os.execvpe(command[0], command, os.environ | {variable: value})
    except OSError as error:
        print(f"jaxtrain: launch: {command[0]}: {error.strerror}; expected a command such as python", file=sys.stderr)
        sys.exit(USAGE)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
