"""Files of benchmarks/ import one another by name, as when one of them is run."""

from __future__ import annotations

import pytest
from benchmark_modules import BENCHMARKS


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
