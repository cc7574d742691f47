"""How training ends when it cannot go on. Each message is one line. No JAX."""

from __future__ import annotations


class Failed(RuntimeError):
    """Training could not go on, or could not be saved; the message is one line."""


class NotSaved(Failed):
    """Training ended, and its last checkpoint is not on disk."""


class Diverged(Failed):
    """Loss and gradients stay bad: no later state is worth keeping."""


class Corrupted(Failed):
    """A device computes wrongly or holds wrong bits."""
