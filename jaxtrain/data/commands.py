"""What `jaxtrain data build` and `jaxtrain data tokenizer` do, without the screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.schema import Data, Source
from jaxtrain.data.builder import Progress, build_cache
from jaxtrain.data.errors import DataError
from jaxtrain.data.sources import list_files, plan_shards, read_shard, split_of
from jaxtrain.data.tokenizer import train_bpe

READ_BYTES = 64 << 20  # input read between two reports of progress


@dataclass(frozen=True)
class BuildResult:
    """One token cache. `documents`, `tokens`: by split, eos counted; `bytes` of tokens; `entropy` of train, nats."""

    source: str
    path: Path
    documents: dict[str, int]
    tokens: dict[str, int]
    bytes: int
    entropy: float
    seconds: float


@dataclass(frozen=True)
class TokenizerResult:
    """A trained tokenizer. `documents` and `bytes` (UTF-8) it was trained on."""

    path: Path
    vocab: int
    documents: int
    bytes: int
    seconds: float


def build(data: Data, progress: Progress | None = None) -> list[BuildResult]:
    """Build or check the cache of each source; damaged shards are written anew. Raises DataError."""
    if data.type != "text":
        raise DataError(f"data.type: `{data.type}` is a class of its own and has no token cache to build")
    results = []
    for source in data.sources:
        begin = time.perf_counter()
        cache = build_cache(source, data.tokenizer, data.validation, data.cache, data.workers, progress, check=True)
        splits = {"train": cache.train, "validation": cache.validation}
        results.append(
            BuildResult(
                source.path,
                cache.folder,
                {name: s.documents for name, s in splits.items()},
                {name: s.tokens for name, s in splits.items()},
                cache.bytes,
                cache.train.entropy,
                time.perf_counter() - begin,
            )
        )
    return results


def train_tokenizer(
    source: Source, vocab: int, out: str | Path, progress: Progress | None = None, validation: float = 0.01
) -> TokenizerResult:
    """Train a byte-level BPE on the documents of a source that are not kept for validation.

    Args:
      source: what to read.
      vocab: vocabulary size, the 256 bytes and the end token included.
      out: path of the tokenizer.json, or a folder for it.
      progress: called with (bytes read, bytes in all); the merges are found after the last call.
      validation: `data.validation`.

    Raises:
      DataError: bad input, no documents, vocabulary too small.
    """
    begin = time.perf_counter()
    seen = {"documents": 0, "bytes": 0}

    def texts() -> Iterator[str]:
        shards = plan_shards(list_files(source), READ_BYTES)
        total, done = sum(s.size for shard in shards for s in shard), 0
        for shard in shards:
            for document in read_shard(shard, source.field):
                if split_of(document.name, validation) == "train":
                    seen["documents"] += 1
                    seen["bytes"] += len(document.text.encode())
                    yield document.text
            done += sum(s.size for s in shard)
            if progress:
                progress(done, total)

    path = train_bpe(texts(), vocab, out)
    if not seen["documents"]:
        raise DataError(f"{source.path}: no documents to train a tokenizer on")
    return TokenizerResult(path, vocab, seen["documents"], seen["bytes"], time.perf_counter() - begin)
