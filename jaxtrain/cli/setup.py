"""Steps that commands share before they import JAX."""

from __future__ import annotations

import argparse
import os
import sys

from jaxtrain.cli import xla_plugins


def config_overrides(args: argparse.Namespace) -> list[str]:
    """Returns the `key=value` arguments, and `--simulate` as one of them."""
    return [*args.overrides, *([] if args.simulate is None else [f"simulate={args.simulate}"])]


def prepare_jax_import(simulate: int | None) -> None:
    """Sets the environment that JAX reads at import. Call it before JAX is imported.

    Args:
        simulate: number of simulated CPU devices, None or 0 for real devices.
    """
    if simulate:
        os.environ["JAX_PLATFORMS"] = "cpu"  # JAX does not look for a TPU or GPU then
    xla_plugins.hide_absent()
    sys.path.append(os.getcwd())  # for a user's own `package.module:Class`
