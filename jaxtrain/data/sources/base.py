"""Parts of every kind of source: files, spans, documents, and the choice of a split."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

import xxhash

from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional

SPLITS = ("train", "validation")


class File(NamedTuple):
    """A file of a source. `name` is its path below the source's folder, with `/`; `path` is where it lies here."""

    name: str
    path: str
    format: str  # a key of `formats.FORMATS`, or stdlib
    size: int  # bytes


class Span(NamedTuple):
    """A part of a file, [begin, end) of its units; end -1 is the whole file.

    The units are bytes of JSONL, row groups of Parquet, record batches of Arrow, records of ArrayRecord. `first` is
    the number of the first line (from 1) or row (from 0); `size` its share in the progress, bytes.
    """

    file: File
    begin: int
    end: int
    first: int
    size: int


@dataclass(frozen=True)
class Document:
    """One document: a name that is the same on every machine, and its text."""

    name: str
    text: str


class Format(NamedTuple):
    """A kind of file: names (patterns) that folders are searched for, how a file is cut, and how a span is read."""

    patterns: tuple[str, ...]
    spans: Callable[[File, int], Iterator[Span]]  # (file, bytes wanted in each)
    read: Callable[[Span, str], Iterator[Document]]  # (span, `field`)


def split_of(name: str, validation: float) -> str:
    """`validation` for a share `validation` of all names, else `train`; by hash of the name alone."""
    return "validation" if xxhash.xxh3_64_intdigest(name.encode()) < validation * 2.0**64 else "train"


def uncut(file: File, target: int) -> Iterator[Span]:
    """One span: the whole file."""
    del target
    yield Span(file, 0, -1, 0, file.size)


def decompressed(file: File) -> IO[bytes]:
    """A file's bytes, unpacked where its name ends with .gz, .tgz or .zst."""
    if file.name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.open(file.path, "rb"))
    if file.name.endswith(".zst"):
        zstandard = import_optional("zstandard", f"{file.path}: .zst")
        return io.BufferedReader(zstandard.open(file.path, "rb"), 1 << 20)
    return open(file.path, "rb", buffering=1 << 20)


def text_field(entry: Any, field: str, where: str) -> str:
    """The text of a JSON object's field. Raises DataError, which begins with `where`, and says what it has instead."""
    if not isinstance(entry, dict):
        raise DataError(f"{where}: {type(entry).__name__} instead of an object with a field `{field}`")
    text = entry.get(field)
    if not isinstance(text, str):
        have = ", ".join(k for k, v in entry.items() if isinstance(v, str)) or "none"
        what = "is not text" if field in entry else "is missing"
        raise DataError(f"{where}: field `{field}` {what}; set data.sources[].field to one of the text fields: {have}")
    return valid(text)


def valid(text: str) -> str:
    """Lone surrogates, which JSON escapes can smuggle in, have no UTF-8: they become U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def one_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error) or type(error).__name__).splitlines()[0]
