"""The pages of README and docs, and their code blocks."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DRAWN = ("docs/reference/", "docs/packages.md", "docs/glossary.md")  # from the code
PAGES = [
    name
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if not (name := str(path.relative_to(ROOT))).startswith(DRAWN)
]


class Block(NamedTuple):
    """A fenced block: where it begins, its language (empty or `text`: output), its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    """All blocks of a page."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^( *)```(\S*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE)
    return [Block(page, text[: one.start()].count("\n") + 1, one[2], dedent(one[3])) for one in found]


def commands(page: str) -> list[list[str]]:
    """The words of each line of the blocks that are commands, without comments, and of commands that end table rows."""
    lines = [line for block in blocks(page) if block.language == "sh" for line in joined(block.text).splitlines()]
    lines += re.findall(r"^\|.*\| `(jaxtrain [a-z][^`]*)`[^|]*\|$", (ROOT / page).read_text(), re.MULTILINE)
    lines = [line.partition(" > ")[0].replace("$I", "0") for line in lines]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def joined(text: str) -> str:
    """Lines that end in a backslash are one."""
    return text.replace("\\\n", " ")
