"""Preparation of token caches and tokenizers, for `jaxtrain data`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config.schema import DataConfig, DocumentsConfig, SourceConfig
from jaxtrain.data.dataset import validation_set_config
from jaxtrain.data.sources import Span, list_files, plan_shards, read_shard, split_of
from jaxtrain.data.token_cache.build import Progress, build_cache
from jaxtrain.data.tokenizer import train_bpe
from jaxtrain.errors import DataError

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


def text_sources(data: DataConfig) -> tuple[SourceConfig, ...]:
    """`data.sources`. Raises DataError where `data.type` is a user's own class, which has none."""
    if data.type != "text":
        message = "is a class of its own, without documents to tokenize; only `text` has token caches and a tokenizer"
        raise DataError(f"data.type: `{data.type}` {message}")
    return data.sources


def build_caches(
    data: DataConfig, progress: Progress | None = None, sets: Iterable[DocumentsConfig] = ()
) -> list[BuildResult]:
    """Build or check the cache of each source and validation set; damaged shards are written anew. Raises DataError."""
    results = []
    wanted = [(source, data.validation_fraction) for source in text_sources(data)]
    wanted += [
        (whole.sources[0], whole.validation_fraction) for whole in (validation_set_config(data, one) for one in sets)
    ]
    for source, validation in wanted:
        begin = time.perf_counter()
        cache = build_cache(source, data.tokenizer, validation, data.cache_dir, data.workers, progress, check=True)
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
    sources: Sequence[SourceConfig],
    vocab: int,
    out: str | Path,
    progress: Progress | None = None,
    validation: float = 0.01,
    cache: str = "~/.cache/jaxtrain",
) -> TokenizerResult:
    """Train a byte-level BPE on the documents of all sources that are not kept for validation.

    Each document counts once, whatever the sources' weights in the mixture.

    Args:
      sources: what to read: `text_sources(data)`. One document of each is taken in turn.
      vocab: vocabulary size, the 256 bytes and the end token included.
      out: path of the tokenizer.json, or a folder for it.
      progress: called with (bytes read, bytes in all); the merges are found after the last call.
      validation: `data.validation_fraction`.
      cache: `data.cache_dir`, for copies from object stores.

    Raises:
      DataError: bad input, no documents, vocabulary too small.
    """
    begin = time.perf_counter()
    plans = [plan_shards(list_files(source, cache), READ_BYTES) for source in sources]
    total = sum(span.size for plan in plans for shard in plan for span in shard)
    seen = {"documents": 0, "bytes": 0, "read": 0}

    def report(size: int) -> None:
        seen["read"] += size
        if progress:
            progress(seen["read"], total)

    def texts() -> Iterator[str]:
        readers = [_texts(source, plan, validation, report) for source, plan in zip(sources, plans)]
        for text in _in_turn(readers):
            seen["documents"] += 1
            seen["bytes"] += len(text.encode())
            yield text
        if not seen["documents"]:
            paths = ", ".join(source.path for source in sources)
            raise DataError(f"{paths}: no documents to train a tokenizer on")

    path = train_bpe(texts(), vocab, out)
    return TokenizerResult(path, vocab, seen["documents"], seen["bytes"], time.perf_counter() - begin)


def _texts(
    source: SourceConfig, plan: Sequence[Sequence[Span]], validation: float, report: Callable[[int], None]
) -> Iterator[str]:
    """The documents of a source that are for training; `report` is called with the bytes of each shard read."""
    for shard in plan:
        for document in read_shard(shard, source.field):
            if split_of(document.name, validation) == "train":
                yield document.text
        report(sum(span.size for span in shard))


def _in_turn(readers: Sequence[Iterator[str]]) -> Iterator[str]:
    """One item of each in turn; those that have ended are left out."""
    waiting = deque(readers)
    while waiting:
        reader = waiting.popleft()
        for text in reader:
            yield text
            waiting.append(reader)
            break
