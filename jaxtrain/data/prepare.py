"""Preparation of token caches and tokenizers, for `jaxtrain data`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from jaxtrain.config.schema import DataConfig, DocumentsConfig, SourceConfig
from jaxtrain.data.dataset import validation_set_config
from jaxtrain.data.sources import SPLITS, Progress, Span, list_files, plan_shards, read_shard, split_of
from jaxtrain.data.token_cache.build import build_cache
from jaxtrain.data.tokenizer import train_bpe
from jaxtrain.errors import DataError

SHARD_BYTES = 64 << 20  # input read between two reports of progress


@dataclass(frozen=True)
class BuildResult:
    """A token cache that was built or checked."""

    source: str
    path: Path
    documents: dict[str, int]  # by split
    tokens: dict[str, int]  # by split, eos included
    bytes: int  # of all tokens
    entropy: float  # of the training tokens, nats per token
    seconds: float


@dataclass(frozen=True)
class TokenizerResult:
    """A trained tokenizer, and the documents that it was trained on."""

    path: Path
    vocab: int
    documents: int
    bytes: int  # of text in UTF-8
    seconds: float


def text_sources(data: DataConfig) -> tuple[SourceConfig, ...]:
    """Returns `data.sources`. Raises DataError if `data.type` is a user's class, which has none."""
    if not data.is_text:
        message = "is a user's class, without documents to tokenize; only `text` has token caches and a tokenizer"
        raise DataError(f"data.type: `{data.type}` {message}")
    return data.sources


def build_caches(
    data: DataConfig, progress: Progress | None = None, sets: Iterable[DocumentsConfig] = ()
) -> list[BuildResult]:
    """Builds or checks the cache of each source and validation set, and repairs damaged shards.

    Args:
      data: the `data` section.
      progress: called with (bytes done, bytes in all).
      sets: values of `eval.sets`.

    Raises:
      DataError: as `build_cache`.
    """
    results = []
    configs = [data.model_copy(update={"sources": (source,)}) for source in text_sources(data)]
    for config in [*configs, *(validation_set_config(data, documents) for documents in sets)]:
        begin, source, fraction = time.perf_counter(), config.sources[0], config.validation_fraction
        cache = build_cache(source, data.tokenizer, fraction, data.cache_dir, data.workers, progress, check=True)
        documents, tokens = ({s: getattr(cache.split(s), name) for s in SPLITS} for name in ("documents", "tokens"))
        seconds = time.perf_counter() - begin
        results.append(
            BuildResult(source.path, cache.folder, documents, tokens, cache.bytes, cache.train.entropy, seconds)
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
    """Trains a byte-level BPE on the training documents of all sources.

    Each document counts once; the weights of the mixture have no effect.

    Args:
      sources: from `text_sources`. They are read in rotation, one document at a time.
      vocab: vocabulary size, including the 256 bytes and the eos token.
      out: path of the tokenizer.json, or a folder for it.
      progress: called with (bytes read, bytes in all); merges are computed after the last call.
      validation: `data.validation_fraction`.
      cache: folder for copies from object stores.

    Raises:
      DataError: bad input, no documents, vocabulary too small.
    """
    begin = time.perf_counter()
    plans = [plan_shards(list_files(source, cache), SHARD_BYTES) for source in sources]
    total = sum(span.size for plan in plans for shard in plan for span in shard)
    documents = size = read = 0

    def report(shard_bytes: int) -> None:
        nonlocal read
        read += shard_bytes
        if progress:
            progress(read, total)

    def texts() -> Iterator[str]:
        nonlocal documents, size
        readers = [_texts(source, plan, validation, report) for source, plan in zip(sources, plans)]
        for round_ in zip_longest(*readers):
            for text in round_:
                if text is not None:
                    documents, size = documents + 1, size + len(text.encode())
                    yield text
        if not documents:
            paths = ", ".join(source.path for source in sources)
            raise DataError(f"{paths}: no documents to train a tokenizer on")

    path = train_bpe(texts(), vocab, out)
    return TokenizerResult(path, vocab, documents, size, time.perf_counter() - begin)


def _texts(
    source: SourceConfig, plan: Sequence[Sequence[Span]], validation: float, report: Callable[[int], None]
) -> Iterator[str]:
    """Yields the training documents of a source; calls `report` with the bytes of each shard read."""
    for shard in plan:
        for document in read_shard(shard, source.field):
            if split_of(document.name, validation) == "train":
                yield document.text
        report(sum(span.size for span in shard))
