"""Hook of mkdocs: links that leave docs/ become the path in the repository; one to a file that is not there fails."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Returns the page with `[text](../path)` as the text and the path. Raises ValueError for a missing file."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def path_of(link: re.Match[str]) -> str:
        text, target = link[1], (folder / link[2].partition("#")[0]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return link[0]
        if not target.exists():
            raise ValueError(f"{page.file.src_uri}: no {link[2]} for the link {text!r}")
        path = str(target.relative_to(ROOT))
        return text if path in text or text.strip("`").partition(":")[0] in path else f"{text} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)\s]+)\)", path_of, markdown)
