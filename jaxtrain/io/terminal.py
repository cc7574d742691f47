"""Consoles of the terminal, which print texts of users as they are."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """Returns a console that neither highlights numbers nor draws emoji, which `mine:Symbols:` would become.

    Args:
        options: of `rich.console.Console`.
    """
    return Console(highlight=False, emoji=False, **options)
