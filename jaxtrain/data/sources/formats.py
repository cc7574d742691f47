"""Registry of file formats, by the name in `data.sources[].format`, and the cutting and reading of their files."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Iterator
from typing import Any

from jaxtrain.data.sources.arrayrecord import ARRAYRECORD
from jaxtrain.data.sources.arrow import ARROW, PARQUET
from jaxtrain.data.sources.base import Document, File, Format, Span
from jaxtrain.data.sources.text import JSONL, TEXT
from jaxtrain.data.sources.webdataset import WEBDATASET
from jaxtrain.errors import DataError


def _refuse_tokens(part: File | Span, _: object) -> Any:
    """Raises DataError: `data.megatron` opens the files of Megatron-LM."""
    file = part if isinstance(part, File) else part.file
    raise DataError(f"{file.path}: holds tokens already, and no text to read")


FORMATS: dict[str, Format] = {
    "text": TEXT,
    "jsonl": JSONL,
    "parquet": PARQUET,
    "arrow": ARROW,
    "webdataset": WEBDATASET,
    "arrayrecord": ARRAYRECORD,
    "megatron": Format(("*.bin", "*.idx"), _refuse_tokens, _refuse_tokens),
}


def paired_name(name: str) -> str | None:
    """Returns the other file of a Megatron-LM pair, `x.idx` of `x.bin` and the reverse; None for other names."""
    stem, _, suffix = name.rpartition(".")
    return {"bin": f"{stem}.idx", "idx": f"{stem}.bin"}.get(suffix)


def has_format(name: str, kind: str, names: Container[str]) -> bool:
    """Returns whether a file has a format by its name, case ignored; `names` are all files of the folder."""
    if kind == "megatron" and ((other := paired_name(name)) is None or other not in names):
        return False
    base = name.rpartition("/")[2].lower()
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in FORMATS[kind].patterns)


def format_of(name: str, names: Container[str]) -> str:
    """Returns the format of a file by its name; `text` if no pattern matches."""
    return next((kind for kind in FORMATS if has_format(name, kind, names)), "text")


def _format(file: File) -> Format:
    return FORMATS["text" if file.format == "stdlib" else file.format]


def plan_shards(files: list[File], target: int) -> list[list[Span]]:
    """Cuts a source into shards of about `target` bytes: a pure function of the files' names, sizes and contents.

    Small files share a shard. Large uncompressed JSONL is cut at line ends, Parquet at row groups and Arrow at record
    batches; text files and compressed files are never cut.
    """
    shards: list[list[Span]] = []
    room = 0
    for file in files:
        for span in _format(file).spans(file, target):
            if room <= 0:
                shards.append([])
                room = target
            shards[-1].append(span)
            room -= max(span.size, 1)
    return shards


def read_shard(spans: Iterable[Span], field: str) -> Iterator[Document]:
    """Yields the documents of a shard in order, without empty ones; `field` is `data.sources[].field`.

    Raises:
      DataError: not UTF-8, a broken line, a missing column; names file and line.
    """
    for span in spans:
        yield from (document for document in _format(span.file).read(span, field) if document.text)
