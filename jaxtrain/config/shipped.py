"""Shipped configs, and the search for files and layouts by name."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtrain.errors import did_you_mean, format_value, join_words

SUFFIXES = (".yaml", ".yml")


def configs_dir() -> Path:
    """The folder of shipped configs: inside the installed package, else at the root of the source checkout.

    Raises:
        FileNotFoundError: neither is there, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "layouts" / "ddp.yaml").is_file():
            return folder
    raise FileNotFoundError(f"the shipped configs are missing beside {package}; install jaxtrain again")


def display(path: Path) -> str:
    """A path as messages show it: relative to the working folder where it lies under it."""
    text = os.path.normpath(path)
    relative = os.path.relpath(text) if os.path.isabs(text) else text
    return text if relative.startswith("..") and os.path.isabs(text) else relative


def find_file(name: str, folder: Path | None) -> Path:
    """The file that a config calls `name`; it need not exist.

    Looked for beside the file that names it (`folder`; the working folder for None), then among the shipped
    configs, so that `configs/quickstart.yaml` and `models/llama3_8b.yaml` work without a source checkout.
    """
    path = Path(os.path.expanduser(name))
    here = path if folder is None else folder / path
    if path.is_absolute() or _exists(here):
        return here
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = configs_dir().joinpath(*parts)
    return shipped if parts and ".." not in parts and _exists(shipped) else here


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the system, or with a NUL
        return False


def layout_folders(folder: Path | None) -> list[Path]:
    """Folders that hold layouts, the user's own first: beside the config, beside its parent, shipped."""
    beside = folder or Path()
    return [beside / "layouts", Path(os.path.normpath(beside / ".." / "layouts")), configs_dir() / "layouts"]


def find_layout(name: str, folder: Path | None) -> Path:
    """The file of a layout: `NAME` is looked for in the layout folders, `PATH.yaml` beside the config.

    Raises:
        ValueError: there is none, with what there is instead.
    """
    if name.endswith(SUFFIXES) or os.sep in name:
        path = find_file(name, folder)
        if not _exists(path):
            raise ValueError(f"no such layout file: {format_value(display(path))}")
        return path
    for place in layout_folders(folder):
        if name and _exists(place / f"{name}.yaml"):
            return place / f"{name}.yaml"
    names = layout_names(folder)
    raise ValueError(f"no layout {format_value(name)}; there is {join_words(names, 'and')}{did_you_mean(name, names)}")


def layout_names(folder: Path | None = None) -> list[str]:
    """Names of all layouts in reach of a config in `folder`."""
    return sorted({path.stem for place in layout_folders(folder) for path in place.glob("*.yaml")})
