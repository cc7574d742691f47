"""`jaxtrain config CONFIG`: prints the resolved config, one key per line, with the source of each value."""

from __future__ import annotations

import argparse

from jaxtrain.config import show
from jaxtrain.core.resolve import resolve


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config, provenance = resolve(args.config, *args.overrides, paths=False)
    print("\n".join(show(config, provenance)))
    return 0
