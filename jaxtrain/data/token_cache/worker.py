"""A process that tokenizes shards: `python -m jaxtrain.data.token_cache.worker`.

`build` drives it over its standard streams. It is started as a program of its own rather than by multiprocessing: no
fork of a process that runs JAX, and no second import of the user's main script. One JSON object per line comes in
(first the job, then shards), one per shard goes out. When the driver dies its standard input ends, and so does it.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.data.sources import SPLITS, Document, File, Span, read_shard, split_of
from jaxtrain.data.token_cache.content_hash import state
from jaxtrain.data.token_cache.store import ShardWriter
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

BATCH_CHARACTERS = 1 << 20  # text encoded in one call
BATCH_DOCUMENTS = 4096


@dataclass(frozen=True)
class Job:
    """Settings that all shards of a cache share."""

    folder: str
    key: str
    tokenizer: str
    fingerprint: str
    field: str
    validation: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Shard:
    """One shard to write. `states`: `content.state` of each file when its content was hashed."""

    index: int
    spans: tuple[Span, ...]
    states: dict[str, list[int]]

    @property
    def size(self) -> int:
        return sum(s.size for s in self.spans)

    def to_json(self) -> str:
        return json.dumps([self.index, self.spans, self.states])

    @classmethod
    def from_json(cls, text: str) -> Shard:
        index, spans, states = json.loads(text)
        return cls(index, tuple(Span(File(*file), *rest) for file, *rest in spans), states)


def write_shard(job: Job, shard: Shard, tokenizer: Tokenizer) -> None:
    """Tokenize a shard into the cache folder, atomically.

    Raises:
      DataError: bad input, or a file changed since its content was hashed.
    """
    writer = ShardWriter(Path(job.folder), shard.index, tokenizer.vocab, tokenizer.eos)
    batch: list[Document] = []
    characters = 0
    for document in read_shard(shard.spans, job.field):
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            _encode(job, batch, tokenizer, writer)
            batch, characters = [], 0
    _encode(job, batch, tokenizer, writer)
    for path, before in shard.states.items():
        if state(path) != before:
            raise DataError(f"{path}: changed while it was read; run again")
    writer.close(job.key)


def _encode(job: Job, batch: list[Document], tokenizer: Tokenizer, writer: ShardWriter) -> None:
    if not batch:
        return
    splits = [split_of(d.name, job.validation) for d in batch]
    encoded = tokenizer.encode_batch([d.text for d in batch])
    for split in SPLITS:
        mine = [i for i, s in enumerate(splits) if s == split]
        writer.add(split, [encoded[i] for i in mine], sum(len(batch[i].text.encode()) for i in mine))


def main() -> None:
    """Serve one driver until its stream ends."""
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not mix with the answers
    job = Job(**json.loads(sys.stdin.readline()))
    try:
        tokenizer = load_tokenizer(job.tokenizer)
        if tokenizer.fingerprint != job.fingerprint:
            raise DataError(f"{job.tokenizer}: changed while the cache was built; run again")
    except DataError as error:
        _answer(out, {"error": str(error)})
        return
    for line in sys.stdin:
        shard = Shard.from_json(line)
        try:
            write_shard(job, shard, tokenizer)
        except DataError as error:
            _answer(out, {"error": str(error)})
        except OSError as error:
            _answer(out, {"error": f"{job.folder}: shard {shard.index:05d} cannot be written ({error})"})
        else:
            _answer(out, {"done": shard.index})


def _answer(out: Any, message: dict[str, Any]) -> None:
    try:
        print(json.dumps(message), file=out, flush=True)
    except BrokenPipeError:
        os._exit(1)  # the driver is gone; the next one takes up what is missing


if __name__ == "__main__":
    main()
