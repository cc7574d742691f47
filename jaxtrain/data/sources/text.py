"""Text files, each of them a document, and JSONL, each line of which is one."""

from __future__ import annotations

from collections.abc import Iterator

from jaxtrain.data.sources import base
from jaxtrain.data.sources.base import Document, File, Format, Span, json_text, one_span, open_file, truncated_error
from jaxtrain.errors import DataError

TEXT_SUFFIXES = """
    txt text md markdown rst tex org adoc py pyi c h cc cpp hpp cu rs go java js jsx ts tsx rb php cs swift kt scala hs
    ml jl lua pl r sh sql html css xml json yaml yml toml ini cfg
"""
CHUNK = 1 << 22  # bytes whose lines are counted at a time


def _read_text(span: Span, field: str) -> Iterator[Document]:
    del field
    file = span.file
    try:
        with open(file.path, "rb") as f:
            data = f.read()
        yield Document(file.name, data.decode())
    except UnicodeDecodeError as error:
        if file.format == "stdlib":
            return  # some of Python's test files are deliberately not UTF-8
        line = data.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8 (byte 0x{data[error.start]:02x}); convert it or leave it out by include"
        raise DataError(f"{file.path}:{line}: {message}") from error
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
            while left > 0 and (chunk := f.read(min(left, CHUNK))):
                newlines += chunk.count(b"\n")
                left -= len(chunk)
            newlines += f.readline(base.MAX_DOCUMENT + 1).count(b"\n")
            end = f.tell()
            yield Span(file, begin, end, line, end - begin)
            begin, line = end, line + newlines


def _numbered_lines(span: Span) -> Iterator[tuple[int, bytes]]:
    """Yields (line number, line) of a span of JSONL."""
    number = span.first - 1
    try:
        with open_file(span.file) as f:
            if span.begin:
                f.seek(span.begin)
            left = span.end - span.begin if span.end >= 0 else -1
            while left != 0 and (line := f.readline(base.MAX_DOCUMENT + 1)):
                number += 1
                if len(line) > base.MAX_DOCUMENT:
                    message = f"a line of more than {base.MAX_DOCUMENT} bytes; expected one document a line"
                    raise DataError(f"{span.file.path}:{number}: {message}")
                if left > 0:
                    left -= len(line)
                yield number, line
    except DataError:
        raise
    except Exception as error:  # each decompressor has its own error classes
        raise truncated_error(f"{span.file.path}:{number + 1}", error) from error


def _read_jsonl(span: Span, field: str) -> Iterator[Document]:
    for number, line in _numbered_lines(span):
        if line.strip():
            yield Document(f"{span.file.name}:{number}", json_text(line, field, f"{span.file.path}:{number}"))


TEXT = Format(tuple(f"*.{suffix}" for suffix in TEXT_SUFFIXES.split()), one_span, _read_text)
JSONL = Format(
    ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.ndjson", "*.ndjson.gz", "*.ndjson.zst"), _jsonl_spans, _read_jsonl
)
