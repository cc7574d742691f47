"""Types and helpers that all source formats share: files, spans, documents, and the choice of a split."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple, cast

import xxhash

from jaxtrain.errors import DataError, format_name
from jaxtrain.io.packages import import_optional

MAX_REASON = 300  # characters of a library's message
MAX_DOCUMENT = 1 << 28  # bytes of a line or of a member of a tar: more is a file without line ends, or a trap
SPLITS = ("train", "validation")
Progress = Callable[[int, int], object]  # called with (bytes done, bytes in all)


class File(NamedTuple):
    """A file of a source."""

    name: str  # path below the source's folder, with `/`
    path: str  # on this machine
    format: str  # a key of `formats.FORMATS`, or stdlib
    size: int  # bytes


class Span(NamedTuple):
    """A part of a file, [begin, end) in the units of its format; end -1 is the end of the file.

    The units are bytes of JSONL, row groups of Parquet, record batches of Arrow, records of ArrayRecord.
    """

    file: File
    begin: int
    end: int
    first: int  # number of the first line (from 1) or row (from 0)
    size: int  # bytes, for progress


@dataclass(frozen=True)
class Document:
    """The text of a document, and its name, which is the same on every machine."""

    name: str
    text: str


class Format(NamedTuple):
    """A file format."""

    patterns: tuple[str, ...]  # of file names
    spans: Callable[[File, int], Iterator[Span]]  # cuts a file into spans of about so many bytes
    read: Callable[[Span, str], Iterator[Document]]  # reads a span; the text is in the field of this name


def split_of(name: str, validation: float) -> str:
    """Returns `validation` for this share of all document names, else `train`, by hash of the name."""
    return "validation" if xxhash.xxh3_64_intdigest(name.encode()) < validation * 2.0**64 else "train"


def one_span(file: File, target: int) -> Iterator[Span]:
    """Yields the whole file as one span."""
    del target
    yield Span(file, 0, -1, 0, file.size)


def group_spans(file: File, parts: Iterable[tuple[int, int]], target: int) -> Iterator[Span]:
    """Groups consecutive parts of a file, given by (rows, bytes), into spans of at least `target` bytes."""
    begin = count = first = rows = size = 0
    for part_rows, part_size in parts:
        count, rows, size = count + 1, rows + part_rows, size + part_size
        if size >= target:
            yield Span(file, begin, count, first, size)
            begin, first, size = count, rows, 0
    if begin < count:
        yield Span(file, begin, count, first, size)


def open_file(file: File) -> IO[bytes]:
    """Opens a file, decompressing it if its name ends with .gz, .tgz or .zst."""
    if file.name.endswith((".gz", ".tgz")):
        return cast("IO[bytes]", gzip.open(file.path, "rb"))
    if file.name.endswith(".zst"):
        zstandard = import_optional("zstandard", f"{file.path}: .zst")
        return io.BufferedReader(zstandard.open(file.path, "rb"), 1 << 20)
    return open(file.path, "rb", buffering=1 << 20)


def json_text(data: bytes, field: str, where: str) -> str:
    """Returns the text in a field of a JSON object. Lone surrogates, which have no UTF-8, become U+FFFD.

    Raises:
      DataError: broken JSON, no such field, or not text; begins with `where` and lists the fields that hold text.
    """
    try:
        entry = json.loads(data)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start + 1}); convert it") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON ({first_line(error)}); expected one object") from error
    if not isinstance(entry, dict):
        raise DataError(f"{where}: {type(entry).__name__} instead of an object with a field `{field}`")
    text = entry.get(field)
    if not isinstance(text, str):
        fields = ", ".join(format_name(k) for k, v in entry.items() if isinstance(v, str)) or "none"
        problem = "is not text" if field in entry else "is missing"
        message = f"field `{field}` {problem}; set data.sources[].field to one of the text fields: {fields}"
        raise DataError(f"{where}: {message}")
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its class if it has none."""
    return (str(error) or type(error).__name__).splitlines()[0][:MAX_REASON]


def truncated_error(where: str, error: BaseException) -> DataError:
    """Returns the DataError for a file that cannot be read to its end."""
    return DataError(f"{where}: cannot be read ({first_line(error)}); is it complete?")
