"""Self-contained HTML pages from templates: no network, no scripts, light or dark as the screen; all text is escaped.

A template extends `io/page.html` and lies beside the code that fills it.
"""

from __future__ import annotations

from collections.abc import Mapping
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
