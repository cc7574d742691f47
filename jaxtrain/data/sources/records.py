"""ArrayRecord: each record is a document's UTF-8 text, a JSON object, or a `tf.train.Example`; the first record tells.

Of a `tf.train.Example` three messages are read: Example { Features features = 1 }, Features { map<string, Feature>
feature = 1 } and Feature { BytesList bytes_list = 1 }, BytesList { repeated bytes value = 1 }. Source:
`tensorflow/core/example/feature.proto`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from jaxtrain.data.sources.base import Document, File, Format, Span, one_line, text_field
from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional

TOGETHER = 1024  # records read in one call
LENGTHS = {0: 0, 1: 8, 5: 4}  # bytes of a protobuf field by its wire type; 0 is a varint, 2 says its own length


@contextlib.contextmanager
def _open(file: File) -> Iterator[Any]:
    module = import_optional("array_record.python.array_record_module", f"{file.path}: ArrayRecord", "arrayrecord")
    try:
        reader = module.ArrayRecordReader(file.path)
    except Exception as error:
        raise DataError(f"{file.path}: not a readable ArrayRecord file ({one_line(error)})") from error
    try:
        if not reader.ok():  # the library says nothing else of a file that is cut short
            raise DataError(f"{file.path}: not a readable ArrayRecord file; is it complete?")
        yield reader
    finally:
        with contextlib.suppress(RuntimeError):  # closing a reader that is not ok raises without a word
            reader.close()


def _spans(file: File, target: int) -> Iterator[Span]:
    with _open(file) as reader:
        records = reader.num_records()
    each = max(records * target // max(file.size, 1), 1)
    for begin in range(0, records, each):
        end = min(begin + each, records)
        yield Span(file, begin, end, begin, file.size * end // records - file.size * begin // records)


def _read(span: Span, field: str) -> Iterator[Document]:
    file = span.file
    with _open(file) as reader:
        texts = _kind(reader, file)
        for begin in range(span.begin, span.end, TOGETHER):
            end = min(begin + TOGETHER, span.end)
            try:
                records = reader.read(begin, end)
            except Exception as error:
                message = f"cannot be read ({one_line(error)}); is it complete?"
                raise DataError(f"{file.path}: record {begin}: {message}") from error
            for number, record in enumerate(records, begin):
                yield Document(f"{file.name}:{number}", texts(record, field, f"{file.path}: record {number}"))


def _kind(reader: Any, file: File) -> Any:
    """Chooses the reader of a record's text by the first record."""
    try:
        first = reader.read(0, 1)[0]
    except Exception as error:
        raise DataError(f"{file.path}: record 0: cannot be read ({one_line(error)}); is it complete?") from error
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(first), dict):
            return _of_json
    with contextlib.suppress(ValueError):
        if _example(first):
            return _of_example
    return _of_text


def _of_text(record: bytes, field: str, where: str) -> str:
    del field
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        message = "neither UTF-8 text nor a JSON object nor a tf.train.Example; write the records as one of these"
        raise DataError(f"{where}: {message}") from error


def _of_json(record: bytes, field: str, where: str) -> str:
    try:
        entry = json.loads(record)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: broken JSON ({one_line(error)}); each record must be one object") from error
    return text_field(entry, field, where)


def _of_example(record: bytes, field: str, where: str) -> str:
    try:
        features = _example(record)
        values = features.get(field)
        if values is not None and len(values) == 1:
            return values[0].decode()
    except ValueError as error:
        raise DataError(f"{where}: not a tf.train.Example with UTF-8 text ({one_line(error)})") from error
    have = ", ".join(k for k, v in features.items() if len(v) == 1) or "none"
    raise DataError(f"{where}: no text feature `{field}`; set data.sources[].field to one of: {have}")


def _example(record: bytes) -> dict[str, list[bytes]]:
    """{feature: its byte strings} of a tf.train.Example. Raises ValueError where it is none."""
    found = {}
    for features in _messages(record, 1):
        for entry in _messages(features, 1):
            name = b"".join(_messages(entry, 1)).decode()
            lists = [part for feature in _messages(entry, 2) for part in _messages(feature, 1)]
            found[name] = [value for part in lists for value in _messages(part, 1)]
    return found


def _messages(data: bytes, wanted: int) -> list[bytes]:
    """The fields of a protobuf message with the number `wanted`, which must hold bytes; raises ValueError."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in LENGTHS:
            length = LENGTHS[wire]
            if wire == 0:
                _, at = _varint(data, at)
        else:
            raise ValueError(f"wire type {wire}")
        if number == 0 or at + length > len(data) or (number == wanted and wire != 2):
            raise ValueError("broken message")
        if number == wanted:
            found.append(data[at : at + length])
        at += length
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(value, place after it)"""
    value = shift = 0
    while at < len(data) and shift < 64:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
    raise ValueError("broken number")


ARRAYRECORD = Format(("*.arrayrecord", "*.array_record"), _spans, _read)
