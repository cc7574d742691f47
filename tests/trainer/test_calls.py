"""Callbacks of two processes that communicate: asked for by one of them, or unasked, which must end."""

from __future__ import annotations

import json
from pathlib import Path

import data_runs
import pytest

from jaxtrain.exit_codes import HUNG


def test_a_call_that_one_process_asks_for_is_made_by_all_after_the_same_step(tmp_path: Path):
    done = data_runs.launch("call_processes.py", tmp_path, "asked")
    assert [code for code, _ in done] == [0, 0], done
    found = [json.loads((tmp_path / f"found-{index}.json").read_text()) for index in range(2)]
    assert found[0] == found[1]
    ((name, step, total),) = found[0]
    assert (name, total) == ("sum", 3.0)
    assert step >= 3


@pytest.mark.parametrize("mode", ["alone", "hangs"])
def test_a_callback_that_waits_for_ever_ends_the_run_with_its_stack(tmp_path: Path, mode: str):
    done = data_runs.launch("call_processes.py", tmp_path, mode)
    assert HUNG in [code for code, _ in done], done
    assert all(code for code, _ in done), done
    stacks = "".join(output for _, output in done) + "".join(f.read_text() for f in tmp_path.rglob("hang*"))
    assert "on_step_end" in stacks
    assert not list(tmp_path.glob("found-*"))
