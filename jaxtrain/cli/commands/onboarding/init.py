"""`jaxtrain init [NAME]`: writes a commented config, and the file of a model where the template has one."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from jaxtrain.config.shipped import configs_dir
from jaxtrain.errors import UserError, format_value

NAME = re.compile(r"[A-Za-z_][\w.\-]*", re.ASCII)  # of a run; with `_` for `.` and `-` it is that of a module, too


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    template = args.template.replace("-", "_")
    name = template if args.name is None else args.name.removesuffix(".yaml")
    if not NAME.fullmatch(name):
        expected = "expected letters, digits, `_`, `-` and `.`, a letter first; it is the name of the run and its files"
        raise UserError(f"init: {format_value(args.name)} is no name; {expected}")
    written = write_template(Path(), template, name)
    print(f"wrote  {', '.join(map(str, written))}")
    config = written[0]
    print(f"next   jaxtrain train {config}")
    print(f"also   jaxtrain train {config} steps=20    # every key of the config may be given so")
    print(f"       jaxtrain verify {config}            # the same losses and gradients on every layout")
    if template == "gpt":
        print(f"       jaxtrain data show {config}         # what the model reads")
    return 0


def write_template(folder: Path, template: str, name: str) -> list[Path]:
    """Writes the files of a template, with another name, into a folder. Returns them, the config first.

    Raises:
        UserError: a file is there already, or another module has the name.
    """
    source, module = configs_dir() / "templates", re.sub(r"[.-]", "_", name)
    files = {folder / f"{name}.yaml": source / f"{template}.yaml"}
    if (source / f"{template}.py").is_file():
        files[folder / f"{module}.py"] = source / f"{template}.py"
    for file in files:
        if file.exists():
            raise UserError(f"init: {file} is there already; expected another NAME, as in `jaxtrain init {name}-2`")
    if len(files) > 1 and (module in sys.stdlib_module_names or importlib.util.find_spec(module) is not None):
        message = f"Python has another module `{module}`, which would be read instead; expected another NAME"
        raise UserError(f"init: {message}")
    for file, original in files.items():
        text = original.read_text(encoding="utf-8")
        if file.suffix == ".yaml":
            text = _renamed(text, template, name, module)
        file.write_text(text, encoding="utf-8")
    return list(files)


def _renamed(text: str, template: str, name: str, module: str) -> str:
    """Returns a config with another name of the run, its files and its module, and the path of the schema."""
    text = text.replace("../schema.json", (configs_dir() / "schema.json").as_posix())
    text = re.sub(rf"\b{template}(?=:[A-Za-z])", module, text)  # module:Class
    text = re.sub(rf"\b{template}(?=\.py\b)", module, text)
    return re.sub(rf"(?<=name: ){template}\b|\b{template}(?=\.yaml\b)|(?<=runs/){template}\b", name, text)
