"""The notebooks run from the first cell to the last, and their kept outputs are those of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_notebooks import EXAMPLES, executed

from jaxtrain.planning.hardware import targets

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def texts(notebook) -> str:
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    return "\n".join(str(out.get("text", "")) + str(out.get("data", {}).get("text/plain", "")) for out in outputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_says(path: Path):
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("sklearn")
    if path.stem == "plan_a_cluster" and (missing := targets.missing_packages(targets.parse("h100:8"), "auto")):
        pytest.skip(missing)
    import nbformat

    kept, now = nbformat.read(path, as_version=4), executed(path)
    for notebook in (kept, now):
        if path.stem == "plan_a_cluster":
            assert "remat full: 9.8 of 79 GB, 1.31 s a step" in texts(notebook)
            assert "8330 layouts" in texts(notebook)
        else:
            assert "EQUAL: 8 layouts and meshes" in texts(notebook)
            assert "missing-reduction: gradients are not summed over data" in texts(notebook)
    assert [len(cell.get("outputs", [])) for cell in kept.cells] == [len(cell.get("outputs", [])) for cell in now.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_name_no_folder_of_a_machine(path: Path):
    text = path.read_text()
    assert '"output_type": "error"' not in text
    assert str(Path.home()) not in text
    assert str(EXAMPLES.parent) not in text
