"""Documents from files: text and code, JSONL, Parquet, Arrow, WebDataset, ArrayRecord, Python's standard library.

A source is listed once (`list_files`: sorted, deterministic), cut into shards of about equal size (`plan_shards`) and
read shard by shard (`read_shard`), so processes can share the work and the result does not depend on their number. The
name of a document (path below the source's folder; `path:line` in JSONL; `path:row` in Parquet, Arrow and ArrayRecord;
`path:key` in tars) is the same on every machine and alone determines its split.
"""

from collections.abc import Iterator

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import SPLITS, Document, File, Progress, Span, split_of
from jaxtrain.data.sources.formats import plan_shards, read_shard
from jaxtrain.data.sources.listing import list_files

__all__ = [
    "SPLITS", "Document", "File", "Progress", "Span",
    "documents", "list_files", "plan_shards", "read_shard", "split_of",
]  # fmt: skip


def documents(source: SourceConfig) -> Iterator[Document]:
    """Yields the documents of a source in order. Raises DataError."""
    for shard in plan_shards(list_files(source), 64 << 20):
        yield from read_shard(shard, source.field)
