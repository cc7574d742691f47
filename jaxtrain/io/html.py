"""Self-contained HTML pages: no network, no scripts, light or dark as the screen.

All text is escaped except `Html`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

LIGHT = {
    "back": "#ffffff", "text": "#1c2128", "dim": "#57606a", "rule": "#d4dae1", "track": "#eef1f4", "good": "#1a7f37",
    "bad": "#c2202c", "unknown": "#8a6100",
}  # fmt: skip
DARK = {
    "back": "#14181d", "text": "#e4e8ec", "dim": "#a0a9b3", "rule": "#363d46", "track": "#22282f", "good": "#57c773",
    "bad": "#ff7b80", "unknown": "#e3b341",
}  # fmt: skip
STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 940px; padding: 28px 20px 60px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 36px 0 10px; padding-top: 14px; border-top: 1px solid var(--rule); }
p { margin: 6px 0; } .dim, th, caption { color: var(--dim); font-weight: normal; }
.verdict { font-weight: 600; } .good { color: var(--good); } .bad { color: var(--bad); }
.unknown { color: var(--unknown); }
.facts { display: flex; flex-wrap: wrap; gap: 14px 36px; margin: 18px 0 0; padding: 0; }
.facts div { max-width: 260px; } .facts dt { color: var(--dim); font-size: 13px; }
.facts dd { margin: 0; font-size: 21px; font-weight: 600; } .facts dd.dim { font-size: 13px; font-weight: 400; }
.wide { overflow-x: auto; } .beside { display: flex; flex-wrap: wrap; gap: 8px 48px; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: 2px 0 6px; }
th, td { text-align: left; padding: 3px 20px 3px 0; vertical-align: top; }
th.number, td.number { text-align: right; white-space: nowrap; }
tr { border-bottom: 1px solid var(--rule); } tr.total td { font-weight: 600; } td.code { overflow-wrap: anywhere; }
.code, code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 13px; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 8px; border-radius: 2px; }
svg { width: 100%; min-width: 640px; height: auto; display: block; margin: 4px 0; }
svg text { fill: var(--text); font-size: 12.5px; }
rect.track { fill: var(--track); } .grid { stroke: var(--rule); } .axis { stroke: var(--dim); }
.limit { stroke: var(--text); stroke-width: 1.5; stroke-dasharray: 4 3; }
"""


class Html(str):
    """Text that is markup and is not escaped."""


def colour_css(colours: Mapping[str, tuple[str, str]]) -> str:
    """Returns style rules for the common colours and those of a page.

    Args:
      colours: name -> (colour on a light screen, on a dark screen), of bars (`rect`) and swatches of this class.
    """
    fills = [f"rect.{n} {{ fill: var(--{n}); }} .swatch.{n} {{ background: var(--{n}); }}" for n in colours]
    themes = (LIGHT | {n: pair[0] for n, pair in colours.items()}, DARK | {n: pair[1] for n, pair in colours.items()})
    light, dark = (" ".join(f"--{n}: {colour};" for n, colour in theme.items()) for theme in themes)
    root = f":root {{ color-scheme: light dark; {light} }}"
    return "\n".join([root, f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}", *fills])


def page(title: str, header: str, sections: Mapping[str, str], style: str) -> str:
    """Returns a page with a header and its non-empty sections (name -> content)."""
    body = "\n".join(f"<section><h2>{name}</h2>\n{text}\n</section>" for name, text in sections.items() if text)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{style}{STYLE}</style></head>
<body>
{header}
{body}
</body></html>"""


def cards(facts: Iterable[tuple[str, str, str]]) -> str:
    """Shows (name, value, note) side by side."""
    items = "\n".join(
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="dim">{escape(note)}</dd></div>'
        for name, value, note in facts
    )
    return f'<dl class="facts">{items}</dl>'


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int], total: bool = False) -> str:
    """Returns a table; `numbers` are indices of columns of numbers, `total` marks the last row."""
    style = [' class="number"' if column in numbers else "" for column in range(len(titles))]
    head = "".join(f"<th{kind}>{escape(title)}</th>" for kind, title in zip(style, titles))
    lines = ["".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(style, row)) for row in rows]
    marks = [""] * (len(lines) - 1) + [' class="total"' if total else ""]
    body = "\n".join(f"<tr{mark}>{line}</tr>" for mark, line in zip(marks, lines))
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def bullet_list(lines: Iterable[str]) -> str:
    """Returns a list of lines."""
    return "<ul>" + "\n".join(f"<li>{_cell(line)}</li>" for line in lines) + "</ul>"


def scrollable(svg: str) -> str:
    """Wraps a drawing so that narrow screens scroll it."""
    return f'<div class="wide">{svg}</div>' if svg else ""


def remark(text: str) -> str:
    """Returns a paragraph of dimmed text."""
    return f'<p class="dim">{_cell(text)}</p>'


def code(text: str) -> Html:
    """Returns text in a monospaced font."""
    return Html(f'<span class="code">{escape(text)}</span>')


def swatch(style: str, name: str) -> Html:
    """Returns a name after a square in the colour of the class `style`."""
    return Html(f'<span class="swatch {escape(style)}"></span>{escape(name)}')


def _cell(text: str) -> str:
    return text if isinstance(text, Html) else escape(text)
