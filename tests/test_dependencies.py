"""What is imported is declared, what is declared is locked within its bounds, and each upper bound has its reason."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import audit_lock
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = [Requirement(text) for texts in PROJECT["optional-dependencies"].values() for text in texts]
LOCKED = {
    canonicalize_name(name): version
    for name, version in (
        line.split("==") for line in (ROOT / "requirements.lock").read_text().split("\n") if "==" in line
    )
}
# Modules whose package has another name, or comes with a declared one that asks for its exact version.
PACKAGES = {"yaml": "pyyaml", "orbax": "orbax-checkpoint", "mlflow": "mlflow-skinny", "jaxlib": "jax",
            "pydantic_core": "pydantic"}  # fmt: skip
IMPORTERS = ("import_module", "import_optional")


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements} - {"jaxtrain"}


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Modules that a file imports; True with those that are imported as soon as the file is."""
    tree = ast.parse(path.read_text())
    at_once = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
            modules = [node.args[0].value] if isinstance(node.args[0], ast.Constant) else []
        yield from ((module.partition(".")[0], id(node) in at_once) for module in modules)


def third_party() -> dict[tuple[str, bool], str]:
    """The package of each import of others' modules, by the module and whether it is imported at once."""
    own = {*sys.stdlib_module_names, "jaxtrain"}
    found = {module for path in (ROOT / "jaxtrain").rglob("*.py") for module in imported(path)}
    return {key: canonicalize_name(PACKAGES.get(key[0], key[0])) for key in found if key[0] not in own}


def test_every_import_is_of_a_declared_package():
    packages = third_party()
    assert set(packages.values()) <= names(CORE + EXTRAS)
    assert {package for (_, at_once), package in packages.items() if at_once} <= names(CORE)


def test_every_dependency_is_imported():
    assert names(CORE) - {"chex"} <= set(third_party().values())  # chex is for users' own code


@pytest.mark.parametrize("requirement", CORE + EXTRAS, ids=str)
def test_the_lock_holds_a_version_within_the_bounds(requirement: Requirement):
    if requirement.name == "jaxtrain":  # an extra that holds another one
        assert requirement.extras <= set(PROJECT["optional-dependencies"])
    else:
        version = LOCKED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), version


def test_every_upper_bound_has_its_reason_beside_it():
    above = ""
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        bound = re.search(r'"[A-Za-z][\w.\[\]-]*[^"]*(<|==|~=|!=)\s*\d', line)
        assert not bound or "#" in line or above.startswith("#"), line
        above = line.strip()


def answers(monkeypatch, *answers: str | list[dict]) -> None:
    """Answers of pip-audit to one service after another: packages, or a line of an error."""
    outputs = iter(answers)

    def run(command: list[str], **_) -> subprocess.CompletedProcess:
        output = next(outputs)
        if isinstance(output, str):
            return subprocess.CompletedProcess(command, 1, "", f"Traceback\n{output}\n")
        return subprocess.CompletedProcess(command, 0, json.dumps({"dependencies": output}), "")

    monkeypatch.setattr(audit_lock.subprocess, "run", run)


def test_an_audit_without_a_service_says_so_and_passes(monkeypatch, capsys):
    answers(monkeypatch, [{"name": "a", "skip_reason": "not found"}], "no such host")
    assert audit_lock.main() == 0
    text = capsys.readouterr().out
    assert text.startswith("the locked versions are not audited (pypi: ")
    assert "no such host" in text
    assert text.count("\n") == 1


def test_an_audit_names_a_known_vulnerability(monkeypatch, capsys):
    bad = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    answers(monkeypatch, "no such host", [{"name": "a", "version": "1", "vulns": []}, bad])
    assert audit_lock.main() == 1
    assert "b 2: CVE-1, mended in 3\n1 of 2 locked packages" in capsys.readouterr().out
