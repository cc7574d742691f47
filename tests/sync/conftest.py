"""What the tests of synchronisation share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jaxtrain


@pytest.fixture
def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns what a config with some changes is refused with, in one line."""
    monkeypatch.chdir(tmp_path)
    base = {"model": {"type": "tiny_net:Net"}, "data": {"type": "tiny_net:Rows", "global_batch": 16}, "steps": 12}

    def refused(**changes: Any) -> str:
        with pytest.raises(jaxtrain.UserError) as found:  # noqa: PT012
            run = jaxtrain.load(None, **{**base, "simulate": 8, "mesh": {"replica": 2, "data": 4}, **changes})
            _ = jaxtrain.Trainer(run).program
        (line,) = str(found.value).splitlines()
        return line

    return refused
