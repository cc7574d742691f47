"""Faults in a short form for tests: `kill@save:8/1` is kind kill, at save, of step 8, in process 1."""

from __future__ import annotations

import re
from typing import Any

_FORM = re.compile(r"([a-z_]+)@(?:([a-z]+):)?([0-9]+)(?:/([0-9]+))?")


def debug(*texts: str) -> dict[str, Any]:
    """The `debug` section of a config with these faults."""
    return {"faults": [fault(text) for text in texts]}


def fault(text: str) -> dict[str, Any]:
    """One of `debug.faults`."""
    found = _FORM.fullmatch(text)
    assert found, text
    kind, at, step, process = found.groups()
    return {"kind": kind, "at": at, "step": int(step), "process": int(process or 0)}


def override(*texts: str) -> str:
    """The same as `key=value` of the command line."""
    return f"debug.faults={[fault(text) for text in texts]}".replace("None", "null")
