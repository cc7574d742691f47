"""The functions of the package beside `Trainer`: what the commands do, as Python, and what notebooks show."""

from __future__ import annotations

import ast
import json
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
    "report": {"report"},
}  # fmt: skip
COMPUTING = (
    "jaxtrain.trainer.setup", "jaxtrain.trainer.loop", "jaxtrain.inference.model", "jaxtrain.verification.verify",
    "jaxtrain.planning.predict", "jaxtrain.planning.search.search", "jaxtrain.core.program", "jaxtrain.api.",
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
