"""Which versions of packages are installed."""

from __future__ import annotations

from importlib import metadata


def version(package: str) -> str:
    """Of an installed package; empty where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
