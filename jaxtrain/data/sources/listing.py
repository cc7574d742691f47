"""Lists the files of a source in a deterministic order, by their names below the source's folder alone."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import sysconfig
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import File, Progress
from jaxtrain.data.sources.formats import FORMATS, format_of, has_format, paired_name
from jaxtrain.data.sources.remote import HUB_PREFIX, ObjectStore, hub_files
from jaxtrain.errors import DataError

PATTERN_CHARACTERS = frozenset("*?[")
SAVED_STATE = "state.json"  # in a folder that `Dataset.save_to_disk` wrote
SAVED_SPLITS = "dataset_dict.json"  # in one that `DatasetDict.save_to_disk` wrote


class FileListing(NamedTuple):
    """Files below a folder on a disk or in an object store."""

    names: list[str]  # of all files, with `/`
    read: Callable[[str], bytes]  # returns the content of a file
    selected: list[str] | None  # names that the path itself stands for (a file or a pattern); None for a folder


def list_files(
    source: SourceConfig, cache: str | Path = "~/.cache/jaxtrain", progress: Progress | None = None
) -> list[File]:
    """Lists the files of a source, sorted by name; those of an object store are copied into `cache` first.

    Raises:
      DataError: nothing there, or nothing that can be read.
    """
    if source.path == "stdlib":
        return _standard_library()
    if source.path.startswith(HUB_PREFIX):
        return hub_files(source)
    if "://" in source.path:
        store = ObjectStore(source.path)
        formats = choose_files(FileListing(store.names, store.read, store.selected), source)
        paths = store.download(sorted(formats), Path(cache).expanduser(), progress)
    else:
        root, listing = _list_local(source.path)
        formats = choose_files(listing, source)
        paths = {name: os.path.abspath(os.path.join(root, name)) for name in sorted(formats)}
    return [File(name, path, formats[name], os.path.getsize(path)) for name, path in paths.items()]


def choose_files(listing: FileListing, source: SourceConfig) -> dict[str, str]:
    """Chooses the files of a listing that belong to a source.

    Returns:
      name -> format.

    Raises:
      DataError: no files, or several formats in a folder.
    """
    names = listing.names if listing.selected is None else listing.selected
    if listing.selected is None and not source.include and source.format in ("auto", "arrow"):
        saved = _saved_dataset(listing, source.path)
        if saved:
            return dict.fromkeys(saved, "arrow")
    if source.include:
        names = [n for n in names if any(_is_included(n, pattern) for pattern in source.include)]
    if listing.selected is not None or source.include:
        existing = set(listing.names)
        files = {n: format_of(n, existing) if source.format == "auto" else source.format for n in names}
        pairs = (paired_name(name) for name, kind in files.items() if kind == "megatron")
        files |= {name: "megatron" for name in pairs if name in existing}
    else:
        files = _files_of_one_format(names, source)
    if not files:
        formats = ", ".join(FORMATS) if source.format == "auto" else source.format
        patterns = ", ".join(source.include) or formats
        raise DataError(f"{source.path}: no files found (looked for {patterns}); check data.sources[].path and include")
    return files


def _files_of_one_format(names: list[str], source: SourceConfig) -> dict[str, str]:
    """Returns the files of the source's format, by default of the only format present."""
    existing = set(names)
    kinds = FORMATS if source.format == "auto" else (source.format,)
    present = {kind: [n for n in names if has_format(n, kind, existing)] for kind in kinds}
    present = {kind: files for kind, files in present.items() if files}
    if len(present) > 1:
        counts = ", ".join(f"{len(files)} {kind}" for kind, files in present.items())
        raise DataError(f"{source.path}: holds several kinds of files ({counts}); set data.sources[].format or include")
    return {name: kind for kind, files in present.items() for name in files}


def _is_included(name: str, pattern: str) -> bool:
    """Matches a pattern with a slash against the path below the folder, another against the base name."""
    return fnmatch.fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)


def _saved_dataset(listing: FileListing, path: str) -> list[str]:
    """Returns the data files of a folder that `Dataset.save_to_disk` wrote; [] for other folders.

    Of a `DatasetDict` takes the split `train`, or the only one. Leaves out other files, such as caches of the library.
    """
    folder = ""
    if SAVED_SPLITS in listing.names:
        splits = _read_json(listing, SAVED_SPLITS, path).get("splits", [])
        split = "train" if "train" in splits or len(splits) != 1 else splits[0]
        if split not in splits:
            names = ", ".join(map(str, splits)) or "none"
            message = f"no split `train`; give the folder of a split (has {names}) as data.sources[].path"
            raise DataError(f"{path}: {message}")
        folder = f"{split}/"
    state_name = f"{folder}{SAVED_STATE}"
    if state_name not in listing.names:
        if folder:
            raise DataError(f"{path}: {state_name} is missing; is the folder complete?")
        return []
    state = _read_json(listing, state_name, path)
    if "_data_files" not in state:
        return []
    if state.get("_indices_data_files"):
        message = "saved with an index of its rows; save it after `flatten_indices()`, or with a newer `datasets`"
        raise DataError(f"{path}: {message}")
    files = [f"{folder}{entry['filename']}" for entry in state["_data_files"]]
    missing = sorted(set(files) - set(listing.names))
    if missing:
        raise DataError(f"{path}: {missing[0]} is missing, of the {len(files)} data files that {state_name} names")
    return files


def _read_json(listing: FileListing, name: str, path: str) -> dict:
    try:
        entry = json.loads(listing.read(name))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: {name} is not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise DataError(f"{path}: {name} is not a JSON object")
    return entry


def _list_local(given: str) -> tuple[str, FileListing]:
    """Returns (folder, its files) of a path on this machine."""
    path = os.path.expanduser(given)
    selected = None
    if os.path.isdir(path):
        root, names = path, _walk(path)
    elif os.path.isfile(path) or (os.path.isfile(f"{path}.bin") and os.path.isfile(f"{path}.idx")):
        root, name = os.path.split(path if os.path.isfile(path) else f"{path}.bin")  # Megatron-LM names a pair `path`
        selected = [name]
        names = _with_pairs(root, selected)
    elif PATTERN_CHARACTERS & set(path):
        root = str(Path(*takewhile(lambda part: not PATTERN_CHARACTERS & set(part), Path(path).parts)))
        selected = [_relative(root, p) for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        names = _with_pairs(root, selected)
    else:
        raise DataError(f"{given}: no such file or folder; data.sources[].path is `stdlib` or a path or glob")
    return root, FileListing(names, lambda name: Path(root, name).read_bytes(), selected)


def _with_pairs(root: str, names: list[str]) -> list[str]:
    """Adds the other files of Megatron-LM pairs."""
    pairs = (pair for name in names if (pair := paired_name(name)))
    return sorted({*names, *(pair for pair in pairs if os.path.isfile(os.path.join(root, pair)))})


def _walk(root: str, excluded: frozenset[str] = frozenset({"__pycache__"})) -> list[str]:
    """Returns the names of all files below a folder, except hidden ones and those in excluded folders."""
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [d for d in subfolders if not d.startswith(".") and d not in excluded]
        paths = (os.path.join(folder, f) for f in files if not f.startswith("."))
        names += [_relative(root, p) for p in paths if os.path.isfile(p)]
    return names


def _relative(root: str, path: str) -> str:
    return Path(os.path.relpath(path, root or ".")).as_posix()


def _standard_library() -> list[File]:
    root = sysconfig.get_paths()["stdlib"]
    names = _walk(root, frozenset({"site-packages", "dist-packages", "__pycache__"}))
    paths = {name: os.path.join(root, name) for name in sorted(names) if name.endswith(".py")}
    if not paths:
        raise DataError(f"{root}: this Python has no source files of its standard library; give data.sources[].path")
    return [File(name, path, "stdlib", os.path.getsize(path)) for name, path in paths.items()]
