"""The formats there are, by the name that `data.sources[].format` gives them; cutting and reading their files."""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Iterable, Iterator
from typing import Any

from jaxtrain.data.sources.base import Document, File, Format, Span
from jaxtrain.data.sources.columns import ARROW, PARQUET
from jaxtrain.data.sources.records import ARRAYRECORD
from jaxtrain.data.sources.text import JSONL, TEXT
from jaxtrain.data.sources.webdataset import WEBDATASET
from jaxtrain.errors import DataError


def _tokens_already(part: File | Span, _: object) -> Any:
    """Files of Megatron-LM are opened in place (`data.megatron`), and never read for text."""
    file = part if isinstance(part, File) else part.file
    raise DataError(f"{file.path}: holds tokens already, and no text to read")


FORMATS: dict[str, Format] = {
    "text": TEXT,
    "jsonl": JSONL,
    "parquet": PARQUET,
    "arrow": ARROW,
    "webdataset": WEBDATASET,
    "arrayrecord": ARRAYRECORD,
    "megatron": Format(("*.bin", "*.idx"), *2 * (_tokens_already,)),
}


def partner(name: str) -> str | None:
    """The other file of a Megatron-LM pair, `x.idx` of `x.bin` and back; None for other names."""
    stem, _, suffix = name.rpartition(".")
    return {"bin": f"{stem}.idx", "idx": f"{stem}.bin"}.get(suffix)


def fits(name: str, kind: str, names: Container[str]) -> bool:
    """Returns whether a file is one of a format by its name, capitals or not; `names`: of all files there."""
    other = partner(name)
    if kind == "megatron" and (other is None or other not in names):
        return False
    base = name.rpartition("/")[2].lower()
    return any(fnmatch.fnmatchcase(base, p) for p in FORMATS[kind].patterns)


def format_of(name: str, names: Container[str]) -> str:
    """The format of a file by its name; what fits no pattern is text."""
    return next((kind for kind in FORMATS if fits(name, kind, names)), "text")


def _format(file: File) -> Format:
    return FORMATS["text" if file.format == "stdlib" else file.format]


def plan_shards(files: list[File], target: int) -> list[list[Span]]:
    """Cut a source into shards of about `target` bytes: a pure function of the files' names, sizes and contents.

    Small files share a shard. Large plain JSONL is cut at line ends, Parquet at row groups and Arrow at record
    batches; text files and what is compressed as a whole are never cut.
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
    """Documents of a shard, in order; empty ones are left out. `field` is what holds the text (see `Source`).

    Raises:
      DataError: not UTF-8, a broken line, a missing column; names file and line.
    """
    for span in spans:
        yield from (d for d in _format(span.file).read(span, field) if d.text)
