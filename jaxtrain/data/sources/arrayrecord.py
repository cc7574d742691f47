"""ArrayRecord files: each record is a document.

A record is UTF-8 text, a JSON object or a `tf.train.Example`; the first record of a file determines which. Of a
`tf.train.Example` four protobuf messages are read: Example { Features features = 1 }, Features { map<string, Feature>
feature = 1 }, Feature { BytesList bytes_list = 1 } and BytesList { repeated bytes value = 1 }. Source:
`tensorflow/core/example/feature.proto`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from jaxtrain.data.sources.base import Document, File, Format, Span, first_line, json_text, truncated_error
from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional

RECORDS = 1024  # read in one call
FIELD_BYTES = {0: 0, 1: 8, 5: 4}  # of a protobuf field by its wire type; type 0 is a varint, type 2 has a length


@contextlib.contextmanager
def _open(file: File) -> Iterator[Any]:
    module = import_optional("array_record.python.array_record_module", f"{file.path}: ArrayRecord", "arrayrecord")
    try:
        reader = module.ArrayRecordReader(file.path)
    except Exception as error:
        raise DataError(f"{file.path}: not a readable ArrayRecord file ({first_line(error)})") from error
    try:
        if not reader.ok():  # the only sign of a truncated file
            raise DataError(f"{file.path}: not a readable ArrayRecord file; is it complete?")
        yield reader
    finally:
        with contextlib.suppress(RuntimeError):  # raised on closing a reader that is not ok
            reader.close()


def _spans(file: File, target: int) -> Iterator[Span]:
    with _open(file) as reader:
        records = reader.num_records()
    count = max(records * target // max(file.size, 1), 1)
    for begin in range(0, records, count):
        end = min(begin + count, records)
        yield Span(file, begin, end, begin, file.size * end // records - file.size * begin // records)


def _read(span: Span, field: str) -> Iterator[Document]:
    file = span.file
    with _open(file) as reader:
        read_text = _record_reader(_read_records(reader, file, 0, 1)[0])
        for begin in range(span.begin, span.end, RECORDS):
            records = _read_records(reader, file, begin, min(begin + RECORDS, span.end))
            for number, record in enumerate(records, begin):
                yield Document(f"{file.name}:{number}", read_text(record, field, f"{file.path}: record {number}"))


def _read_records(reader: Any, file: File, begin: int, end: int) -> list[bytes]:
    try:
        return reader.read(begin, end)
    except Exception as error:
        raise truncated_error(f"{file.path}: record {begin}", error) from error


def _record_reader(first: bytes) -> Callable[[bytes, str, str], str]:
    """Chooses the function that reads the text of a record, by the first record of the file."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict):
            return json_text
    with contextlib.suppress(ValueError):
        if _parse_example(first):
            return _read_example
    return _read_text


def _read_text(record: bytes, field: str, where: str) -> str:
    del field
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        message = "neither UTF-8 text nor a JSON object nor a tf.train.Example; write the records as one of these"
        raise DataError(f"{where}: {message}") from error


def _read_example(record: bytes, field: str, where: str) -> str:
    try:
        features = _parse_example(record)
        values = features.get(field)
        if values is not None and len(values) == 1:
            return values[0].decode()
    except ValueError as error:
        raise DataError(f"{where}: not a tf.train.Example with UTF-8 text ({first_line(error)})") from error
    names = ", ".join(name for name, values in features.items() if len(values) == 1) or "none"
    raise DataError(f"{where}: no text feature `{field}`; set data.sources[].field to one of: {names}")


def _parse_example(record: bytes) -> dict[str, list[bytes]]:
    """Returns feature -> its byte strings of a tf.train.Example. Raises ValueError if it is none."""
    example = {}
    for features in _protobuf_fields(record, 1):
        for entry in _protobuf_fields(features, 1):
            name = b"".join(_protobuf_fields(entry, 1)).decode()
            lists = [part for feature in _protobuf_fields(entry, 2) for part in _protobuf_fields(feature, 1)]
            example[name] = [value for part in lists for value in _protobuf_fields(part, 1)]
    return example


def _protobuf_fields(data: bytes, wanted: int) -> list[bytes]:
    """Returns the fields with number `wanted` of a protobuf message. Raises ValueError if they do not hold bytes."""
    fields, position = [], 0
    while position < len(data):
        tag, position = _varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == 2:
            length, position = _varint(data, position)
        elif wire_type in FIELD_BYTES:
            length = FIELD_BYTES[wire_type]
            if wire_type == 0:
                _, position = _varint(data, position)
        else:
            raise ValueError(f"wire type {wire_type}")
        if number == 0 or position + length > len(data) or (number == wanted and wire_type != 2):
            raise ValueError("broken message")
        if number == wanted:
            fields.append(data[position : position + length])
        position += length
    return fields


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """Returns (value, position after it)."""
    value = shift = 0
    while position < len(data) and shift < 64:
        value |= (data[position] & 127) << shift
        position, shift = position + 1, shift + 7
        if data[position - 1] < 128:
            return value, position
    raise ValueError("broken number")


ARRAYRECORD = Format(("*.arrayrecord", "*.array_record"), _spans, _read)
