"""Files of benchmarks/, which is no package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load_benchmark(file: str, name: str | None = None) -> ModuleType:
    """Returns benchmarks/`file`.py as a module, by default of that name; dataclasses look for it by its name."""
    spec = importlib.util.spec_from_file_location(name or file, BENCHMARKS / f"{file}.py")
    assert spec
    assert spec.loader
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
