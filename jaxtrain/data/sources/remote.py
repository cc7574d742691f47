"""Sources on other machines: object stores, by fsspec, and datasets of the Hugging Face hub.

The files of a store are copied once into the cache folder, to `remote/HASH/NAME`, where HASH is that of the URL of the
source's folder. `.versions/NAME` there holds the version of the copy (size, and the store's etag or modification time).
It is written after the copy, so that a copy is repeated if it was killed or if the file has changed in the store.

The library `datasets` downloads `hf://OWNER/NAME[/CONFIG][:SPLIT]` (default split: `train`) once, as Arrow, into its
cache, where the files are read in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import File, Progress, first_line
from jaxtrain.data.sources.formats import paired_name
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import open_atomic, write_atomic
from jaxtrain.io.packages import import_optional

VERSION_FIELDS = (
    "ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime", "created",
)  # fmt: skip
CHUNK = 4 << 20
HUB_PREFIX = "hf://"
HUB_URL = re.compile(r"hf://(?P<id>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")


class ObjectStore:
    """The files below a URL, or those that match a URL with a pattern.

    Attributes:
      names: all files below the folder, with `/`.
      selected: the names that the URL itself stands for; None if it is a folder.

    Raises:
      DataError: fsspec is not installed, or the URL does not exist or cannot be listed.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fsspec = import_optional("fsspec", f"{url}: a store", "remote")
        try:
            self._fs, path = fsspec.core.url_to_fs(url)
            path = path.rstrip("/")
            selected = None
            if any(c in url for c in "*?["):
                root = path[: min(path.find(c) for c in "*?[" if c in path)].rpartition("/")[0]
                files = selected = self._fs.glob(path, detail=True)
            elif self._fs.isfile(path):
                files = selected = {path: self._fs.info(path)}
                other = paired_name(path)
                if other and self._fs.isfile(other):
                    files = {**selected, other: self._fs.info(other)}
                root = path.rpartition("/")[0]
            else:
                root, files = path, self._fs.find(path, detail=True)
        except ImportError as error:  # s3fs, gcsfs, aiohttp: the message of fsspec names the package
            raise DataError(f"{url}: {first_line(error)}; install it beside 'jaxtrain[remote]'") from error
        except Exception as error:  # each store has its own error classes
            raise DataError(f"{url}: cannot be listed ({type(error).__name__}: {first_line(error)})") from error
        self._root = f"{root}/" if root else ""
        self._info = {p.removeprefix(self._root): i for p, i in files.items() if i.get("type", "file") == "file"}
        self.names = sorted(n for n in self._info if not any(part.startswith(".") for part in n.split("/")))
        self.selected = None if selected is None else [n for n in self.names if self._root + n in selected]
        if not self.names:
            raise DataError(f"{url}: no files there; check data.sources[].path")

    def read(self, name: str) -> bytes:
        """Returns the content of a small file. Raises DataError."""
        try:
            return self._fs.cat_file(self._root + name)
        except Exception as error:
            raise DataError(f"{self.url}: {name} cannot be read ({first_line(error)})") from error

    def download(self, names: list[str], cache: Path, progress: Progress | None) -> dict[str, str]:
        """Copies files that are not in the cache yet.

        Args:
          names: the files.
          cache: folder of all caches.
          progress: called with (bytes done, bytes in all).

        Returns:
          name -> path of the copy.

        Raises:
          DataError: a file cannot be read or written.
        """
        folder = cache / "remote" / hashlib.sha256(f"{self._fs.protocol} {self._root}".encode()).hexdigest()[:16]
        total, done = sum(self._size(n) for n in names), 0
        for name in names:
            path = folder / name
            version_path, version = folder / ".versions" / name, self._version(name)
            try:
                is_current = path.exists() and version_path.exists() and version_path.read_text() == version
                if not is_current:
                    for parent in (path.parent, version_path.parent):
                        parent.mkdir(parents=True, exist_ok=True)
                    self._copy(name, path, lambda n, before=done: progress and progress(before + n, total))
                    write_atomic(version_path, version)
            except OSError as error:
                where = f"{error.filename or folder}: {error.strerror}"
                raise DataError(f"{where}; is data.cache_dir writable, with space left?") from error
            done += self._size(name)
        return {name: str(folder / name) for name in names}

    def _size(self, name: str) -> int:
        return int(self._info[name].get("size") or 0)

    def _version(self, name: str) -> str:
        info = self._info[name]
        return json.dumps([self._size(name), *(f"{k} {info[k]}" for k in VERSION_FIELDS if k in info)])

    def _copy(self, name: str, path: Path, report: Callable[[int], Any]) -> None:
        done, size = 0, self._info[name].get("size")
        try:
            with self._fs.open(self._root + name, "rb") as source, open_atomic(path) as target:
                while data := source.read(CHUNK):
                    target.write(data)
                    done += len(data)
                    report(done)
                if size is not None and done != size:
                    raise DataError(f"{self.url}: {name} gave {done} bytes instead of {size}; run again")
        except DataError:
            raise
        except Exception as error:
            reason = first_line(error)
            raise DataError(f"{self.url}: {name} cannot be copied to {path} ({reason}); run again") from error


def hub_files(source: SourceConfig) -> list[File]:
    """Returns the Arrow files of a dataset of the Hugging Face hub, sorted by name; downloads them if necessary.

    Raises:
      DataError: malformed URL, `datasets` not installed, no such dataset, or no network.
    """
    url = HUB_URL.fullmatch(source.path)
    if url is None:
        raise DataError(f"{source.path}: a dataset of the hub is given as hf://OWNER/NAME[/CONFIG][:SPLIT]")
    if source.format not in ("auto", "arrow") or source.include:
        raise DataError(f"{source.path}: a dataset of the hub is read as Arrow; leave out format and include")
    datasets = import_optional("datasets", f"{source.path}: a dataset of the hub", "hf")
    try:
        dataset = datasets.load_dataset(url["id"], url["config"], split=url["split"] or "train")
    except Exception as error:  # the library and its dependencies have many error classes
        raise DataError(f"{source.path}: cannot be loaded ({type(error).__name__}: {first_line(error)})") from error
    paths = sorted(entry["filename"] for entry in dataset.cache_files)
    if not paths:
        raise DataError(f"{source.path}: holds no rows, or `datasets` keeps it only in memory")
    return sorted(File(os.path.basename(p), os.path.abspath(p), "arrow", os.path.getsize(p)) for p in paths)
