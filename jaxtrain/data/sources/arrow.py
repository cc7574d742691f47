"""Parquet and Arrow files: each row of a text column is a document."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from jaxtrain.data.sources.base import Document, File, Format, Span, first_line, group_spans, one_span, truncated_error
from jaxtrain.errors import DataError, format_name
from jaxtrain.io.packages import import_optional

ROWS = 1024  # converted to Python strings at a time


def _check_column(path: str, schema: Any, field: str) -> None:
    """Raises DataError if a schema has no text column `field`."""
    try:
        names = schema.names
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the names of its columns are not UTF-8; is it damaged?") from error
    if field not in names:
        columns = ", ".join(map(format_name, names))
        raise DataError(f"{path}: no column `{field}`; set data.sources[].field to one of: {columns}")
    dtype = str(schema.field(field).type)
    if "string" not in dtype or dtype.startswith(("list", "struct", "map", "large_list")):
        raise DataError(f"{path}: column `{field}` holds {dtype}, not text; set data.sources[].field")


def _open_parquet(file: File) -> Any:
    parquet = import_optional("pyarrow.parquet", f"{file.path}: Parquet")
    try:
        return parquet.ParquetFile(file.path)
    except Exception as error:
        raise DataError(f"{file.path}: not a readable Parquet file ({first_line(error)})") from error


def _parquet_spans(file: File, target: int) -> Iterator[Span]:
    with _open_parquet(file) as reader:
        groups = map(reader.metadata.row_group, range(reader.metadata.num_row_groups))
        yield from group_spans(file, ((group.num_rows, group.total_byte_size) for group in groups), target)


def _read_parquet(span: Span, field: str) -> Iterator[Document]:
    with _open_parquet(span.file) as reader:
        _check_column(span.file.path, reader.schema_arrow, field)
        groups = list(range(span.begin, span.end))
        batches = reader.iter_batches(batch_size=ROWS, row_groups=groups, columns=[field])
        yield from _documents(span, (batch.column(0) for batch in batches))


def _documents(span: Span, columns: Iterable[Any]) -> Iterator[Document]:
    """Yields the rows of consecutive parts of a text column, except nulls."""
    row = span.first
    try:
        for column in columns:
            for text in column.to_pylist():
                if text is not None:
                    yield Document(f"{span.file.name}:{row}", text)
                row += 1
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise truncated_error(f"{span.file.path}: row {row}", error) from error


@contextlib.contextmanager
def _open_arrow(file: File) -> Iterator[Any]:
    """Opens a memory-mapped reader of either of Arrow's IPC formats: file (.feather) or stream (`datasets`).

    A stream may end between any two record batches. Its writers still write an end mark, which a truncated file lacks.
    """
    pyarrow, ipc = (import_optional(name, f"{file.path}: Arrow") for name in ("pyarrow", "pyarrow.ipc"))
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(pyarrow.memory_map(file.path))
            head = source.read(6)
            if head[:4] == b"FEA1":
                raise ValueError("Feather version 1 is not supported; write it as version 2")
            source.seek(max(file.size - 4, 0))
            if head != b"ARROW1" and source.read(4) != bytes(4):
                raise ValueError("it has no end mark; is it complete?")
            source.seek(0)
            reader = stack.enter_context((ipc.open_file if head == b"ARROW1" else ipc.open_stream)(source))
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise DataError(f"{file.path}: not a readable Arrow file ({first_line(error)})") from error
        yield reader


def _record_batches(reader: Any, begin: int, end: int) -> Iterator[Any]:
    """Yields record batches [begin, end). They are views of the mapped file, so skipping some is cheap."""
    if hasattr(reader, "num_record_batches"):
        end = reader.num_record_batches if end < 0 else end
        return (reader.get_batch(i) for i in range(begin, end))
    return islice(iter(reader), begin, end if end >= 0 else None)


def _arrow_spans(file: File, target: int) -> Iterator[Span]:
    if file.size <= target:
        yield from one_span(file, target)
        return
    with _open_arrow(file) as reader:
        batches = _record_batches(reader, 0, -1)
        try:
            yield from group_spans(file, ((batch.num_rows, batch.nbytes) for batch in batches), target)
        except (OSError, ValueError) as error:
            raise truncated_error(file.path, error) from error


def _read_arrow(span: Span, field: str) -> Iterator[Document]:
    with _open_arrow(span.file) as reader:
        _check_column(span.file.path, reader.schema, field)
        yield from _documents(span, _text_columns(_record_batches(reader, span.begin, span.end), field))


def _text_columns(batches: Iterable[Any], field: str) -> Iterator[Any]:
    for batch in batches:
        column = batch.column(batch.schema.get_field_index(field))
        column.validate(full=True)  # offsets of a damaged file could point outside of it
        yield from (column.slice(start, ROWS) for start in range(0, len(column), ROWS))


PARQUET = Format(("*.parquet",), _parquet_spans, _read_parquet)
ARROW = Format(("*.arrow", "*.feather"), _arrow_spans, _read_arrow)
