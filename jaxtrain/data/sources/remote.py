"""Object stores, by fsspec: what a source reads of them is copied once, file by file, into the folder of the caches.

A copy lies at `remote/HASH/NAME`, HASH being of the URL of the source's folder. `.versions/NAME` there says
which version it is of (size, and the store's etag or time of change); it is written after the copy is in place, so
that a killed copy is made again, and a file that changed in the store too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.data.sources.base import one_line
from jaxtrain.data.sources.formats import partner
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import open_atomic, write_atomic
from jaxtrain.io.packages import import_optional

VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "LastModified", "last_modified", "updated", "mtime", "created")
CHUNK = 4 << 20
Progress = Callable[[int, int], None]


class ObjectStore:
    """The files below a URL, or those that a URL with a pattern names.

    Attributes: `names` of all files below the folder, with `/`, as on a disk; `asked`: None for a folder, else the
    names that the URL itself means.

    Raises:
      DataError: no fsspec, no such place, or one that does not answer.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        fsspec = import_optional("fsspec", f"{url}: a store", "remote")
        try:
            self._fs, path = fsspec.core.url_to_fs(url)
            path = path.rstrip("/")
            asked = None
            if any(c in url for c in "*?["):
                root = path[: min(path.find(c) for c in "*?[" if c in path)].rpartition("/")[0]
                found = self._fs.glob(path, detail=True)
                asked = found
            elif self._fs.isfile(path):
                asked = {path: self._fs.info(path)}
                other = partner(path)
                beside = {other: self._fs.info(other)} if other and self._fs.isfile(other) else {}
                root, found = path.rpartition("/")[0], {**asked, **beside}
            else:
                root, found = path, self._fs.find(path, detail=True)
        except ImportError as error:  # s3fs, gcsfs, aiohttp: fsspec's own words name the package
            raise DataError(f"{url}: {one_line(error)}; install it beside 'jaxtrain[remote]'") from error
        except Exception as error:  # each store has its own classes of them
            raise DataError(f"{url}: cannot be listed ({type(error).__name__}: {one_line(error)})") from error
        self._root = f"{root}/" if root else ""
        self._info = {p.removeprefix(self._root): i for p, i in found.items() if i.get("type", "file") == "file"}
        self.names = sorted(n for n in self._info if not any(part.startswith(".") for part in n.split("/")))
        self.asked = None if asked is None else [n for n in self.names if self._root + n in asked]
        if not self.names:
            raise DataError(f"{url}: no files there; check data.sources[].path")

    def read(self, name: str) -> bytes:
        """The content of a small file."""
        try:
            return self._fs.cat_file(self._root + name)
        except Exception as error:
            raise DataError(f"{self.url}: {name} cannot be read ({one_line(error)})") from error

    def copied(self, names: list[str], cache: Path, progress: Progress | None) -> dict[str, str]:
        """{name: path of its copy}; what is there already is not copied again. `progress`: (bytes done, in all)."""
        folder = cache / "remote" / hashlib.sha256(f"{self._fs.protocol} {self._root}".encode()).hexdigest()[:16]
        total, done = sum(self._size(n) for n in names), 0
        for name in names:
            path = folder / name
            mark, version = folder / ".versions" / name, self._version(name)
            try:
                if not (path.exists() and _content(mark) == version):
                    for parent in (path.parent, mark.parent):
                        parent.mkdir(parents=True, exist_ok=True)
                    self._copy(name, path, lambda n, before=done: progress and progress(before + n, total))
                    write_atomic(mark, version)
            except OSError as error:
                where = f"{error.filename or folder}: {error.strerror}"
                raise DataError(f"{where}; is data.cache_dir writable, with space left?") from error
            done += self._size(name)
        return {name: str(folder / name) for name in names}

    def _size(self, name: str) -> int:
        return int(self._info[name].get("size") or 0)

    def _version(self, name: str) -> str:
        info = self._info[name]
        return json.dumps([self._size(name), *(f"{k} {info[k]}" for k in VERSIONS if k in info)])

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
            raise DataError(f"{self.url}: {name} cannot be copied to {path} ({one_line(error)}); run again") from error


def _content(path: Path) -> str | None:
    return path.read_text() if path.exists() else None
