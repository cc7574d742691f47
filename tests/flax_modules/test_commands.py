"""Commands on plain modules: verify names what is wrong, plan needs no data, a run goes on on another mesh."""

from __future__ import annotations

import json
import re
from pathlib import Path

import conformance
import numpy as np
import pytest
from conformance import MODULES

import jaxtrain
from jaxtrain.cli.main import main

BASE = """
name: run
simulate: 8
steps: 4
precision: fp32
layout: fsdp
data: {{type: "{data}", global_batch: 16}}
model: {{type: "{model}"}}
optimizer: {{name: sgd, lr: 0.05, weight_decay: 0.0}}
log: {{sample_tokens: 0}}
"""


def write(folder: Path, model: str, data: str = "conformance:Rows") -> str:
    """Writes a config whose folder is the working folder."""
    (folder / "own.yaml").write_text(BASE.format(model=model, data=data))
    return str(folder / "own.yaml")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ConvNet", "GPT", "Centered", "LinenConvNet", "Contrastive"])
def test_verify_finds_every_layout_equal(name: str, tmp_path: Path, capsys, monkeypatch):
    """Statistics, noise, own variables and losses across rows; at equal microbatches."""
    monkeypatch.setenv("COLUMNS", "200")
    module = "linen_modules" if name.startswith("Linen") else "nnx_modules"
    file = write(tmp_path, f"{module}:{name}")
    layouts = "zero2" if name == "GPT" else "ddp,zero2,fsdp"  # it takes long to compile
    assert main(["verify", file, "--layouts", layouts, "--steps", "2", *MODULES[name], "step.microbatches=2"]) == 0
    assert re.search(r"EQUAL: \d+ layouts and meshes of 8 devices", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("odd_modules:NoLoss", "NoLoss has no method `loss(batch, key)`; expected one, or loss.function"),
        ("command_modules:NanLoss", "on one device the loss of step 0 is nan, so there is nothing to compare with"),
    ],
)
def test_verify_names_what_it_cannot_compare(model: str, line: str, tmp_path: Path, capsys):
    assert main(["verify", write(tmp_path, model), "--layouts", "ddp", "--steps", "1"]) == 2
    assert line in capsys.readouterr().err


def test_verify_names_a_mean_and_a_missing_reduction(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = ["verify", write(tmp_path, "nnx_modules:MeanLoss"), "--layouts", "ddp", "--steps", "1"]
    assert main(command) == 0
    assert "the loss returns a mean, weighted by the rows of a microbatch" in capsys.readouterr().out
    command = ["verify", write(tmp_path, "nnx_modules:Mixer"), *MODULES["Mixer"], "--layouts", "ddp", "--steps", "1"]
    assert main([*command, "--inject", "missing-reduction"]) == 1
    assert "missing-reduction" in capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", ["nnx_modules:ConvNet", "linen_modules:LinenTransformer"])
def test_plan_needs_no_data_where_the_class_declares_a_batch(model: str, tmp_path: Path, capsys):
    file = write(tmp_path, model, "command_modules:NotHere")
    options = MODULES[model.partition(":")[2]]
    assert main(["plan", file, "--target", "local", "--json", str(tmp_path / "plan.json"), *options, "layout=ddp"]) == 0
    capsys.readouterr()
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan


def test_a_run_goes_on_on_another_mesh_with_its_mutable_variables(tmp_path: Path):
    options = (*MODULES["ConvNet"], f"dir={tmp_path}", "optimizer.ema_decay=0.9", "precision=fp32")
    whole = jaxtrain.train(conformance.config("ConvNet", *options, "layout=fsdp", "steps=4", "name=whole"))
    half = jaxtrain.train(conformance.config("ConvNet", *options, "layout=fsdp", "steps=2", "name=half"))
    config = conformance.config("ConvNet", *options, "layout=zero1", "steps=4", "name=half")
    rest = jaxtrain.train(config, run_dir=half.run_dir, resume=True)
    difference, path = conformance.largest_difference(whole.state, rest.state)
    assert difference < 1e-5, path
    assert float(np.abs(rest.state["mutable"]["norm"]["mean"]).max()) > 0


def test_text_need_not_be_here_for_a_linen_model_of_text(tmp_path: Path, capsys, monkeypatch):
    """Its variables are created from the batch that the config tells."""
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "text.yaml").write_text(
        "{name: text, model: {type: 'command_modules:Bigrams'}, loss: 'command_modules:cross_entropy', layout: fsdp, "
        "data: {sources: [/not/here], sequence: 32, global_batch: 16}, log: {sample_tokens: 0}}"
    )
    file = str(tmp_path / "text.yaml")
    assert main(["verify", file, "--layouts", "ddp,fsdp", "--steps", "2"]) == 0
    assert "EQUAL" in capsys.readouterr().out
    assert main(["plan", file, "--target", "local", "simulate=8"]) == 0
