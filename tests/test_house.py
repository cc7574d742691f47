"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from jaxtrain.config.key_names import all_keys

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))

# NNX is the model_def language only: these cost several times the host time per step, or place specs wrongly.
FORBIDDEN = {"jit", "scan", "Optimizer", "get_partition_spec", "vmap", "grad", "value_and_grad", "remat"}

WITHOUT_JAX = (
    "jaxtrain", "jaxtrain.config", "jaxtrain.sharding.axes", "jaxtrain.sharding.rules", "jaxtrain.sharding.layout",
    "jaxtrain.sharding.check", "jaxtrain.sharding.context_parallel", "jaxtrain.models.decoder_params",
    "jaxtrain.core.layout_check", "jaxtrain.data", "jaxtrain.cli.main", "jaxtrain.cli.setup",
    "jaxtrain.cli.worker", "jaxtrain.cli.arguments", "jaxtrain.cli.commands.train", "jaxtrain.cli.commands.resume",
    "jaxtrain.cli.commands.evaluate", "jaxtrain.cli.commands.generate", "jaxtrain.cli.commands.verify",
    "jaxtrain.cli.commands.data",
    "jaxtrain.cli.commands.schedule", "jaxtrain.cli.commands.config", "jaxtrain.cli.commands.diff",
    "jaxtrain.trackers.base", "jaxtrain.trackers.console", "jaxtrain.models.flops", "jaxtrain.checkpoint",
    "jaxtrain.hlo.collectives", "jaxtrain.planning.cost.memory", "jaxtrain.planning.hardware.targets",
    "jaxtrain.planning.compile", "jaxtrain.planning.hardware.chips", "jaxtrain.planning.predict",
    "jaxtrain.planning.result", "jaxtrain.planning.search.search", "jaxtrain.planning.report.terminal",
    "jaxtrain.planning.report.page", "jaxtrain.planning.report.diff", "jaxtrain.cli.commands.plan",
    "jaxtrain.cli.commands.checkpoints", "jaxtrain.cli.commands.onboarding.init",
    "jaxtrain.cli.commands.onboarding.layouts", "jaxtrain.cli.commands.onboarding.doctor",
    "jaxtrain.cli.commands.onboarding.completion",
    "jaxtrain.checkpoint.durable_copy", "jaxtrain.checkpoint.durable", "jaxtrain.cli.commands.report",
    "jaxtrain.io.watchdog",
    "jaxtrain.verification.shrink", "jaxtrain.verification.candidates", "jaxtrain.verification.compare",
    "jaxtrain.pipeline.schedules.shipped", "jaxtrain.pipeline.schedules.files", "jaxtrain.pipeline.buffers",
    "jaxtrain.pipeline.schedules.draw", "jaxtrain.pipeline.check", "jaxtrain.interop.safetensors_io",
    "jaxtrain.interop.tensor_map", "jaxtrain.launch.supervisor", "jaxtrain.cli.commands.launch",
    "jaxtrain.data.skipped_batches", "jaxtrain.errors",
)  # fmt: skip


def test_nnx_only_defines():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
                assert node.attr not in FORBIDDEN, f"{path.relative_to(ROOT)}:{node.lineno} uses nnx.{node.attr}"


def test_files_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) <= (200 if path.match("trainer/loop.py") else 450), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path}:{node.lineno} {node.name}"


def test_types_are_compared_in_the_factories_alone():
    """`decoder` and `text` are told from users' classes by a property of the config, `is_builtin` and `is_text`."""
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "type":
                owner = ast.unparse(node.left.value)
                if owner in ("model", "data", "self") or owner.endswith((".model", ".data")):
                    found.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    assert found == [
        "jaxtrain/config/schema.py: self.type == OBJECT",
        "jaxtrain/config/schema.py: self.type == 'text'",
        "jaxtrain/config/sections/model.py: self.type == 'decoder'",
    ]


MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def imported_modules(path: Path) -> set[str]:
    """Modules of the package that a file imports, also inside functions, but not for type checkers alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxtrain"):
            members = (f"{node.module}.{alias.name}" for alias in node.names)
            names |= {member if member in MODULES else node.module for member in members}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names if alias.name.startswith("jaxtrain")}
    return names


def test_no_circles_of_imports():
    graph = {name: imported_modules(path) & set(MODULES) - {name, "jaxtrain"} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_at_most_175_config_keys():
    """120 of the core, and the others for what users bring: models, losses, optimizers..., and for `sync`."""
    assert 60 < len(all_keys()) <= 175


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_what_answers_before_jax_starts_does_not_import_it(module: str):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=240, check=False).returncode == 0


def test_the_public_interface_is_checked_strictly():
    """`make lint` runs pyright; the comment makes it strict there, but for what JAX leaves untyped."""
    source = ROOT / "jaxtrain"
    public = [source / "__init__.py", source / "errors.py", source / "callbacks" / "base.py"]
    public += [file for file in (source / "api").glob("*.py") if file.name != "__init__.py"]
    strict = "# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false"
    assert [file.name for file in public if strict not in file.read_text()] == []


def test_files_of_tests_have_names_of_their_own():
    """pytest imports them as top-level modules."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
