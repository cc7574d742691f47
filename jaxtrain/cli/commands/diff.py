"""`jaxtrain diff A B`: compares the configs of two files or runs."""

from __future__ import annotations

import argparse

import jaxtrain


def run(args: argparse.Namespace) -> int:
    """Prints the keys whose values differ."""
    print("\n".join(map(str, jaxtrain.diff(args.a, args.b))) or "no difference")
    return 0
