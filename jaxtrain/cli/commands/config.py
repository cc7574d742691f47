"""`jaxtrain config CONFIG`: prints the resolved config, one key per line, with the source of each value."""

from __future__ import annotations

import argparse
import json

from jaxtrain.cli.setup import load_config
from jaxtrain.config import json_schema, show


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config, provenance = load_config(args.config, args.overrides, paths=False)
    print("\n".join(show(config, provenance)))
    return 0


def schema(args: argparse.Namespace) -> int:
    """Runs `jaxtrain schema`: prints the JSON Schema of the config."""
    del args
    print(json.dumps(json_schema(), indent=1))
    return 0
