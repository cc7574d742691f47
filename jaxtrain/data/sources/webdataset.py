"""WebDataset tars: the members that share a base name are a sample, and one of them holds its text.

Of `dir/000123.seg.txt` the sample's key is `dir/000123` and the suffix `seg.txt`: what follows the first dot of the
base name. Members of a sample stand together. Nothing is unpacked: a tar is read as a stream, from begin to end.
"""

from __future__ import annotations

import json
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from jaxtrain.data.sources.base import Document, Format, Span, decompressed, one_line, text_field, uncut
from jaxtrain.errors import DataError

CHUNK = 1 << 20


class _Member(tarfile.TarInfo):
    """A header that is missing or broken is an error; tarfile takes it for the end of the tar."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> tarfile.TarInfo:
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if len(buf) == tarfile.BLOCKSIZE and not buf.strip(b"\0"):
                raise  # the end mark, a block of zeros
            raise tarfile.ReadError(f"{error}, instead of a member or the end mark") from error


def _read_tar(span: Span, field: str) -> Iterator[Document]:
    """The member `field` of each sample, else the field of that name in its `json`; `text` is the member `txt` too."""
    file = span.file
    wanted = {field, "json"} | ({"txt"} if field == "text" else set())
    for key, suffixes, members in _samples(span, wanted):
        where = f"{file.path}: {key}"
        for suffix in (field, "txt"):
            if suffix in members and suffix in wanted:
                text = _decoded(members[suffix], f"{where}.{suffix}")
                break
        else:
            if "json" not in members:
                have = ", ".join(suffixes)
                message = f"no member `{field}`; set data.sources[].field to one of the members: {have}"
                raise DataError(f"{where}: {message}")
            try:
                entry = json.loads(members["json"])
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}.json: broken JSON ({one_line(error)})") from error
            text = text_field(entry, field, f"{where}.json")
        yield Document(f"{file.name}:{key}", text)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start + 1}); set data.sources[].field") from error


def _samples(span: Span, wanted: set[str]) -> Iterator[tuple[str, list[str], dict[str, bytes]]]:
    """(key, suffixes of its members, content of those that are wanted) of each sample."""
    current, suffixes, members = "", [], {}
    for name, data in _members(span, wanted):
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key = f"{folder}/{stem}" if folder else stem
        if suffixes and key != current:
            yield current, suffixes, members
            suffixes, members = [], {}
        current = key
        suffixes.append(suffix)
        if data is not None:
            members[suffix] = data
    if suffixes:
        yield current, suffixes, members


def _members(span: Span, wanted: set[str]) -> Iterator[tuple[str, bytes | None]]:
    """(name, content or None where its suffix is not wanted) of each file of a tar; hidden ones are left out."""
    path, last = span.file.path, "the first member"
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(decompressed(span.file))
            options = {"mode": "r|", "bufsize": tarfile.BLOCKSIZE, "tarinfo": _Member}
            tar: Any = stack.enter_context(tarfile.open(fileobj=stream, **options))
            while (member := tar.next()) is not None:
                tar.members.clear()  # else it remembers them all
                last = member.name
                name = member.name.removeprefix("./")
                stem, dot, suffix = name.rpartition("/")[2].partition(".")
                if not (member.isfile() and stem and dot):
                    continue
                content = tar.extractfile(member) if suffix in wanted else None
                yield name, content.read() if content is not None else None
            while data := stream.read(CHUNK):
                if data.strip(b"\0"):
                    raise DataError(f"{path}: goes on after its end mark; make one tar of joined ones")
        except DataError:
            raise
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{path}: at {last}: cannot be read ({one_line(error)}); is it complete?") from error


WEBDATASET = Format(("*.tar", "*.tar.gz", "*.tgz", "*.tar.zst"), uncut, _read_tar)
