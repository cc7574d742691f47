"""Parquet and Arrow: a column of text, each row a document. By pyarrow alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from jaxtrain.data.sources.base import Document, File, Format, Span, one_line
from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional

ROWS = 1024  # made into Python strings at a time


def _check_column(path: str, schema: Any, field: str) -> None:
    """Raises DataError where a schema has no such column, or one that is not text."""
    if field not in schema.names:
        have = ", ".join(schema.names)
        raise DataError(f"{path}: no column `{field}`; set data.sources[].field to one of: {have}")
    kind = str(schema.field(field).type)
    if "string" not in kind or kind.startswith(("list", "struct", "map", "large_list")):
        raise DataError(f"{path}: column `{field}` holds {kind}, not text; set data.sources[].field")


def _parquet(file: File) -> Any:
    parquet = import_optional("pyarrow.parquet", f"{file.path}: Parquet")
    try:
        return parquet.ParquetFile(file.path)
    except Exception as error:
        raise DataError(f"{file.path}: not a readable Parquet file ({one_line(error)})") from error


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


def _read_parquet(span: Span, field: str) -> Iterator[Document]:
    with _parquet(span.file) as reader:
        _check_column(span.file.path, reader.schema_arrow, field)
        row, groups = span.first, range(span.begin, span.end)
        try:
            for batch in reader.iter_batches(batch_size=ROWS, row_groups=list(groups), columns=[field]):
                for text in batch.column(0).to_pylist():
                    if text is not None:
                        yield Document(f"{span.file.name}:{row}", text)
                    row += 1
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise DataError(f"{span.file.path}: row {row}: cannot be read ({one_line(error)})") from error


@contextlib.contextmanager
def _arrow(file: File) -> Iterator[Any]:
    """A memory-mapped reader of either of Arrow's IPC formats, the file's (.feather) or the stream's (`datasets`).

    A stream may end anywhere between two record batches; its writers end it with a mark all the same, by which a cut
    one is told.
    """
    pyarrow, ipc = (import_optional(name, f"{file.path}: Arrow") for name in ("pyarrow", "pyarrow.ipc"))
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(pyarrow.memory_map(file.path))
            head = source.read(6)
            if head[:4] == b"FEA1":
                raise DataError(f"{file.path}: Feather version 1, which is not read; write it anew as version 2")
            source.seek(max(file.size - 4, 0))
            if head != b"ARROW1" and source.read(4) != bytes(4):
                raise DataError(f"{file.path}: Arrow without its end mark; is it complete?")
            source.seek(0)
            reader = stack.enter_context((ipc.open_file if head == b"ARROW1" else ipc.open_stream)(source))
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise DataError(f"{file.path}: not a readable Arrow file ({one_line(error)})") from error
        yield reader


def _record_batches(reader: Any, begin: int, end: int) -> Iterator[Any]:
    """Record batches [begin, end) of a reader; views of the mapped file, so those before cost next to nothing."""
    if hasattr(reader, "num_record_batches"):
        end = reader.num_record_batches if end < 0 else end
        return (reader.get_batch(i) for i in range(begin, end))
    return islice(iter(reader), begin, end if end >= 0 else None)


def _arrow_spans(file: File, target: int) -> Iterator[Span]:
    if file.size <= target:
        yield Span(file, 0, -1, 0, file.size)
        return
    begin = first = rows = size = count = 0
    with _arrow(file) as reader:
        try:
            for batch in _record_batches(reader, 0, -1):
                rows, size, count = rows + batch.num_rows, size + batch.nbytes, count + 1
                if size >= target:
                    yield Span(file, begin, count, first, size)
                    begin, first, size = count, rows, 0
        except (OSError, ValueError) as error:
            raise DataError(f"{file.path}: row {rows}: cannot be read ({one_line(error)}); is it complete?") from error
    if begin < count:
        yield Span(file, begin, count, first, size)


def _read_arrow(span: Span, field: str) -> Iterator[Document]:
    row = span.first
    with _arrow(span.file) as reader:
        _check_column(span.file.path, reader.schema, field)
        try:
            for batch in _record_batches(reader, span.begin, span.end):
                column = batch.column(batch.schema.get_field_index(field))
                column.validate(full=True)  # offsets of a damaged file would lead outside of it
                for start in range(0, len(column), ROWS):
                    for text in column.slice(start, ROWS).to_pylist():
                        if text is not None:
                            yield Document(f"{span.file.name}:{row}", text)
                        row += 1
        except (OSError, ValueError) as error:
            message = f"cannot be read ({one_line(error)}); is it complete?"
            raise DataError(f"{span.file.path}: row {row}: {message}") from error


PARQUET = Format(("*.parquet",), _parquet_spans, _read_parquet)
ARROW = Format(("*.arrow", "*.feather"), _arrow_spans, _read_arrow)
