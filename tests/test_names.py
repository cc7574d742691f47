"""Names and prose of the package: one meaning for each class name, docstrings that begin with a verb or a noun."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "jaxtrain").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in FILES]

# A docstring says what a thing does or is: it does not begin with a question, a preposition or a pronoun.
FORBIDDEN = {
    "what", "whether", "of", "all", "how", "where", "who", "whoever", "when", "which", "why", "as", "none", "those",
    "that", "this", "these", "there", "no", "it", "its", "from", "for", "at", "in", "by", "to", "on", "with", "if",
    "so", "is", "are", "also", "and", "or", "but", "than", "like", "not", "only", "ours", "theirs", "same", "after",
    "before", "until", "while", "because", "between", "within", "over", "under", "here", "now", "then", "such",
}  # fmt: skip


def documented(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and docstring of a module and of every class and function in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc:
                yield getattr(node, "lineno", 1), doc


def wrong_openings(source: str) -> list[str]:
    """Docstrings that begin with a forbidden word, as `LINE: first line`."""
    found = []
    for line, doc in documented(ast.parse(source)):
        first = doc.split(None, 1)[0].strip("`*\"'(,.:;").lower()
        if first in FORBIDDEN:
            found.append(f"{line}: {doc.splitlines()[0]}")
    return found


@pytest.mark.parametrize("path", NAMES)
def test_docstrings_begin_with_a_verb_or_a_noun(path: str):
    assert not wrong_openings((ROOT / path).read_text())


def test_the_first_word_of_every_docstring_is_read():
    source = '"""Of files."""\nclass A:\n    """What it is."""\n    def b(self):\n        """Returns c."""\n'
    assert wrong_openings(source) == ["1: Of files.", "2: What it is."]


def test_a_class_name_means_one_thing():
    places = defaultdict(list)
    for path, name in zip(FILES, NAMES, strict=True):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(name)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_packages_hold_few_files():
    for folder in {path.parent for path in FILES}:
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        most = 12 if folder.name == "checkpoint" else 15
        assert len(files) <= most, f"{folder.relative_to(ROOT)} has {len(files)} files; expected at most {most}"
