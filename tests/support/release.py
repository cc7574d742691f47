"""Prepares a release: sets the version, dates the changelog, builds sdist and wheel, checks them, prints what is next.

make release VERSION=0.2.0
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:(?:a|b|rc)\d+)?")
UNRELEASED = "## Unreleased\n"
IN_SDIST = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "requirements.lock")


def package_files(root: Path) -> set[str]:
    """Files that a wheel must hold, by their names in it."""
    found = {}
    for folder, inside in (("jaxtrain", "jaxtrain"), ("configs", "jaxtrain/_configs")):
        for path in (root / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                found[f"{inside}/{path.relative_to(root / folder).as_posix()}"] = path
    return set(found)


def build(root: Path, target: Path) -> tuple[Path, Path]:
    """Builds (sdist, wheel) of a source folder."""
    before = set(target.glob("*")) if target.is_dir() else set()
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(target)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"release: hatchling fails: {done.stderr.strip()[-2000:]}")
    made = sorted(set(target.glob("*")) - before, key=lambda path: path.suffix)
    sdist, wheel = made if len(made) == 2 else (*target.glob("*.tar.gz"), *target.glob("*.whl"))
    return sdist, wheel


def check(root: Path, sdist: Path, wheel: Path) -> list[str]:
    """Problems of what was built: files that are missing, and those that do not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    with tarfile.open(sdist) as archive:
        source = {member.name.partition("/")[2] for member in archive.getmembers()}
    expected = package_files(root)
    problems = [f"wheel without {name}" for name in sorted(expected - inside)]
    problems += [f"wheel with {name}" for name in sorted(inside - expected)]
    problems += [f"sdist without {name}" for name in IN_SDIST if name not in source]
    needed = {name.replace("jaxtrain/_configs/", "configs/") for name in expected}
    problems += [f"sdist without {name}" for name in sorted(needed - source)]
    if "\n# jaxtrain" not in metadata:
        problems.append("wheel without the README as its description")
    return problems


def set_version(root: Path, version: str, today: str) -> None:
    """Writes a version into pyproject.toml, CITATION.cff and CHANGELOG.md. Raises SystemExit for a bad one."""
    if not VERSION.fullmatch(version):
        raise SystemExit(f"release: VERSION={version!r}; expected X.Y.Z, see CHANGELOG.md for when to raise which")
    log = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## {version}" in log:
        raise SystemExit(f"release: CHANGELOG.md has a section {version} already")
    news = log.partition(UNRELEASED)[2].partition("\n## ")[0]
    if not news.strip():
        raise SystemExit(
            "release: CHANGELOG.md says nothing under Unreleased; expected what a user sees of this version"
        )
    changes = {
        "CHANGELOG.md": (re.escape(UNRELEASED), f"{UNRELEASED}\n## {version} ({today})\n"),
        "pyproject.toml": (r'(?m)^version = ".*"$', f'version = "{version}"'),
        "CITATION.cff": (r"(?m)^version: .*$", f"version: {version}"),
    }
    for name, (pattern, text) in changes.items():
        content, count = re.subn(pattern, text, (root / name).read_text(encoding="utf-8"), count=1)
        if not count:
            raise SystemExit(f"release: {name} has no line for the version")
        (root / name).write_text(content, encoding="utf-8")


def main(version: str, root: Path = ROOT) -> int:
    """Makes the release and prints the commands that publish it."""
    if (root / ".git").exists():
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
        if changed.stdout:
            raise SystemExit(f"release: files are not committed: {changed.stdout.split()[1]}, ...")
    set_version(root, version, f"{datetime.now(UTC):%Y-%m-%d}")
    sdist, wheel = build(root, root / "dist")
    problems = check(root, sdist, wheel)
    if problems:
        raise SystemExit("\n".join(f"release: {problem}" for problem in problems))
    with tempfile.TemporaryDirectory() as folder:  # without its dependencies, which --version does not need
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, str(wheel)]
        subprocess.run(pip, check=True, timeout=300, capture_output=True)
        command, env = [sys.executable, "-m", "jaxtrain.cli.main", "--version"], os.environ | {"PYTHONPATH": folder}
        said = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=300)
    if not said.stdout.startswith(f"jaxtrain {version},"):
        raise SystemExit(f"release: the installed command says {said.stdout!r}")
    print(f"{sdist.name}, {wheel.name}: complete. Next:")
    print(f'  git commit -am "Version {version}" && git tag -a v{version} -m {version} && git push --follow-tags')
    print(f"  python -m twine upload {sdist.relative_to(root)} {wheel.relative_to(root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
