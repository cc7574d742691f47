"""Shipped configs, and lookup of files and layouts by name."""

from __future__ import annotations

import os
from pathlib import Path

from jaxtrain.errors import did_you_mean, format_value, join_words

SUFFIXES = (".yaml", ".yml")


def configs_dir() -> Path:
    """Returns the folder of shipped configs: in the installed package, else at the root of the source checkout.

    Raises:
        FileNotFoundError: neither exists, so the installation is broken.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_configs", package.parent / "configs"):
        if (folder / "layouts" / "ddp.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no shipped configs beside {package}; expected a complete installation of jaxtrain")


def display(path: Path) -> str:
    """Returns a path as messages show it: relative if it is under the working folder."""
    text = os.path.normpath(path)
    relative = os.path.relpath(text) if os.path.isabs(text) else text
    return text if relative.startswith("..") and os.path.isabs(text) else relative


def find_file(name: str, folder: Path | None) -> Path:
    """Returns the path of a config file; it need not exist.

    Searches beside the file that names it (`folder`; the working folder for None), then in the shipped configs, so that
    `quickstart`, `configs/quickstart.yaml` and `models/llama3_8b.yaml` work without a source checkout.
    """
    path = Path(os.path.expanduser(name))
    here = path if folder is None else folder / path
    if path.is_absolute() or _exists(here):
        return here
    parts = path.parts[1:] if path.parts[:1] == ("configs",) else path.parts
    shipped = configs_dir().joinpath(*parts)
    if not path.suffix and parts:
        shipped = shipped.with_name(f"{shipped.name}.yaml")  # `quickstart`
    return shipped if parts and ".." not in parts and _exists(shipped) else here


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long for the system, or with a NUL
        return False


def config_names() -> list[str]:
    """Returns the names of the shipped configs, as commands and `extends` take them: `quickstart`, `models/gpt2`."""
    folder = configs_dir()
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(path.as_posix() for path in files if path.parts[0] not in ("layouts", "templates"))


def layout_folders(folder: Path | None) -> list[Path]:
    """Returns the folders of layouts: beside the config, beside its parent folder, shipped."""
    beside = folder or Path()
    return [beside / "layouts", Path(os.path.normpath(beside / ".." / "layouts")), configs_dir() / "layouts"]


def find_layout(name: str, folder: Path | None) -> Path:
    """Returns the file of a layout: `NAME` in the layout folders, or `PATH.yaml` beside the config.

    Raises:
        ValueError: no such layout; the message lists the existing ones.
    """
    if "\0" in name:
        raise ValueError("a file name cannot hold a NUL character")
    if name.endswith(SUFFIXES) or os.sep in name:
        path = find_file(name, folder)
        if not _exists(path):
            raise ValueError(f"no such layout file: {format_value(display(path))}")
        return path
    for place in layout_folders(folder):
        if name and _exists(place / f"{name}.yaml"):
            return place / f"{name}.yaml"
    names = layout_names(folder)
    raise ValueError(f"no layout {format_value(name)}; expected {join_words(names)}{did_you_mean(name, names)}")


def layout_names(folder: Path | None = None) -> list[str]:
    """Returns the names of all layouts that a config in `folder` can use."""
    return sorted({path.stem for place in layout_folders(folder) for path in place.glob("*.yaml")})
