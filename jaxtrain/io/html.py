"""Self-contained HTML pages from templates: no network, no scripts, light or dark as the screen; all text is escaped.

A template extends `io/page.html` and lies beside the code that fills it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

_TEMPLATES = Environment(
    loader=PackageLoader("jaxtrain", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True, extensions=["jinja2.ext.do"],
)  # fmt: skip


def render(template: str, colours: Mapping[str, tuple[str, str]], **values: Any) -> str:
    """Fills a template.

    Args:
        template: path below the package, such as `reports/page.html`.
        colours: name -> (colour on a light screen, on a dark screen), of bars and swatches of this class.
        values: what the template names.
    """
    return _TEMPLATES.get_template(template).render(colours=colours, **values)


def frame(page: str, height: int = 640) -> str:
    """Returns a page as a part of another one, such as a notebook, with a style of its own.

    Args:
        page: the HTML document.
        height: pixels; the reader scrolls in it.
    """
    style = f"width: 100%; height: {height}px; border: 1px solid #8888"
    return f'<iframe sandbox srcdoc="{escape(page, quote=True)}" style="{style}"></iframe>'


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Returns a table without a style, for notebooks."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    below = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{below}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
