"""Wheel, sdist, extras and Dockerfile are complete, `make` finds an interpreter, a release is one command."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import release
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python")
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "requirements.lock")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """The sdist and the wheel of this checkout."""
    return release.build(ROOT, tmp_path_factory.mktemp("dist"))


def test_wheel_and_sdist_hold_all_files_and_no_others(built: tuple[Path, Path]):
    assert release.check(ROOT, *built) == []
    with zipfile.ZipFile(built[1]) as archive:
        names = set(archive.namelist())
    configs = "jaxtrain/_configs"
    assert {"jaxtrain/py.typed", f"{configs}/schema.json", f"{configs}/quickstart.yaml", f"{configs}/layouts/ddp.yaml",
            f"{configs}/templates/own_model.py", "jaxtrain/io/page.html"} <= names  # fmt: skip


def test_a_file_that_is_missing_is_noticed(built: tuple[Path, Path], tmp_path: Path):
    broken = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(broken, "w") as part:
        for name in whole.namelist():
            if name != "jaxtrain/py.typed":
                part.writestr(name, whole.read(name))
    assert release.check(ROOT, built[0], broken) == ["wheel without jaxtrain/py.typed"]


def test_the_wheel_of_the_sdist_is_that_of_the_checkout(built: tuple[Path, Path], tmp_path: Path):
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    again = release.build(next(tmp_path.iterdir()), tmp_path / "dist")[1]
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(built[1]).namelist())


def copied(tmp_path: Path) -> Path:
    """A copy of what a release needs."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in SOURCES:
        shutil.copy(ROOT / name, root)
    for name in ("jaxtrain", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_a_release_is_one_command(tmp_path: Path, capsys):
    root = copied(tmp_path)
    assert release.main("9.8.7", root) == 0
    out = capsys.readouterr().out
    assert "jaxtrain-9.8.7.tar.gz, jaxtrain-9.8.7-py3-none-any.whl: complete" in out
    assert "git tag -a v9.8.7" in out
    assert 'version = "9.8.7"' in (root / "pyproject.toml").read_text()
    assert "\nversion: 9.8.7\n" in (root / "CITATION.cff").read_text()
    log = (root / "CHANGELOG.md").read_text()
    assert re.search(r"## Unreleased\n\n## 9\.8\.7 \(\d{4}-\d\d-\d\d\)\n", log)
    with pytest.raises(SystemExit, match=r"has a section 9\.8\.7 already"):
        release.main("9.8.7", root)
    with pytest.raises(SystemExit, match="says nothing under Unreleased"):
        release.main("9.8.8", root)


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.3", "1.2.3.4", "01.2.3"])
def test_a_version_is_semantic(version: str, tmp_path: Path):
    with pytest.raises(SystemExit, match=r"expected X\.Y\.Z"):
        release.set_version(tmp_path, version, "2030-01-01")


def test_the_version_is_the_same_everywhere():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_name_extras_that_exist():
    for texts in PROJECT["optional-dependencies"].values():
        for text in texts:
            own = re.match(r"jaxtrain\[(.*?)\]", text)
            assert own is None or set(own[1].split(",")) <= set(PROJECT["optional-dependencies"]), text


def test_templates_of_issues_are_forms():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    assert set(forms) == {"bug", "feature", "config"}
    for name in ("bug", "feature"):
        assert {"name", "description", "body"} <= set(forms[name])
        ids = [field["id"] for field in forms[name]["body"]]
        assert len(ids) == len(set(ids))


def make(target: Path, path: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["make", *options, f"VENV={target}", f"{target}/bin/python"]
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS")} | {"PATH": path}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env, check=False)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_takes_a_supported_interpreter_that_runs(tmp_path: Path):
    """Shims of interpreters that are not there fail, as those of pyenv do; an old one is passed by, too."""

    def shim(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    for name in INTERPRETERS:
        shim(name, "echo 'not found' >&2; exit 127")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    none = make(tmp_path / "venv", path)
    assert none.returncode == 2
    assert "no Python 3.11 or newer here; give one: make" in none.stdout
    shim("python3", f'exec {sys.executable} "$@"')
    assert f"python3 -m venv {tmp_path}/venv" in make(tmp_path / "venv", path, "-n").stdout
    shim("python3.13", f'exec {sys.executable} "$@"')
    assert f"python3.13 -m venv {tmp_path}/venv" in make(tmp_path / "venv", path, "-n").stdout


def instructions() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile, as (name, rest)."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
    return [
        (line.partition(" ")[0], line.partition(" ")[2]) for line in "\n".join(lines).replace("\\\n", "").split("\n")
    ]


def test_the_image_gets_the_files_that_it_copies():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied_names = [name for kind, rest in instructions() if kind == "COPY" for name in rest.split()[:-1]]
    assert copied_names
    for name in copied_names:
        assert (ROOT / name).exists()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in kept), f"{name} is in .dockerignore"
    assert dict(instructions())["FROM"] == "python:3.11-slim"  # the version of the lock


@pytest.mark.packaging
def test_the_steps_of_the_dockerfile_run(tmp_path: Path):
    """Without an image: COPY into a folder, RUN in it with an empty environment in front, ENTRYPOINT with CMD."""
    subprocess.run(["python3.11", "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    env = os.environ | {"PATH": f"{tmp_path}/venv/bin{os.pathsep}{os.environ['PATH']}"}
    folder, entry, ran = tmp_path / "root", [], 0
    for kind, rest in instructions():
        if kind == "WORKDIR":
            folder = tmp_path / "root" / rest.strip("/")
            folder.mkdir(parents=True)
        elif kind == "ARG":
            env[rest.partition("=")[0]] = rest.partition("=")[2]
        elif kind == "COPY":
            *names, target = rest.split()
            for name in names:
                place = folder / target if len(names) == 1 else folder / target / name
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy(ROOT / name, place)
        elif kind == "RUN":
            subprocess.run(rest, shell=True, cwd=folder, env=env, check=True, timeout=1800)
            ran += 1
        elif kind in ("ENTRYPOINT", "CMD"):
            entry += yaml.safe_load(rest)
        else:
            assert kind == "FROM"
    done = subprocess.run(entry, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    assert ran == 2
    assert "usage: jaxtrain COMMAND" in done.stdout


@pytest.mark.packaging
@pytest.mark.parametrize("extra", sorted(PROJECT["optional-dependencies"]))
def test_an_extra_resolves(extra: str):
    """With the locked versions, as `make` installs them. Nothing is installed."""
    command = f"{shlex.quote(sys.executable)} -m pip install --dry-run --quiet -c requirements.lock '.[{extra}]'"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
