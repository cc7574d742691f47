"""Text files, each a document, and JSONL, each line one."""

from __future__ import annotations

import json
from collections.abc import Iterator

from jaxtrain.data.sources.base import Document, File, Format, Span, decompressed, one_line, text_field, uncut
from jaxtrain.errors import DataError

TEXT_SUFFIXES = """
    txt text md markdown rst tex org adoc py pyi c h cc cpp hpp cu rs go java js jsx ts tsx rb php cs swift kt scala hs
    ml jl lua pl r sh sql html css xml json yaml yml toml ini cfg
"""
COUNTED = 1 << 22  # bytes whose lines are counted at a time


def _read_text(span: Span, field: str) -> Iterator[Document]:
    del field
    file = span.file
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


def _jsonl_spans(file: File, target: int) -> Iterator[Span]:
    if file.size <= target or file.name.endswith((".gz", ".zst")):
        yield Span(file, 0, -1, 1, file.size)
        return
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


def _lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of a span of JSONL."""
    line = span.first - 1
    try:
        with decompressed(span.file) as f:
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
        raise DataError(f"{span.file.path}:{line + 1}: cannot be read ({one_line(error)}); is it complete?") from error


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
            message = f"broken JSON ({one_line(error)}); each line must be one object"
            raise DataError(f"{path}:{number}: {message}") from error
        yield Document(f"{span.file.name}:{number}", text_field(entry, field, f"{path}:{number}"))


TEXT = Format(tuple(f"*.{suffix}" for suffix in TEXT_SUFFIXES.split()), uncut, _read_text)
JSONL = Format(
    ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.ndjson.gz", "*.ndjson.zst"), _jsonl_spans, _read_jsonl
)
