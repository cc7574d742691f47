"""`jaxtrain layouts`: lists the layouts that a config here can use, with mesh axes and a sentence on each."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from pathlib import Path

from jaxtrain.config.shipped import find_layout, layout_names
from jaxtrain.config.yaml_reader import read_file
from jaxtrain.errors import Problem, UserError

NARROW = 60  # columns of a sentence at least


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.name is not None:
        try:
            print(find_layout(args.name, None).read_text(encoding="utf-8").rstrip())
        except ValueError as error:
            raise UserError(f"layouts: {error}") from error
        return 0
    rows = [_row(name, find_layout(name, None)) for name in layout_names()]
    print("\n".join(_lines(rows)))
    print("\n`jaxtrain layouts NAME` prints one; `layout=NAME mesh.AXIS=SIZE` uses it; -1 takes what remains.")
    return 0


def _row(name: str, file: Path) -> tuple[str, str, str]:
    """Returns (name, mesh, sentence)."""
    problems: list[Problem] = []
    tree = read_file(file, str(file), problems)
    mesh = tree.value.get("mesh") if tree is not None and not problems else None
    sizes = mesh.value.items() if mesh is not None and isinstance(mesh.value, dict) else ()
    shape = " x ".join(f"{axis} {node.value}" for axis, node in sizes)
    return name, shape or "-", sentence(file.read_text(encoding="utf-8"))


def sentence(text: str) -> str:
    """Returns the first sentence of the comment that a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if "yaml-language-server" not in line:
            lines.append(line.lstrip("# "))
    return re.split(r"(?<=[.])\s", " ".join(lines))[0]


def _lines(rows: list[tuple[str, str, str]]) -> list[str]:
    """Formats the rows in columns; on a terminal long sentences go on below."""
    names, meshes = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    lines = []
    for name, mesh, text in rows:
        parts = textwrap.wrap(text, max(NARROW, width - names - meshes)) or [""]
        lines.append(f"{name:<{names}}{mesh:<{meshes}}{parts[0]}".rstrip())
        lines += [" " * (names + meshes) + part for part in parts[1:]]
    return lines
