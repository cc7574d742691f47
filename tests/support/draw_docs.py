"""Draws docs/packages.md from the imports of the package, docs/glossary.md from docs/glossary.yaml, and docs/reference.

python tests/support/draw_docs.py
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from draw_reference import REFERENCE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxtrain"

PACKAGES = """\
# Packages

A package imports only packages below it; the import contract in `pyproject.toml` holds this. `make docs` draws this
page from the code. Arrows point at what is imported; those that follow from others are left out.

```mermaid
graph TD
{graph}
```

From the highest tier to the lowest:

| package | what it holds |
|---|---|
{table}
"""

GLOSSARY = """\
# Glossary

One meaning for each term, in the code, the configs, the log and the docs. `make docs` draws this page from
`glossary.yaml`.

| term | meaning | in the code |
|---|---|---|
{table}
"""


def packages() -> list[str]:
    """Packages and modules at the top of jaxtrain, from the highest tier of the import contract to the lowest."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    tiers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return list(dict.fromkeys(_node(name.strip().split(".")[1:]) for tier in tiers for name in tier.split("|")))


def imports() -> dict[str, set[str]]:
    """Package -> other packages that its modules import, also inside functions and for type checking."""
    graph: dict[str, set[str]] = {name: set() for name in packages()}
    for path in PACKAGE.rglob("*.py"):
        owner = _node(path.relative_to(PACKAGE).with_suffix("").parts)
        if owner in graph:
            graph[owner] |= {name for name in _imported(path) if name in graph and name != owner}
    return graph


def _node(parts: Sequence[str]) -> str:
    """Returns the graph node of a module path below jaxtrain: its package; `callbacks.base` is a tier of its own."""
    return "callbacks.base" if tuple(parts[:2]) == ("callbacks", "base") else parts[0]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jaxtrain":
            parts = str(node.module).split(".")[1:]
            yield from (_node([*parts, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (_node(alias.name.split(".")[1:]) for alias in node.names if alias.name.startswith("jaxtrain."))


def reduced(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Edges that do not follow from others."""

    def reaches(start: str, goal: str, seen: frozenset[str]) -> bool:
        return any(to == goal or (to not in seen and reaches(to, goal, seen | {to})) for to in graph[start])

    return [
        (one, to)
        for one in graph
        for to in sorted(graph[one])
        if not any(step != to and reaches(step, to, frozenset({one, step})) for step in graph[one])
    ]


def draw_packages() -> str:
    """The text of docs/packages.md."""
    order = packages()
    graph = "\n".join(f"  {one} --> {to}" for one, to in reduced(imports()))
    rows = [f"| `{name}` | {purpose(name)} |" for name in order]
    return PACKAGES.format(graph=graph, table="\n".join(rows))


def purpose(name: str) -> str:
    """First sentence of a package's docstring."""
    path = PACKAGE / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, f"jaxtrain/{name} has no docstring"
    return doc.split("\n\n")[0].replace("\n", " ")


def draw_glossary() -> str:
    """The text of docs/glossary.md."""
    terms: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docs/glossary.yaml").read_text())
    rows = [f"| **{term}** | {terms[term]['meaning']} | {_link(terms[term].get('code'))} |" for term in sorted(terms)]
    return GLOSSARY.format(table="\n".join(rows))


def _link(code: str | None) -> str:
    """`core/program.py:Program` as a link; raises where the file has no such name."""
    if code is None:
        return ""
    path, _, name = code.partition(":")
    tree = ast.parse((PACKAGE / path).read_text()) if path.endswith(".py") else ast.Module([], [])
    assert (PACKAGE / path).exists(), f"glossary: no {path}"
    assert not name or name.rsplit(".")[-1] in set(_defined(tree)), f"glossary: no {name} in {path}"
    return f"[`{code}`](../jaxtrain/{path})"


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


DOCS = {"packages.md": draw_packages, "glossary.md": draw_glossary, **REFERENCE}

if __name__ == "__main__":
    for file, draw in DOCS.items():
        (ROOT / "docs" / file).write_text(draw())
