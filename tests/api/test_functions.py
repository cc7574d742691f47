"""The functions of the package beside `Trainer`: what the commands do, as Python, and what notebooks show."""

from __future__ import annotations

import ast
import json
import os
import shutil
from pathlib import Path

import optax
import pytest
from regression import ROWS, Linear, Points, squares

import jaxtrain
from jaxtrain.cli.main import main
from jaxtrain.verification import known_faults

COMMANDS = Path(jaxtrain.__file__).parent / "cli" / "commands"
# A command of the left calls these functions of the package, and no code below them that computes.
CALLS = {
    "train": {"train"}, "resume": set(), "evaluate": {"evaluate"}, "generate": {"generate", "stream"},
    "plan": {"plan", "search"}, "verify": {"verify"}, "export_hf": {"export"}, "import_hf": {"import_model"},
    "report": {"report"}, "checkpoints": {"checkpoints"}, "config": {"config_schema", "show_config"}, "diff": {"diff"},
    "data": {"build_data", "show_data", "train_tokenizer"}, "schedule": {"compare_schedules", "schedule"},
}  # fmt: skip
COMPUTING = (
    "jaxtrain.trainer.setup", "jaxtrain.trainer.loop", "jaxtrain.inference.model", "jaxtrain.verification.verify",
    "jaxtrain.planning.predict", "jaxtrain.planning.search.search", "jaxtrain.core.program", "jaxtrain.api.",
    "jaxtrain.checkpoint.store", "jaxtrain.data.prepare", "jaxtrain.core.resolve", "jaxtrain.pipeline.schedules.files",
)  # fmt: skip
MODEL = {"embed": 16, "layers": 2, "heads": 4, "mlp": 32}


OBJECTS = {"model": Linear, "loss": squares, "data": Points()}


@pytest.mark.parametrize("command", CALLS)
def test_a_command_calls_the_function_of_the_package(command: str):
    tree = ast.parse((COMMANDS / f"{command}.py").read_text())
    used = {
        node.attr for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "jaxtrain"
    }  # fmt: skip
    assert used == CALLS[command]
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [name for name in imported if name.startswith(COMPUTING)] == []


def test_public_names_are_there_and_no_package_has_one_of_them():
    packages = {path.parent.name for path in COMMANDS.parent.parent.glob("*/__init__.py")}
    assert not packages & set(jaxtrain.__all__)
    for name in jaxtrain.__all__:
        assert getattr(jaxtrain, name).__doc__


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> jaxtrain.Config:
    """A short run of the decoder on text."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text").mkdir()
    for index in range(40):
        (folder / "text" / f"{index}.txt").write_text("to be or not to be, that is the question.\n" * 10)
    data = {
        "sources": str(folder / "text"), "validation_fraction": 0.2, "sequence": 32, "global_batch": 8,
        "cache_dir": str(folder / "cache"),
    }  # fmt: skip
    return jaxtrain.train(
        {"model": MODEL}, name="run", dir=str(folder), steps=4, simulate=8, layout="fsdp", data=data,
        eval={"batches": 1}, log={"tensorboard": False, "sample_tokens": 0},
    )  # fmt: skip


def test_evaluation_and_generation_are_those_of_the_commands(run, capsys):
    assert main(["eval", str(run.run_dir)]) == 0
    assert json.loads(capsys.readouterr().out) == jaxtrain.evaluate(run.run_dir)
    assert main(["generate", str(run.run_dir), "--prompt", "to be", "--tokens", "7", "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    options = {"tokens": 7, "seed": 3}
    assert "".join(jaxtrain.stream(run.run_dir, "to be", **options)) + "\n" == printed
    assert jaxtrain.generate(run.run_dir, ["to be", "or"], **options)[0].startswith("to be")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"top_p": 2.0}, "top_p"), ({"tokens": 0}, "tokens"), ({"temperature": float("nan")}, "temperature")],
)
def test_a_bad_option_is_one_line(run, options, said):
    with pytest.raises(jaxtrain.UserError, match=said) as error:
        jaxtrain.generate(run.run_dir, "x", **options)
    assert "\n" not in str(error.value)


def test_an_export_is_that_of_the_command(run, tmp_path, capsys):
    done = jaxtrain.export(run.run_dir, tmp_path / "a", dtype="bfloat16")
    assert main(["export", str(run.run_dir), "--to", str(tmp_path / "b"), "--dtype", "bfloat16"]) == 0
    assert str(done) in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names)
    config = jaxtrain.import_model(tmp_path / "a", tmp_path / "back")
    assert config.model.embed == MODEL["embed"]
    with pytest.raises(jaxtrain.UserError, match="already exists"):
        jaxtrain.export(run.run_dir, tmp_path / "a")


def test_checkpoints_are_those_of_the_command(run, tmp_path, capsys):
    copy = tmp_path / "run"
    shutil.copytree(run.run_dir, copy)
    found = jaxtrain.checkpoints(copy)
    assert main(["checkpoint", "ls", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [row.as_json() for row in found]
    assert [row.step for row in found] == [4]
    assert found[0].state == "good"
    assert found.inspect()["metrics"] == found.inspect(4)["metrics"]
    assert found.inspect()["tensors"]["step"] == [[], "int32"]
    assert found.verify() == {4: []}
    assert "<table" in found._repr_html_()
    with pytest.raises(jaxtrain.UserError, match="no checkpoint 3"):
        found.verify(3)
    with pytest.raises(jaxtrain.UserError, match="is the last good one"):
        found.prune(steps=[4])
    with pytest.raises(jaxtrain.UserError, match="expected keep, steps or set_aside"):
        found.prune()
    shutil.copytree(copy / "checkpoints" / "4", copy / "checkpoints" / "bad-2")
    assert found.prune(set_aside=True, dry_run=True).names == ("bad-2",)
    assert (copy / "checkpoints" / "bad-2").exists()
    assert found.prune(set_aside=True).bytes > 0
    assert not (copy / "checkpoints" / "bad-2").exists()
    largest = max((path for path in (copy / "checkpoints" / "4").rglob("*") if path.is_file()), key=os.path.getsize)
    largest.write_bytes(largest.read_bytes()[:-1] + b"x")
    assert len(found.verify(4)[4]) == 1
    assert main(["checkpoint", "verify", str(copy)]) == 1
    with pytest.raises(jaxtrain.UserError, match="no checkpoints found"):
        jaxtrain.checkpoints(tmp_path)


def test_configs_are_shown_and_compared(run, tmp_path, capsys):
    shown = jaxtrain.show_config("quickstart", "steps=7", layout="fsdp")
    assert main(["config", "quickstart", "steps=7", "layout=fsdp"]) == 0
    assert capsys.readouterr().out == f"{shown}\n"
    assert shown.config.steps == 7
    assert shown.sources["steps"] == "command line"
    assert "<td>command line</td>" in shown._repr_html_()
    differences = {row.key: row for row in jaxtrain.diff("quickstart", shown.config)}
    assert (differences["steps"].b, differences["steps"].source_b) == (7, "Config")
    assert jaxtrain.diff(run.run_dir, run.run_dir / "config.yaml") == []
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == jaxtrain.config_schema()


def test_data_is_prepared_as_by_the_command(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question.\n" * 50)
    keys = {"sources": str(tmp_path / "text.txt"), "validation_fraction": 0.0}
    made = jaxtrain.train_tokenizer({"data": keys}, vocab=270, out=tmp_path / "a.json")
    (built,) = jaxtrain.build_data(
        {"data": keys | {"tokenizer": str(made.path), "cache_dir": str(tmp_path / "cache")}}, steps=1
    )
    assert built.tokens["train"] > 0
    (tmp_path / "c.yaml").write_text(json.dumps({"data": keys}))
    assert (
        main(["data", "tokenizer", str(tmp_path / "c.yaml"), "--vocab", "270", "--out", str(tmp_path / "b.json")]) == 0
    )
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert "b.json: 270 tokens" in capsys.readouterr().out


def test_schedules_are_priced_and_drawn():
    one = jaxtrain.schedule("1f1b", 4, 8, costs=(1, 1, 1))
    # (p - 1) / (m + p - 1), as in Megatron-LM's paper (arXiv 2104.04473)
    assert one.figures[0].bubble == pytest.approx(3 / 11)
    assert is_png(one.plot())
    every = jaxtrain.compare_schedules(stages=4, microbatches=8)
    assert "zb_h1" in [table.name for table in every.tables]
    assert "<table" in every._repr_html_()
    with pytest.raises(jaxtrain.UserError, match="costs are"):
        jaxtrain.schedule("1f1b", costs=(1, 0, 1))
    with pytest.raises(jaxtrain.UserError, match="did you mean"):
        jaxtrain.schedule("1f1")


def is_png(plot) -> bool:
    return plot._repr_png_().startswith(b"\x89PNG")


def test_a_notebook_shows_a_run(run, tmp_path):
    assert run._repr_html_().startswith("<iframe")
    assert f"step {run.step}, finished" in repr(run)
    assert is_png(run.plot())
    assert is_png(run.plot("loss", "lr"))
    assert run.report().plot().save(tmp_path / "loss.svg").read_text().startswith("<?xml")
    with pytest.raises(jaxtrain.UserError, match="did you mean `loss`"):
        run.plot("los")


def test_a_plan_of_a_class_is_that_of_its_name():
    keys = {"data": {"type": "regression:ReadablePoints", "global_batch": ROWS}, "precision": "fp32", "layout": "fsdp"}
    named = keys | {"model": {"type": "regression:Linear"}, "loss": "regression:squares"}
    plans = [jaxtrain.plan(keys, "cpu:8", model=Linear, loss=squares), jaxtrain.plan(named, "cpu:8")]
    assert plans[0].compiled, plans[0].reason
    assert plans[0].memory == plans[1].memory
    assert plans[0].tensors == plans[1].tensors
    assert "<iframe" in plans[0]._repr_html_()
    assert is_png(plans[0].plot())
    with pytest.raises(jaxtrain.UserError, match=r"model: .* cannot be imported") as error:
        jaxtrain.plan(keys, "cpu:8", model=lambda rngs: Linear(rngs))
    assert "\n" not in str(error.value)


def test_a_search_shows_its_ranking():
    ranked = jaxtrain.search({"model": MODEL | {"vocab": 64}, "data": {"global_batch": 8}}, "h100:8", top=0)
    assert ranked.counted > 1
    assert "<table" in ranked._repr_html_()
    assert is_png(ranked.plot())


def test_layouts_of_python_objects_are_verified():
    """An optimizer object whose updates see the whole tensor; with a fault the comparison finds it."""
    optimizer = optax.chain(optax.scale_by_trust_ratio(), optax.sgd(0.1))
    base = {"data": {"global_batch": ROWS}}
    outcome = jaxtrain.verify(base, layouts=["ddp", "fsdp", "zero2"], steps=2, **OBJECTS, optimizer=optimizer)
    assert outcome.is_equal, outcome.rows
    assert {row.candidate.layout for row in outcome.rows} == {"ddp", "fsdp", "zero2"}
    assert "EQUAL" in outcome._repr_html_()
    assert is_png(outcome.plot())
    wrong = jaxtrain.verify(base, layouts=["fsdp"], steps=1, **OBJECTS, inject=known_faults.MISSING)
    assert not wrong.is_equal
    assert "DIFFERENT" in wrong._repr_html_()


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("generate", {"prompt": "a", "max_tokens": 9}, "generate: no argument `max_tokens` .did you mean `tokens`"),
        ("evaluate", {"modell": Linear}, "evaluate: no argument `modell` .did you mean `model`"),
        ("verify", {"layout": "fsdp"}, 'verify: no argument `layout`; a key of the config is a text: "layout=..."'),
    ],
)
def test_an_argument_that_a_function_lacks_is_named(function: str, arguments: dict, said: str, tmp_path: Path):
    with pytest.raises(jaxtrain.UserError, match=said):
        getattr(jaxtrain, function)(tmp_path if function != "verify" else {}, **arguments)


def test_a_verification_prints_its_table_and_no_fields():
    outcome = jaxtrain.verify({"data": {"global_batch": ROWS}}, layouts=["ddp"], steps=1, **OBJECTS)
    lines = repr(outcome).splitlines()
    assert lines[0].split()[:2] == ["layout", "mesh"]
    assert lines[-1].startswith("EQUAL: ")
    assert lines[1].endswith(" equal")
    assert "Config(" not in repr(outcome)
