"""Runs the notebooks in examples/ and keeps their outputs.

python tests/support/run_notebooks.py
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def executed(path: Path, seconds: int = 500) -> Any:
    """Returns the notebook with the outputs of a run in examples/. Raises CellExecutionError for a cell that fails."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    for name in ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS"):
        os.environ.pop(name, None)
    os.environ["PYTHONPATH"] = str(EXAMPLES.parent)
    NotebookClient(
        notebook,
        timeout=seconds,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": EXAMPLES}},
    ).execute()
    return notebook


if __name__ == "__main__":
    import nbformat

    for path in sorted(EXAMPLES.glob("*.ipynb")):
        nbformat.write(executed(path), path)
