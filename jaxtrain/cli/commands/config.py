"""`jaxtrain config CONFIG`: prints the resolved config, one key per line, with the source of each value."""

from __future__ import annotations

import argparse
import json
import sys

import jaxtrain


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    shown = jaxtrain.show_config(args.config, *args.overrides)
    for note in shown.notes:
        print(f"note  {note}", file=sys.stderr)
    print(shown)
    return 0


def schema(args: argparse.Namespace) -> int:
    """Runs `jaxtrain schema`: prints the JSON Schema of the config."""
    del args
    print(json.dumps(jaxtrain.config_schema(), indent=1))
    return 0
