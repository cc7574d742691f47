"""Listing the files of a source: sorted, deterministic, by their names below the source's folder alone."""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import File
from jaxtrain.data.sources.formats import FORMATS, fits, format_of, partner
from jaxtrain.data.sources.hub import PREFIX, hub_files
from jaxtrain.data.sources.remote import ObjectStore, Progress
from jaxtrain.errors import DataError

MAGIC = frozenset("*?[")
SAVED = "state.json"  # of a folder that `datasets` wrote
SAVED_SPLITS = "dataset_dict.json"


class FileListing(NamedTuple):
    """Files of a source, on a disk or in an object store.

    `names` are of all files below the folder, with `/`; `read` gives the content of one. `asked`: None for a folder,
    of which what can be read is taken; else the names that were asked for one by one, or by a glob.
    """

    names: list[str]
    read: Callable[[str], bytes]
    asked: list[str] | None


def list_files(
    source: SourceConfig, cache: str | Path = "~/.cache/jaxtrain", progress: Progress | None = None
) -> list[File]:
    """Files of a source, sorted by name; those of an object store are copied into `cache` first, with `progress`.

    Raises:
      DataError: nothing there, or nothing that can be read.
    """
    if source.path == "stdlib":
        return _standard_library()
    if source.path.startswith(PREFIX):
        return hub_files(source)
    if "://" in source.path:
        store = ObjectStore(source.path)
        chosen = choose(FileListing(store.names, store.read, store.asked), source)
        copies = store.copied(sorted(chosen), Path(cache).expanduser(), progress)
        return [File(name, path, chosen[name], os.path.getsize(path)) for name, path in copies.items()]
    root, place = _local(source.path)
    chosen = choose(place, source)
    paths = {name: os.path.abspath(os.path.join(root, name)) for name in chosen}
    return [File(name, paths[name], chosen[name], os.path.getsize(paths[name])) for name in sorted(chosen)]


def choose(place: FileListing, source: SourceConfig) -> dict[str, str]:
    """{name: format} of the files of a place that a source means.

    Raises:
      DataError: none, or several formats in a folder.
    """
    names = place.names if place.asked is None else place.asked
    if place.asked is None and not source.include and source.format in ("auto", "arrow"):
        saved = _saved(place, source.path)
        if saved:
            return dict.fromkeys(saved, "arrow")
    if source.include:
        names = [n for n in names if any(_included(n, pattern) for pattern in source.include)]
    if place.asked is not None or source.include:
        every = set(place.names)
        found = {n: format_of(n, every) if source.format == "auto" else source.format for n in names}
        found |= {p: "megatron" for n, kind in found.items() if kind == "megatron" and (p := partner(n)) in every}
    else:
        found = _of_folder(names, source)
    if not found:
        wanted = ", ".join(source.include) or ", ".join(FORMATS)
        raise DataError(f"{source.path}: no files found (looked for {wanted}); check data.sources[].path and include")
    return found


def _of_folder(names: list[str], source: SourceConfig) -> dict[str, str]:
    """Returns the files of a format, by default the only one present."""
    every = set(names)
    if source.format != "auto":
        return {n: source.format for n in names if fits(n, source.format, every)}
    present = {kind: [n for n in names if fits(n, kind, every)] for kind in FORMATS}
    present = {kind: found for kind, found in present.items() if found}
    if len(present) > 1:
        counts = ", ".join(f"{len(v)} {k}" for k, v in present.items())
        raise DataError(f"{source.path}: holds several kinds of files ({counts}); set data.sources[].format or include")
    return {n: kind for kind, found in present.items() for n in found}


def _included(name: str, pattern: str) -> bool:
    """A pattern with a slash is of the path below the folder, another of the base name."""
    return fnmatch.fnmatchcase(name if "/" in pattern else name.rpartition("/")[2], pattern)


def _saved(place: FileListing, path: str) -> list[str]:
    """The data files of a folder of `Dataset.save_to_disk`, or of the split `train` of a `DatasetDict`'s; [] if it is
    none. What else lies there, such as the library's caches, is not part of the dataset.
    """
    folder = ""
    if SAVED_SPLITS in place.names:
        splits = _json(place, SAVED_SPLITS, path).get("splits", [])
        split = "train" if "train" in splits or len(splits) != 1 else splits[0]
        if split not in splits:
            have = ", ".join(map(str, splits)) or "none"
            raise DataError(f"{path}: no split `train`; give the folder of a split (has {have}) as data.sources[].path")
        folder = f"{split}/"
    state = f"{folder}{SAVED}"
    if state not in place.names:
        if folder:
            raise DataError(f"{path}: {state} is missing; is the folder complete?")
        return []
    saved = _json(place, state, path)
    if "_data_files" not in saved:
        return []
    if saved.get("_indices_data_files"):
        message = "a dataset saved with an index of its rows; save it anew by a `datasets` of today"
        raise DataError(f"{path}: {message}, or after `flatten_indices()`")
    files = [f"{folder}{entry['filename']}" for entry in saved["_data_files"]]
    missing = sorted(set(files) - set(place.names))
    if missing:
        raise DataError(f"{path}: {missing[0]} is missing, of the {len(files)} data files that {state} names")
    return files


def _json(place: FileListing, name: str, path: str) -> dict:
    try:
        entry = json.loads(place.read(name))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {name} is no JSON ({error})") from error
    if not isinstance(entry, dict):
        raise DataError(f"{path}: {name} is no JSON object")
    return entry


def _local(given: str) -> tuple[str, FileListing]:
    """(folder, what lies there) of a path on this machine."""
    path = os.path.expanduser(given)

    def place(root: str, names: list[str], asked: list[str] | None = None) -> tuple[str, FileListing]:
        return root, FileListing(names, lambda name: Path(root, name).read_bytes(), asked)

    if os.path.isdir(path):
        return place(path, _walk(path))
    if os.path.isfile(path):
        root, name = os.path.split(path)
        other = partner(name)
        beside = [other] if other and os.path.isfile(os.path.join(root, other)) else []
        return place(root, [name, *beside], [name])
    if os.path.isfile(f"{path}.bin") and os.path.isfile(f"{path}.idx"):  # as Megatron-LM names a pair
        root, name = os.path.split(path)
        return place(root, [f"{name}.bin", f"{name}.idx"], [f"{name}.bin"])
    if MAGIC & set(path):
        root = str(Path(*_before_magic(Path(path).parts)))
        found = [_below(root, p) for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        beside = {p for n in found if (p := partner(n)) and os.path.isfile(os.path.join(root, p))}
        return place(root, sorted({*found, *beside}), found)
    raise DataError(f"{given}: no such file or folder; data.sources[].path is `stdlib` or a path or glob")


def _walk(root: str) -> list[str]:
    """Names of all files below a folder that are not hidden."""
    names = []
    for folder, inner, files in os.walk(root):
        inner[:] = [d for d in inner if not d.startswith(".") and d != "__pycache__"]
        paths = (os.path.join(folder, f) for f in files if not f.startswith("."))
        names += [_below(root, p) for p in paths if os.path.isfile(p)]
    return names


def _before_magic(parts: Iterable[str]) -> list[str]:
    plain: list[str] = []
    for part in parts:
        if MAGIC & set(part):
            break
        plain.append(part)
    return plain


def _below(root: str, path: str) -> str:
    return Path(os.path.relpath(path, root or ".")).as_posix()


def _standard_library() -> list[File]:
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [d for d in inner if d not in ("site-packages", "dist-packages", "__pycache__")]
        paths = [os.path.join(folder, n) for n in names if n.endswith(".py")]
        files += [File(_below(root, p), p, "stdlib", os.path.getsize(p)) for p in paths if os.path.isfile(p)]
    if not files:
        raise DataError(f"{root}: this Python has no source files of its standard library; give data.sources[].path")
    return sorted(files)
