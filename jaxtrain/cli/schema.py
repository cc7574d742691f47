"""`jaxtrain schema`: prints the JSON Schema of the config."""

from __future__ import annotations

import argparse
import json

from jaxtrain.config import json_schema


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    del args
    print(json.dumps(json_schema(), indent=1))
    return 0
