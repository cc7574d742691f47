"""Worker process that tokenizes shards: `python -m jaxtrain.data.token_cache.worker JOB`.

`build` starts it as a separate program instead of using multiprocessing: this forks no process that runs JAX and does
not import the user's main script again. Each line on stdin is a shard as JSON; each line on stdout is the answer: null,
or an error message. When the parent dies, stdin ends and so does the worker.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jaxtrain.data.sources import SPLITS, Document, File, Span, read_shard, split_of
from jaxtrain.data.token_cache.content_hash import file_state
from jaxtrain.data.token_cache.store import ShardWriter
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

BATCH_CHARACTERS = 1 << 20  # text encoded in one call
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class CacheJob:
    """Settings of a cache that all its shards share; `fingerprint` is that of the tokenizer."""

    folder: str
    key: str
    tokenizer: str
    fingerprint: str
    field: str
    validation: float


class CacheShard(NamedTuple):
    """One shard to write. `states`: path -> `file_state` of each file when its content was hashed."""

    number: int
    spans: tuple[Span, ...]
    states: dict[str, list[int]]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(span.size for span in self.spans)

    @classmethod
    def from_json(cls, text: str) -> CacheShard:
        """Reads what `json.dumps` writes of a shard."""
        number, spans, states = json.loads(text)
        return cls(number, tuple(Span(File(*file), *rest) for file, *rest in spans), states)


def write_shard(job: CacheJob, shard: CacheShard, tokenizer: Tokenizer) -> None:
    """Tokenizes a shard into the cache folder, atomically.

    Raises:
      DataError: bad input, or a file has changed since its content was hashed.
    """
    writer = ShardWriter(Path(job.folder), shard.number, tokenizer.vocab, tokenizer.eos)
    batch: list[Document] = []
    characters = 0
    for document in read_shard(shard.spans, job.field):
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            _write_batch(job, batch, tokenizer, writer)
            batch, characters = [], 0
    _write_batch(job, batch, tokenizer, writer)
    for path, state in shard.states.items():
        if file_state(path) != state:
            raise DataError(f"{path}: changed while it was read; run again")
    writer.close(job.key)


def _write_batch(job: CacheJob, batch: list[Document], tokenizer: Tokenizer, writer: ShardWriter) -> None:
    if not batch:
        return
    encoded = tokenizer.encode_batch([d.text for d in batch])
    splits = [split_of(d.name, job.validation) for d in batch]
    for split in SPLITS:
        members = [i for i, s in enumerate(splits) if s == split]
        writer.add(split, [encoded[i] for i in members], sum(len(batch[i].text.encode()) for i in members))


def main() -> None:
    """Tokenizes the shards on stdin."""
    out, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with the answers
    job = CacheJob(**json.loads(sys.argv[1]))
    tokenizer = None
    for line in sys.stdin:
        shard, error = CacheShard.from_json(line), None
        try:
            tokenizer = tokenizer or load_tokenizer(job.tokenizer)
            if tokenizer.fingerprint != job.fingerprint:
                raise DataError(f"{job.tokenizer}: changed while the cache was built; run again")
            write_shard(job, shard, tokenizer)
        except DataError as failure:
            error = str(failure)
        except OSError as failure:
            error = f"{job.folder}: shard {shard.number:05d} cannot be written ({failure})"
        try:
            print(json.dumps(error), file=out, flush=True)
        except BrokenPipeError:
            os._exit(1)  # the parent is gone; the next build writes the missing shards


if __name__ == "__main__":
    main()
