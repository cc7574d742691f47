"""A notebook in a kernel of Jupyter: interrupted, trained further, and with a trainer that does not fit its JAX."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs jaxtrain[notebooks]")
nbclient = pytest.importorskip("nbclient", reason="needs jaxtrain[notebooks]")
pytest.importorskip("ipykernel", reason="needs jaxtrain[notebooks]")

SUPPORT = Path(__file__).parents[1] / "support"
CELLS = (
    """
    import itertools, pathlib, sys, time
    sys.path[:0] = [{support!r}, {source!r}]
    import data_runs, jaxtrain

    folder = pathlib.Path({folder!r})

    def slow():
        for number, batch in enumerate(data_runs.batches(3000)):
            if number == 20:
                (folder / "begun").touch()
            time.sleep(0.02)
            yield batch

    trainer = data_runs.trainer(folder, "run", slow, steps=600, simulate=8)
    """,
    """
    result = trainer.fit()
    print(result.stopped_by, 0 < result.step < 600, trainer.step == result.step)
    print(sorted(int(path.name) for path in (result.run_dir / "checkpoints").glob("[0-9]*"))[-1] == result.step)
    """,
    """
    before = trainer.step
    for step in itertools.islice(trainer.steps(), 5):
        pass
    print(trainer.step - before, trainer.model is not None)
    """,
    "result",
    "result.plot()",
    """
    try:
        data_runs.trainer(folder, "other", slow, simulate=4).fit()
    except jaxtrain.UserError as error:
        print(error)
    """,
)


def test_an_interrupt_saves_and_leaves_a_trainer_that_goes_on(tmp_path):
    names = {"support": str(SUPPORT), "source": str(SUPPORT.parents[1]), "folder": str(tmp_path)}
    sources = [textwrap.dedent(cell.format(**names) if "{support" in cell else cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = nbclient.NotebookClient(notebook, timeout=400, kernel_name="python3")
    with client.setup_kernel():
        interrupt = threading.Thread(target=_interrupt_when_begun, args=(client, tmp_path / "begun"), daemon=True)
        for index, cell in enumerate(notebook.cells):
            if index == 1:
                interrupt.start()
            client.execute_cell(cell, index)
    assert _printed(notebook.cells[1]).splitlines()[-2:] == ["SIGINT True True", "True"]
    assert _printed(notebook.cells[2]).splitlines()[-1] == "5 True"
    assert "<iframe" in notebook.cells[3].outputs[0].data["text/html"]
    assert "image/png" in notebook.cells[4].outputs[0].data
    line = _printed(notebook.cells[5]).strip()
    assert "simulate" in line
    assert "\n" not in line


def _interrupt_when_begun(client, begun: Path) -> None:
    while not begun.exists():
        threading.Event().wait(0.1)
    os.kill(client.km.provisioner.pid, signal.SIGINT)


def _printed(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)
