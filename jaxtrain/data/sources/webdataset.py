"""WebDataset tars: consecutive members that share a key are a sample, and one of them holds its text.

The key of `dir/000123.seg.txt` is `dir/000123`; its suffix, after the first dot of the base name, is `seg.txt`. A tar
is read as a stream and never unpacked.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from typing import Any

from jaxtrain.data.sources import base
from jaxtrain.data.sources.base import Document, Format, Span, json_text, one_span, open_file, truncated_error
from jaxtrain.errors import DataError, format_name

CHUNK = 1 << 20


class _StrictTarInfo(tarfile.TarInfo):
    """Raises ReadError for a missing or broken header, which tarfile takes for the end of the tar."""

    @classmethod
    def fromtarfile(cls, tar: Any) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # pyright: ignore[reportAttributeAccessIssue]
            raise  # the end mark, a block of zeros
        except tarfile.HeaderError as error:  # also of the blocks of a long name, which newer Pythons check
            raise tarfile.ReadError(f"{error} instead of a member or the end mark") from error


def _read_tar(span: Span, field: str) -> Iterator[Document]:
    """Reads the member `field` of each sample (or `txt` if `field` is `text`), else that field of its member `json`."""
    file = span.file
    text_suffixes = (field, "txt") if field == "text" else (field,)
    for key, suffixes, members in _samples(span, {*text_suffixes, "json"}):
        where = f"{file.path}: {key}"
        suffix = next((suffix for suffix in text_suffixes if suffix in members), None)
        if suffix is not None:
            try:
                text = members[suffix].decode()
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 (byte {error.start + 1}); set data.sources[].field"
                raise DataError(f"{where}.{suffix}: {problem}") from error
        elif "json" in members:
            text = json_text(members["json"], field, f"{where}.json")
        else:
            message = f"no member `{field}`; set data.sources[].field to one of the members: {', '.join(suffixes)}"
            raise DataError(f"{where}: {message}")
        yield Document(f"{file.name}:{key}", text)


def _samples(span: Span, wanted: set[str]) -> Iterator[tuple[str, list[str], dict[str, bytes]]]:
    """Yields (key, suffixes of all members, content of the members with wanted suffixes) of each sample."""
    for key, group in groupby(_members(span, wanted), key=lambda member: member[0]):
        members = list(group)
        yield key, [suffix for _, suffix, _ in members], {s: data for _, s, data in members if data is not None}


def _members(span: Span, wanted: set[str]) -> Iterator[tuple[str, str, bytes | None]]:
    """Yields (key, suffix, content) of each file of a tar except hidden ones; content is None if not wanted."""
    path, last = span.file.path, "the first member"
    with ExitStack() as stack:
        try:
            stream = stack.enter_context(open_file(span.file))
            options = {"mode": "r|", "bufsize": tarfile.BLOCKSIZE, "tarinfo": _StrictTarInfo}
            tar: Any = stack.enter_context(tarfile.open(fileobj=stream, **options))
            while (member := tar.next()) is not None:
                tar.members.clear()  # otherwise it keeps them all
                last = member.name
                folder, slash, file_name = member.name.removeprefix("./").rpartition("/")
                stem, dot, suffix = file_name.partition(".")
                if not (member.isfile() and stem and dot):
                    continue
                if suffix in wanted and member.size > base.MAX_DOCUMENT:
                    limit = f"expected at most {base.MAX_DOCUMENT}"
                    raise DataError(f"{path}: {format_name(member.name)} has {member.size} bytes; {limit}")
                content = tar.extractfile(member) if suffix in wanted else None
                yield f"{folder}{slash}{stem}", suffix, content.read() if content is not None else None
            while data := stream.read(CHUNK):
                if data.strip(b"\0"):
                    raise DataError(f"{path}: has data after its end mark; concatenated tars are not supported")
        except DataError:
            raise
        except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error) as error:
            raise truncated_error(f"{path}: at {last}", error) from error


WEBDATASET = Format(("*.tar", "*.tar.gz", "*.tgz", "*.tar.zst"), one_span, _read_tar)
