"""Temporary replacement of attributes, for fault injection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the attribute `name` of a module or class by `change(attribute)` while the context is active."""
    real = getattr(owner, name)
    setattr(owner, name, change(real))
    try:
        yield
    finally:
        setattr(owner, name, real)
