"""Leader process of a launched run, which an agent starts: `python -m jaxtrain.cli.leader AGENT_PID`."""

from __future__ import annotations

import json
import sys

from jaxtrain.errors import UserError
from jaxtrain.exit_codes import USAGE
from jaxtrain.io.system import exit_with_parent
from jaxtrain.launch.job import ElasticJob
from jaxtrain.launch.leadership.lead import LeaderSettings, lead
from jaxtrain.launch.worker_logs import Terminal


def main(agent: int) -> int:
    """Leads the job that stdin describes until it is over. Returns 0, or 2 after bad input."""
    exit_with_parent(agent)
    described, terminal = json.load(sys.stdin), Terminal()
    try:
        lead(ElasticJob.from_json(described["job"]), LeaderSettings.from_text(described["settings"]), terminal.show)
    except UserError as error:
        terminal.show(f"jaxtrain: {error}", error=True)
        return USAGE
    finally:
        terminal.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
