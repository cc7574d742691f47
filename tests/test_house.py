"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config.validate import all_keys

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))

# NNX is the definition language only: these cost several times the host time per step, or place specs wrongly.
FORBIDDEN = {"jit", "scan", "Optimizer", "get_partition_spec", "vmap", "grad", "value_and_grad", "remat"}

WITHOUT_JAX = (
    "jaxtrain", "jaxtrain.config", "jaxtrain.mesh.axes", "jaxtrain.mesh.rules", "jaxtrain.mesh.layout",
    "jaxtrain.mesh.check", "jaxtrain.mesh.context", "jaxtrain.models.tensors", "jaxtrain.models.check", "jaxtrain.data",
    "jaxtrain.cli.main", "jaxtrain.cli.commands", "jaxtrain.observe.tracker", "jaxtrain.observe.progress",
    "jaxtrain.observe.flops", "jaxtrain.checkpoint", "jaxtrain.plan.communication", "jaxtrain.plan.memory",
    "jaxtrain.plan.targets", "jaxtrain.plan.compile", "jaxtrain.plan.chips", "jaxtrain.plan.predict",
    "jaxtrain.plan.result", "jaxtrain.plan.search", "jaxtrain.plan.screen", "jaxtrain.plan.page",
    "jaxtrain.plan.diff", "jaxtrain.cli.plans", "jaxtrain.cli.checkpoints", "jaxtrain.checkpoint.copier",
    "jaxtrain.checkpoint.comeback", "jaxtrain.cli.report", "jaxtrain.resilience.watchdog",
    "jaxtrain.verify.shrink", "jaxtrain.verify.candidates",
    "jaxtrain.verify.compare", "jaxtrain.pipeline.schedule", "jaxtrain.pipeline.custom", "jaxtrain.pipeline.buffers",
    "jaxtrain.pipeline.draw", "jaxtrain.pipeline.fit", "jaxtrain.interop.files", "jaxtrain.interop.tensors",
    "jaxtrain.launch.supervise", "jaxtrain.cli.launching",
    "jaxtrain.config.guards", "jaxtrain.data.skips", "jaxtrain.resilience.errors",
)  # fmt: skip


def test_nnx_only_defines():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "nnx":
                assert node.attr not in FORBIDDEN, f"{path.relative_to(ROOT)}:{node.lineno} uses nnx.{node.attr}"


def test_files_and_functions_stay_small():
    for path in FILES:
        text = path.read_text()
        assert len(text.splitlines()) < (200 if path.match("train/loop.py") else 500), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 70, f"{path}:{node.lineno} {node.name}"


def test_fewer_than_120_config_keys():
    assert 60 < len(all_keys()) < 120


@pytest.mark.parametrize("module", WITHOUT_JAX)
def test_what_answers_before_jax_starts_does_not_import_it(module: str):
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
