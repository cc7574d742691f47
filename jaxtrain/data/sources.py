"""Documents from files: text and source-code folders, JSONL, Parquet, and the Python standard library.

A source is listed once (`list_files`: sorted, deterministic), cut into shards of about equal size (`plan_shards`) and
read shard by shard (`read_shard`), so that processes can share the work and the result never depends on how many
there are. A document's name (path below the source's folder; `path:line` in JSONL; `path:row` in Parquet) is the same
on every machine, and alone decides whether the document is kept for validation.
"""

from __future__ import annotations

import fnmatch
import glob
import gzip
import io
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import xxhash

from jaxtrain.config.schema import Source
from jaxtrain.data.errors import DataError, require

TEXT_SUFFIXES = """
    txt text md markdown rst tex org adoc py pyi c h cc cpp hpp cu rs go java js jsx ts tsx rb php cs swift kt scala hs
    ml jl lua pl r sh sql html css xml json yaml yml toml ini cfg
"""
TEXT = tuple(f"*.{suffix}" for suffix in TEXT_SUFFIXES.split())
JSONL = ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.ndjson.gz", "*.ndjson.zst")
PARQUET = ("*.parquet",)
SPLITS = ("train", "validation")
COUNTED = 1 << 22  # bytes whose lines are counted at a time
MAGIC = frozenset("*?[")


class File(NamedTuple):
    """A file of a source. `name` is its path below the source's folder, with `/`."""

    name: str
    path: str
    format: str  # text, stdlib, jsonl, parquet
    size: int  # bytes


class Span(NamedTuple):
    """A part of a file: bytes [begin, end) of JSONL, row groups [begin, end) of Parquet; end -1 is the whole file.

    `first` is the number of the first line (from 1) or row (from 0); `size` its share in the progress, bytes.
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


def split_of(name: str, validation: float) -> str:
    """`validation` for a share `validation` of all names, else `train`; by hash of the name alone."""
    return "validation" if xxhash.xxh3_64_intdigest(name.encode()) < validation * 2.0**64 else "train"


def list_files(source: Source) -> list[File]:
    """Files of a source, sorted by name.

    Raises:
      DataError: nothing there, or nothing that can be read.
    """
    if source.path == "stdlib":
        return _list_stdlib()
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        files = _list_folder(path, source)
    elif os.path.isfile(path):
        files = [_file(os.path.dirname(path), path, source.format)]
    elif MAGIC & set(path):
        fixed = Path(*_before_magic(Path(path).parts))
        found = [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        files = [_file(str(fixed), p, source.format) for p in _included(str(fixed), found, source.include)]
    else:
        raise DataError(f"{source.path}: no such file or folder; data.sources[].path is `stdlib` or a path or glob")
    if not files:
        wanted = ", ".join(source.include) or "text, JSONL or Parquet files"
        raise DataError(f"{source.path}: no files found (looked for {wanted}); check data.sources[].path and include")
    return sorted(files)


def _before_magic(parts: tuple[str, ...]) -> list[str]:
    plain: list[str] = []
    for part in parts:
        if MAGIC & set(part):
            break
        plain.append(part)
    return plain


def _list_stdlib() -> list[File]:
    root = sysconfig.get_paths()["stdlib"]
    files = []
    for folder, inner, names in os.walk(root):
        inner[:] = [d for d in inner if d not in ("site-packages", "dist-packages", "__pycache__")]
        paths = [os.path.join(folder, n) for n in names if n.endswith(".py")]
        files += [_file(root, p, "stdlib") for p in paths if os.path.isfile(p)]
    if not files:
        raise DataError(f"{root}: this Python has no source files of its standard library; give data.sources[].path")
    return sorted(files)


def _list_folder(path: str, source: Source) -> list[File]:
    found = []
    for folder, inner, names in os.walk(path):
        inner[:] = [d for d in inner if not d.startswith(".") and d != "__pycache__"]
        found += [p for n in names if not n.startswith(".") and os.path.isfile(p := os.path.join(folder, n))]
    if source.include:
        return [_file(path, p, source.format) for p in _included(path, found, source.include)]
    kinds = {"text": TEXT, "jsonl": JSONL, "parquet": PARQUET}
    if source.format != "auto":
        return [_file(path, p, source.format) for p in found if _matches(os.path.basename(p), kinds[source.format])]
    present = {k: [p for p in found if _matches(os.path.basename(p), v)] for k, v in kinds.items()}
    present = {k: v for k, v in present.items() if v}
    if len(present) > 1:
        counts = ", ".join(f"{len(v)} {k}" for k, v in present.items())
        raise DataError(f"{source.path}: holds several kinds of files ({counts}); set data.sources[].format or include")
    return [_file(path, p, kind) for kind, paths in present.items() for p in paths]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name.lower(), p) for p in patterns)


def _included(root: str, paths: list[str], include: tuple[str, ...]) -> list[str]:
    """Paths whose base name (or path below root, for patterns with a slash) matches a pattern; all without patterns."""
    if not include:
        return paths
    return [
        p
        for p in paths
        if any(fnmatch.fnmatchcase(_name(root, p) if "/" in i else os.path.basename(p), i) for i in include)
    ]


def _name(root: str, path: str) -> str:
    return Path(os.path.relpath(path, root or ".")).as_posix()


def _file(root: str, path: str, kind: str) -> File:
    if kind == "auto":
        base = os.path.basename(path)
        kind = "jsonl" if _matches(base, JSONL) else "parquet" if _matches(base, PARQUET) else "text"
    return File(_name(root, path), os.path.abspath(path), kind, os.path.getsize(path))


def plan_shards(files: list[File], target: int) -> list[list[Span]]:
    """Cut a source into shards of about `target` bytes: a pure function of the files' names, sizes and contents.

    Small files share a shard. Large plain JSONL is cut at line ends and Parquet at row groups; text files and
    compressed JSONL are never cut.
    """
    shards: list[list[Span]] = []
    room = 0
    for file in files:
        for span in _spans(file, target):
            if room <= 0:
                shards.append([])
                room = target
            shards[-1].append(span)
            room -= max(span.size, 1)
    return shards


def _spans(file: File, target: int) -> Iterator[Span]:
    whole = Span(file, 0, -1, 1 if file.format == "jsonl" else 0, file.size)
    if file.format == "parquet":
        yield from _parquet_spans(file, target)
    elif file.format == "jsonl" and file.size > target and not file.name.endswith((".gz", ".zst")):
        with open(file.path, "rb") as f:
            begin, line = 0, 1
            while begin < file.size:
                newlines, left = 0, target
                while left > 0 and (chunk := f.read(min(left, COUNTED))):
                    newlines += chunk.count(b"\n")
                    left -= len(chunk)
                newlines += f.readline().count(b"\n")
                end = f.tell()
                yield Span(file, begin, end, line, end - begin)
                begin, line = end, line + newlines
    else:
        yield whole


def _parquet(file: File) -> Any:
    parquet = require("pyarrow.parquet", f"{file.path}: Parquet")
    try:
        return parquet.ParquetFile(file.path)
    except Exception as error:
        raise DataError(f"{file.path}: not a readable Parquet file ({_line(error)})") from error


def _parquet_spans(file: File, target: int) -> Iterator[Span]:
    with _parquet(file) as reader:
        meta = reader.metadata
        begin = first = rows = size = 0
        for g in range(meta.num_row_groups):
            group = meta.row_group(g)
            rows += group.num_rows
            size += group.total_byte_size
            if size >= target or g == meta.num_row_groups - 1:
                yield Span(file, begin, g + 1, first, size)
                begin, first, size = g + 1, rows, 0


def read_shard(spans: Iterable[Span], field: str) -> Iterator[Document]:
    """Documents of a shard, in order; empty ones are left out. `field` is the JSONL/Parquet column.

    Raises:
      DataError: not UTF-8, a broken line, a missing column; names file and line.
    """
    for span in spans:
        kind = span.file.format
        if kind in ("text", "stdlib"):
            documents = _read_text(span.file)
        elif kind == "jsonl":
            documents = _read_jsonl(span, field)
        else:
            documents = _read_parquet(span, field)
        yield from (d for d in documents if d.text)


def documents(source: Source) -> Iterator[Document]:
    """All documents of a source, in order; raises as `list_files` and `read_shard`."""
    for shard in plan_shards(list_files(source), 64 << 20):
        yield from read_shard(shard, source.field)


def _read_text(file: File) -> Iterator[Document]:
    try:
        with open(file.path, "rb") as f:
            data = f.read()
        yield Document(file.name, data.decode())
    except UnicodeDecodeError as error:
        if file.format == "stdlib":
            return  # a few of Python's own test files are deliberately not UTF-8
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file.path}:{line}: not UTF-8 (byte 0x{data[error.start]:02x}); convert it or leave it out by include"
        ) from error
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from error


def _open_lines(file: File) -> IO[bytes]:
    if file.name.endswith(".gz"):
        return cast("IO[bytes]", gzip.open(file.path, "rb"))
    if file.name.endswith(".zst"):
        zstandard = require("zstandard", f"{file.path}: .zst")
        return io.BufferedReader(zstandard.open(file.path, "rb"), 1 << 20)
    return open(file.path, "rb", buffering=1 << 20)


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of a span of JSONL."""
    line = span.first - 1
    try:
        with _open_lines(span.file) as f:
            if span.begin:
                f.seek(span.begin)
            left = span.end - span.begin if span.end >= 0 else -1
            while left != 0 and (data := f.readline()):
                line += 1
                if left > 0:
                    left -= len(data)
                yield line, data
    except DataError:
        raise
    except Exception as error:  # each decompressor has its own error classes
        raise DataError(f"{span.file.path}:{line + 1}: cannot be read ({_line(error)}); is it complete?") from error


def _read_jsonl(span: Span, field: str) -> Iterator[Document]:
    path = span.file.path
    for number, data in _lines(span):
        if not data.strip():
            continue
        try:
            entry = json.loads(data)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line); convert it") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: broken JSON ({_line(error)}); each line must be one object") from error
        if not isinstance(entry, dict):
            raise DataError(f"{path}:{number}: {type(entry).__name__} instead of an object with a field `{field}`")
        text = entry.get(field)
        if not isinstance(text, str):
            have = ", ".join(k for k, v in entry.items() if isinstance(v, str)) or "none"
            what = "is not text" if field in entry else "is missing"
            raise DataError(
                f"{path}:{number}: field `{field}` {what}; set data.sources[].field to one of the text fields: {have}"
            )
        yield Document(f"{span.file.name}:{number}", _valid(text))


def _valid(text: str) -> str:
    """Lone surrogates, which JSON escapes can smuggle in, have no UTF-8: they become U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _read_parquet(span: Span, field: str) -> Iterator[Document]:
    with _parquet(span.file) as reader:
        schema = reader.schema_arrow
        if field not in schema.names:
            have = ", ".join(schema.names)
            raise DataError(f"{span.file.path}: no column `{field}`; set data.sources[].field to one of: {have}")
        kind = str(schema.field(field).type)
        if "string" not in kind:
            raise DataError(f"{span.file.path}: column `{field}` holds {kind}, not text; set data.sources[].field")
        row, groups = span.first, range(span.begin, span.end)
        try:
            for batch in reader.iter_batches(batch_size=1024, row_groups=list(groups), columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Document(f"{span.file.name}:{row}", text)
                    row += 1
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise DataError(f"{span.file.path}: row {row}: cannot be read ({_line(error)})") from error


def _line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
