"""Text of docs/reference: config keys, commands, the Python interface and errors, from the code."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import typing
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from error_messages import messages
from pydantic import BaseModel

import jaxtrain
from jaxtrain import errors, exit_codes

PACKAGE = Path(jaxtrain.__file__).parent
NOTE = "`make docs` draws this page from the code.\n"


def draw_config() -> str:
    """A table for each section of the config."""
    from jaxtrain.config.schema import Config

    parts = [
        "# Config keys",
        "",
        NOTE,
        "`jaxtrain config FILE` prints the values of a config, and their sources.",
    ]
    for path, section in _sections("", Config):
        doc = inspect.cleandoc(section.__doc__ or "")
        parts += ["", f"## {path or 'Top level'}", "", doc, "", "| key | default | meaning |", "|---|---|---|"]
        for name, field in section.model_fields.items():
            if _section_of(field.annotation) is None or field.default is None:
                key = f"{path}.{field.alias or name}".lstrip(".")
                parts.append(f"| `{key}` | `{_default(field)}` | {_cell(field.description or '')} |")
    return "\n".join(parts) + "\n"


def _sections(path: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    yield path, section
    for name, field in section.model_fields.items():
        if (inner := _section_of(field.annotation)) is not None:
            yield from _sections(f"{path}.{field.alias or name}".lstrip("."), inner)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section of an annotation: itself, or that of `X | None`, of a tuple or a dict."""
    options = [annotation, *typing.get_args(annotation)]
    options += [inner for option in options[1:] for inner in typing.get_args(option)]
    return next((one for one in options if inspect.isclass(one) and issubclass(one, BaseModel)), None)


def _default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    value = value.model_dump() if isinstance(value, BaseModel) else value
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def draw_commands() -> str:
    """The help of each command."""
    from jaxtrain.cli.arguments import COMMANDS
    from jaxtrain.cli.main import main

    parts = ["# Commands", "", NOTE]
    for name in COMMANDS:
        text = io.StringIO()
        with redirect_stdout(text), patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}), suppress(SystemExit):
            main([name, "--help"])
        parts += [f"## {name}", "", "```text", text.getvalue().strip(), "```", ""]
    codes = ast.parse(Path(exit_codes.__file__).read_text()).body
    lines = Path(exit_codes.__file__).read_text().splitlines()
    parts += ["## Exit codes", "", "| code | name | meaning |", "|---|---|---|"]
    for node in codes:
        if isinstance(node, ast.Assign):
            comment = lines[node.lineno - 1].partition("#")[2].strip()
            parts.append(f"| {ast.unparse(node.value)} | `{ast.unparse(node.targets[0])}` | {_cell(comment)} |")
    return "\n".join(parts) + "\n"


def draw_api() -> str:
    """Signature and docstring of each public name, and of the methods of its class."""
    parts = ["# Python", "", NOTE, "[From Python](../python.md) shows how these are used."]
    for name in jaxtrain.__all__:
        value = getattr(jaxtrain, name)
        parts += ["", f"## {name}", "", *_described(name, value)]
        for method, function in vars(value).items() if inspect.isclass(value) else ():
            function = function.fget if isinstance(function, property) else function
            if method[0] != "_" and inspect.isfunction(function) and inspect.getdoc(function):
                parts += ["", f"### {name}.{method}", "", *_described(f"{name}.{method}", function)]
    return "\n".join(parts) + "\n"


def _described(name: str, value: Any) -> list[str]:
    is_model = inspect.isclass(value) and issubclass(value, BaseModel)  # its keys are on the page of the config
    target = value.__init__ if inspect.isclass(value) else value
    signature = "(...)" if is_model else str(inspect.signature(target)) if inspect.isfunction(target) else "(...)"
    signature = re.sub(r"<function .* at 0x\w+>|<[\w.]+ object at 0x\w+>", "...", signature)
    signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)
    doc = inspect.cleandoc(value.__doc__ or "")
    sections = re.sub(r"^(Args|Returns|Raises|Attributes):$", r"**\1**\n", doc, flags=re.MULTILINE)
    lines = re.sub(r"^    (\S)", r"- \1", sections, flags=re.MULTILINE) if "**" in sections else sections
    return ["```text", f"{name}{signature}", "```", "", *lines.splitlines()]


def draw_errors() -> str:
    """The classes of errors, and the text of each message by the part of the package that raises it."""
    parts = [
        "# Errors",
        "",
        NOTE,
        "A message says what is wrong, where, and what would be right. `...` stands for a value.",
    ]
    parts += ["", "| class | cause |", "|---|---|"]
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__:
            parts.append(f"| `{name}` | {_cell(inspect.cleandoc(value.__doc__ or '').split(chr(10) * 2)[0])} |")
    for package, texts in sorted(messages(PACKAGE).items()):
        parts += ["", f"## {package}", "", *(f"- {_cell(text)}" for text in sorted(texts))]
    return "\n".join(parts) + "\n"


REFERENCE = {
    "reference/config.md": draw_config,
    "reference/commands.md": draw_commands,
    "reference/api.md": draw_api,
    "reference/errors.md": draw_errors,
}
