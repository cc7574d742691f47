"""What faults on purpose change while they are in force. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, the attribute `name` of a module or class is what `change` makes of it."""
    real = getattr(owner, name)
    setattr(owner, name, change(real))
    try:
        yield
    finally:
        setattr(owner, name, real)
