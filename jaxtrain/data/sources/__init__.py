"""Documents from files: text and code, JSONL, Parquet, Arrow, WebDataset, ArrayRecord, Python's own library.

A source is listed once (`list_files`: sorted, deterministic), cut into shards of about equal size (`plan_shards`) and
read shard by shard (`read_shard`), so that processes can share the work and the result never depends on how many
there are. A document's name (path below the source's folder; `path:line` in JSONL; `path:row` in Parquet, Arrow and
ArrayRecord; `path:key` in tars) is the same on every machine, and alone decides whether the document is kept for
validation.
"""

from collections.abc import Iterator

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources.base import SPLITS, Document, File, Span, split_of
from jaxtrain.data.sources.formats import plan_shards, read_shard
from jaxtrain.data.sources.listing import list_files

__all__ = ["SPLITS", "Document", "File", "Span", "documents", "list_files", "plan_shards", "read_shard", "split_of"]


def documents(source: SourceConfig) -> Iterator[Document]:
    """Yields the documents of a source in order; raises as `list_files` and `read_shard`."""
    for shard in plan_shards(list_files(source), 64 << 20):
        yield from read_shard(shard, source.field)
