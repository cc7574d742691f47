"""Report of a config from a child process, and memory against the arrays."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from test_collectives import TINY
from wire_theory import communication, configured

from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError
from jaxtrain.hlo.collectives import divergent_permutes
from jaxtrain.planning import compile, step_program
from jaxtrain.planning.cost import memory
from jaxtrain.planning.hardware import targets
from jaxtrain.planning.pods import Pod

KEYS = {key.replace("__", "."): value for key, value in TINY.items()}


def test_a_child_process_reports_the_same(tmp_path):
    config = configured("fsdp", {"fsdp": 4}, KEYS)
    report = compile.compile_report(config, None, "cpu:4", hlo=tmp_path / "step.hlo")
    assert report.collectives == communication("fsdp", **TINY)
    assert report.sizes == {"replica": 1, "pipeline": 1, "data": 1, "fsdp": 4, "expert": 1, "context": 1, "model": 1}
    assert divergent_permutes((tmp_path / "step.hlo").read_text()) == []
    written = json.loads(json.dumps(report.as_dict()))
    assert compile.CompileReport.from_dict(written, report.text) == report
    assert dataclasses.asdict(report.memory) == written["memory"]
    batch = 5 * 8 // 4 * 64 * 4  # five arrays of 8 rows of 64 numbers, over 4 devices
    assert sum(report.state_bytes.values()) + batch == pytest.approx(report.memory.arguments, abs=64)


def test_memory_of_the_host_is_not_the_devices():
    sizes = {"argument": 5, "output": 4, "alias": 3, "temp": 7, "host_temp": 100}
    said = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    found = memory.compiled_memory(SimpleNamespace(memory_analysis=lambda: said))
    assert (found.total, found.peak, found.host) == (13, 13, 100)


def test_slices_need_axes_that_span_them():
    config = configured("hsdp", {"data": 2, "fsdp": 4}, KEYS)
    message = r"mesh\.dcn: target v5p:2x2x1\*2 has 2 slices, but the axes span 1; .* mesh\.dcn=\{data: 2\}"
    target = targets.parse("v5p:2x2x1", slices=2)
    assert re.match(message, compile.dcn_problem(config.mesh.dcn, target) or "")
    spanned = config.model_copy(update={"mesh": config.mesh.model_copy(update={"dcn": {"data": 2}})})
    assert compile.dcn_problem(spanned.mesh.dcn, target) is None
    assert compile.dcn_problem(config.mesh.dcn, targets.parse("v5p:2x2x2")) is None


def test_problems_in_the_other_process_are_one_line():
    config = configured("fsdp", {"fsdp": 3}, {**KEYS, "model.embed": 96})
    with pytest.raises(UserError, match="has 3 places for 4 devices") as caught:
        compile.compile_report(config, None, "cpu:4")
    assert "\n" not in str(caught.value)


@pytest.fixture
def compiler(monkeypatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts a shell script in the place of the process that compiles."""

    def replaced(body: str) -> None:
        script = tmp_path / "compiler"
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return replaced


@pytest.mark.parametrize(
    ("ending", "said"),
    [("kill -9 $$", "was killed; this machine is probably out of memory"),
     ("exit 1", "exited with status 1: Error: x"), ("", "exited with status 0: Error: x")],
)  # fmt: skip
def test_a_crashed_child_reports_how(compiler, ending: str, said: str):
    compiler(f"echo Traceback >&2\necho Error: x >&2\n{ending}")
    with pytest.raises(compile.CompileCrashed, match=f"^the compiling process {said}"):
        compile.compile_report(configured("fsdp", {"fsdp": 4}, KEYS), None, "cpu:4")


def test_no_compiler_outlives_the_call(compiler, tmp_path: Path):
    """One of two breaks down, or the time is up: the others, which would go on for a minute, are ended."""
    config, alive = configured("hsdp", {"data": 4, "fsdp": 2}, KEYS), tmp_path / "alive"
    compiler(f"mkdir {tmp_path}/first 2>/dev/null && exit 1\necho $$ > {alive}\nexec sleep 60")
    pods = [Pod(config, targets.parse("cpu:4"), {})] * 2
    with pytest.raises(compile.CompileCrashed, match="exited with status 1"):
        compile.compile_reports(config, None, "cpu:8", pods)
    if alive.exists() and (number := alive.read_text().strip()):
        assert not Path(f"/proc/{number}").exists()
    with pytest.raises(compile.CompileTimeout, match="target cpu:8: not compiled after 1 s"):
        compile.compile_report(config, None, "cpu:8", timeout=1.0)
    assert not Path(f"/proc/{alive.read_text().strip()}").exists()


@pytest.mark.parametrize("layout", ["hsdp"])
def test_state_bytes_are_those_of_the_arrays(layout: str):
    config = configured(layout, {"data": 2, "fsdp": 4}, {**KEYS, "optimizer.ema_decay": 0.99})
    program = build_program(config, 1024, jax.devices())
    state = program.init()
    held = {
        name: sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards
            if shard.device == jax.devices()[0]
        )
        for name, tree in state.items()
    }  # fmt: skip
    assert memory.state_bytes(program.state) == held
    assert held["ema"] == held["params"] > 0


def test_a_dim_that_does_not_divide_counts_as_padded():
    mesh = SimpleNamespace(shape={"fsdp": 4, "model": 2})
    sharding = SimpleNamespace(mesh=mesh, spec=(("fsdp", "model"), None, "model"))
    leaf = SimpleNamespace(shape=(10, 3, 5, 7), dtype=np.dtype("float32"), sharding=sharding)
    assert memory.leaf_bytes(leaf) == 2 * 3 * 3 * 7 * 4
    whole = SimpleNamespace(shape=(10, 3), dtype=np.dtype("int8"), sharding=None)
    assert memory.state_bytes({"params": {"a": leaf, "b": [whole, (whole,)]}}) == {"params": 504 + 60}


def test_a_users_own_data_needs_an_example():
    program = build_program(configured("fsdp", {"fsdp": 4}, KEYS), 1024, jax.devices()[:4])
    data = program.config.data.model_copy(update={"type": "mine:Data"})
    program = dataclasses.replace(program, config=program.config.model_copy(update={"data": data}))
    with pytest.raises(UserError, match=r"data\.type mine:Data: .* example batch"):
        step_program.abstract_batch(program)
    batch = step_program.abstract_batch(program, {"x": np.zeros((1, 3), np.float32), "y": np.zeros(1, np.int32)})
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in batch.items()} == {
        "x": ((8, 3), np.float32),
        "y": ((8,), np.int32),
    }
