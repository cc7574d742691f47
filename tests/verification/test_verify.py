"""`jaxtrain verify`: equal layouts pass, every kind of fault is caught and named, users' own models too."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxtrain import load
from jaxtrain.cli.main import main
from jaxtrain.config import UserError
from jaxtrain.config.schema import MeshConfig
from jaxtrain.core.program import build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.verification import known_faults
from jaxtrain.verification.candidates import Candidate, candidates
from jaxtrain.verification.compare import Recording, Verdict, compare, diagnose
from jaxtrain.verification.outcome import LayoutResult, Outcome
from jaxtrain.verification.packed_batch import packed_batch
from jaxtrain.verification.report import details, summary_lines, table
from jaxtrain.verification.shrink import shrink
from jaxtrain.verification.verify import (
    Reference,
    _notes,
    collectives_text,
    verify,
    verify_layout,
)

CONFIG = """
layout: 3d
model: {embed: 4096, layers: 32, heads: 32, kv_heads: 8, mlp: 14336, tie_embeddings: true}
data: {sequence: 8192, global_batch: 512}
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("verify") / "large.yaml"
    file.write_text(CONFIG)
    return file


@functools.cache
def reference(path: Path, layout: str = "3d") -> tuple:
    """The small config on a layout with two microbatches, its data, and one device."""
    small, _ = shrink(load(path), 8)
    small = small.model_copy(update={"model": small.model.model_copy(update={"layers": 1})})
    found, _ = candidates(small, [layout], 8)
    hosts = [packed_batch(step, small.data.global_batch, small.data.sequence, small.model.vocab) for step in range(2)]
    alone = small.model_copy(update={"mesh": MeshConfig(), "rules": {}, "simulate": None})
    return found[-1], hosts, Reference(build_program(alone, small.model.vocab, jax.devices()[:1]), hosts)


def test_a_large_config_shrinks_and_says_how(path):
    small, changes = shrink(load(path), 8)
    assert small.precision == "fp32"
    assert (small.model.heads, small.model.kv_heads, small.model.layers) == (8, 2, 4)
    assert small.model.tie_embeddings
    assert "model.embed: 4096 -> 64" in changes
    assert "data.sequence: 8192 -> 32" in changes


def test_experts_shrink_too():
    config = load(None, "model.moe={num_experts: 64, top_k: 6}", "model.mlp=1408", "step.attention=cudnn")
    small, changes = shrink(config, 8)
    assert (small.model.moe.num_experts, small.model.moe.top_k, small.model.mlp) == (8, 4, 64)
    assert small.step.attention == "auto"
    assert "model.moe.num_experts: 64 -> 8" in changes
    # What was legal stays so: a selection bias needs something to select, and places are no more than tokens.
    for options in (
        "num_experts: 256, top_k: 8, bias_update_rate: 0.001",
        "num_experts: 64, top_k: 6, capacity_factor: 4.0",
    ):
        small, _ = shrink(load(None, f"model.moe={{{options}}}"), 8)
        assert candidates(small, ["ep", "ddp"], 8)[1] == {}
    small, _ = shrink(load(None, "model.moe={num_experts: 4, top_k: 4, capacity_factor: 1.0}"), 8)
    assert (small.model.moe.num_experts, small.model.moe.top_k, small.model.moe.capacity_factor) == (4, 4, 1.0)


def test_every_legal_mesh_once(path):
    small, _ = shrink(load(path), 8)
    found, refused = candidates(small, ["fsdp_tp", "tp", "(its own)", "fsdp"], 8)
    meshes = [(c.layout, c.mesh, c.config.step.microbatches) for c in found]
    assert ("fsdp_tp", "fsdp 4 x model 2", 1) in meshes
    assert ("tp", "data 4 x model 2", 1) in meshes
    assert ("fsdp", "data 2 x fsdp 4", 2) in meshes
    assert len(set(meshes)) == len(meshes)
    assert ("tp", "model 8", 1) in meshes  # two key/value heads are repeated
    assert not refused
    assert not [mesh for layout, mesh, _ in meshes if layout == "tp" and "model" not in mesh]
    found, _ = candidates(small, ["cp_ring"], 8)
    assert {"context 8", "context 2 x model 4", "fsdp 2 x context 4"} <= {c.mesh for c in found}
    assert [c.mesh for c in found if c.config.step.microbatches == 2] == ["fsdp 2 x context 2 x model 2"]
    experts, _ = shrink(load(None, "model.moe={}"), 8)
    assert "expert 4 x model 2" in {c.mesh for c in candidates(experts, ["ep_tp"], 8)[0]}
    _, refused = candidates(small, ["fsdp_tp"], 3)
    assert "fsdp_tp" in refused
    with pytest.raises(UserError, match="did you mean `fsdp_tp`"):
        candidates(small, ["fsdp_pt"], 8)


def test_context_parallel_methods_differ_on_every_axis_of_the_context(tmp_path, path):
    names = []
    for formulation in ("ring", "gather"):
        names.append(str(tmp_path / f"{formulation}.yaml"))
        text = "mesh: {model: -1}\nrules: {batch: data, sequence: model, context: model}\n"
        Path(names[-1]).write_text(f"{text}context_parallel: {formulation}\n")
    small, _ = shrink(load(path), 8)
    found, _ = candidates(small, names, 8)
    assert {c.config.context_parallel for c in found if c.mesh == "model 8"} == {"ring", "gather"}


@pytest.mark.parametrize(
    ("keys", "given", "used"),
    [([], None, 8), (["simulate=4"], None, 4), (["simulate=4"], 2, 2), (["simulate=1"], None, 8)],
)
def test_the_devices_are_those_of_the_call_or_the_config(monkeypatch, keys, given, used):
    def shrunk(config, devices):
        raise UserError(f"{devices} devices")

    monkeypatch.setattr("jaxtrain.verification.verify.shrink", shrunk)
    with pytest.raises(UserError, match=f"^{used} devices"):
        verify({}, *keys, devices=given)


def test_nothing_compared_is_not_called_equal():
    *_, last = summary_lines(Outcome([], [], {"ep": "no experts"}, 8, 3))
    assert last == "NOTHING COMPARED: no layout was tried on 8 devices"


def test_what_documents_and_microbatches_do_to_one_another_is_said():
    with_capacity = load(None, "model.moe={num_experts: 4, top_k: 2, capacity_factor: 1.0}")
    (line,) = _notes(with_capacity, False)
    assert line.startswith("model.moe.capacity_factor: documents of a row compete for the slots of an expert")
    assert line in summary_lines(Outcome([], [], {}, 8, 3, _notes(with_capacity, True)))
    assert [*_notes(load(None, "model.moe={num_experts: 4, top_k: 2}"), False), *_notes(load(None), False)] == []
    (line,) = _notes(load(None), True)
    assert line.startswith("the loss returns a mean")


@pytest.mark.parametrize(("width", "is_shown"), [(80, (False, False)), (110, (True, False)), (140, (True, True))])
def test_a_row_of_the_table_is_one_line_of_any_screen_and_the_rest_is_said_below(width, is_shown):
    candidate = Candidate("cp_ulysses", resolve(None, "mesh={data: 2, context: 2, model: 2}", checks=())[0])
    equal = LayoutResult(candidate, Verdict(1e-7, 2e-7, "layers/attention/q", 3e-5, None), "fsdp 65 AG 2.2 MB")
    console = Console(width=width, file=io.StringIO(), record=True)
    outcome = Outcome([equal, LayoutResult(candidate, None, error="INTERNAL: " + "long " * 20)], [], {}, 8, 3)
    console.print(table(outcome, width))
    _, first, second = console.export_text().splitlines()
    start = ["cp_ulysses", "data", "2", "x", "context", "2", "x", "model", "2", "1"]
    assert first.split()[:14] == [*start, "1.0e-07", "2.0e-07", "3.0e-05", "equal"]
    assert second.split() == [*start, "failed"]
    assert (equal.verdict.tensor in first, equal.collectives in first) == is_shown
    below = [line for line in details(outcome, width) if line.startswith("cp_ulysses")]
    tensor = "" if is_shown[0] else f"{equal.verdict.tensor}; "
    assert below == [f"cp_ulysses {candidate.mesh} 1: {tensor}{equal.collectives}"] * (not is_shown[1])


def test_a_right_layout_is_equal(path):
    candidate, hosts, alone = reference(path)
    row = verify_layout(candidate, hosts, alone, jax.devices(), None)
    assert row.is_equal, row
    assert row.verdict.gradient < 1e-5
    assert "model" in row.collectives


def test_a_layout_that_cannot_be_traced_fails_alone(path, monkeypatch):
    """Such as a user's model that constrains an activation over one axis twice."""
    small, _ = shrink(load(path), 8)
    (candidate, *_), _ = candidates(small, ["tp"], 8)

    def refused(*_):
        raise UserError("axis `model` is used twice on a tensor")

    monkeypatch.setattr("jaxtrain.verification.verify.build_program", refused)
    row = verify_layout(candidate, [], None, jax.devices(), None)
    assert row == LayoutResult(candidate, None, error="axis `model` is used twice on a tensor")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "layout"),
    [
        *((fault, "3d") for fault in known_faults.INJECTIONS if fault != known_faults.CONTEXT_MISSING),
        *((known_faults.CONTEXT_MISSING, layout) for layout in ("cp_gather", "cp_ring")),
    ],
)
def test_every_fault_is_caught_and_named(path, fault, layout):
    candidate, hosts, alone = reference(path, layout)
    row = verify_layout(candidate, hosts, alone, jax.devices(), fault)
    assert not row.is_equal
    named = "summed 2 times, over" if fault == known_faults.DOUBLED else fault
    assert named in row.verdict.cause, row.verdict


def test_a_users_own_model_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    file = Path(__file__).parents[2] / "configs" / "recipes" / "spirals.yaml"
    command = ["verify", str(file), "--layouts", "zero1,fsdp"]
    assert main([*command, "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"EQUAL: \d+ layouts and meshes of 8 devices, 2 steps equal one device", out)
    assert "fsdp 8" in out
    assert main([*command, "--inject", "nothing"]) == 2
    assert "expected missing-reduction" in capsys.readouterr().err
    assert main(["verify", str(file), "--layouts", "nope"]) == 2


def test_compare_by_hand():
    expected = {"a": np.array([3.0, 4.0]), "b": np.array([1.0])}

    def verdict(gradients: dict, loss: float = 1.0) -> Verdict:
        actual = Recording([loss], gradients, expected, "")
        return compare(actual, Recording([1.0], expected, expected, ""))

    assert verdict(expected).is_equal
    different = verdict({"a": expected["a"], "b": np.array([1.0 + 2e-5])})
    assert (different.first, different.tensor) == ("b", "b")
    assert different.gradient == pytest.approx(2e-5, rel=1e-6)
    assert verdict(expected, loss=1.1).first == "the loss of step 0"
    assert verdict(expected, loss=np.nan).first == "the loss of step 0"
    assert verdict({"a": expected["a"] * np.nan, "b": expected["b"]}).first == "a"
    doubled = {"a": 4 * expected["a"], "b": expected["b"]}
    assert diagnose(doubled, expected, {}, {"data": 2, "model": 4}) == (
        "a is 4 times the reference: summed 4 times, over model?"
    )
    assert diagnose(doubled, expected, {}, {"data": 4, "fsdp": 1, "model": 4}).endswith("over data or model?")
    assert diagnose(doubled, expected, {"known": doubled}, {}) == "known"
    assert diagnose({"a": np.array([9.0, 1.0]), "b": expected["b"]}, expected, {}, {}) == ""


def test_collectives_in_a_line():
    text = """HloModule m, entry_computation_layout={(f32[250000]{0})->f32[250000]{0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (p: f32[250000]) -> f32[250000] {
  %p = f32[250000]{0} parameter(0)
  ROOT %r = f32[250000]{0} all-reduce(%p), replica_groups={{0,1}}, to_apply=%add
}
"""
    assert collectives_text(text, {"data": 2}) == "data 1 AR 1 MB"
