"""The token cache: a folder of memory-mapped shards.

    cache.json              written last; a folder without it is not complete. Version, tokenizer, counts, hashes
    SPLIT-00007.bin         tokens of shard 7, little-endian `dtype`; each document ends with the eos id
    SPLIT-00007.len         tokens of each of its documents, little-endian uint32
    00007.count             uint64[2, vocab]: how often each id occurs in train, validation
    00007.json              marker of shard 7, written when its files are on disk: counts, bytes of text and hashes
    total.count             sum of all *.count

Nothing in it depends on time, machine or process: equal input gives equal bytes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxtrain.data.sources import SPLITS
from jaxtrain.data.token_cache.mapped_files import damaged, hash_tokens, read, size
from jaxtrain.data.token_runs import TokenizedDocuments, TokenSource
from jaxtrain.data.tokenizer import Tokenizer, smallest_dtype
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import open_atomic, write_atomic

VERSION = 2
TOTAL = "total.count"
CHECKED = 256 << 20  # bytes up to which `open_cache` reads a whole cache to check it: well under a second
LENGTH = np.dtype("<u4")


def shard_file(folder: Path, split: str, index: int, kind: str) -> Path:
    """Path of a shard's `bin` or `len` file."""
    return folder / f"{split}-{index:05d}.{kind}"


class ShardWriter:
    """Writes one shard: `add` documents, then `close`. The marker is written last, so a killed shard leaves none."""

    def __init__(self, folder: Path, index: int, vocab: int, eos: int) -> None:
        self.folder, self.index, self.vocab = folder, index, vocab
        self.dtype = smallest_dtype(vocab)
        self.end = np.array([eos], self.dtype)
        self.counts = np.zeros((len(SPLITS), vocab), np.uint64)
        self.lengths: dict[str, list[int]] = {s: [] for s in SPLITS}
        self.text_bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.hashers = {s: xxhash.xxh3_64() for s in SPLITS}
        self.open_files = ExitStack()
        self.files = {
            split: self.open_files.enter_context(open_atomic(shard_file(folder, split, index, "bin")))
            for split in SPLITS
        }

    def add(self, split: str, documents: list[np.ndarray], text_bytes: int) -> None:
        """Append documents (token ids without eos), of so many bytes of UTF-8 together, to a split.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        if not documents:
            return
        tokens = np.concatenate([part for d in documents for part in (d, self.end)]).astype(self.dtype, copy=False)
        if int(tokens.max()) >= self.vocab:
            raise ValueError(f"token id {int(tokens.max())} outside the vocabulary of {self.vocab}")
        self.counts[SPLITS.index(split)] += np.bincount(tokens, minlength=self.vocab).astype(np.uint64)
        data = tokens.astype(self.dtype.newbyteorder("<"), copy=False).data.cast("B")
        self.hashers[split].update(data)
        self.files[split].write(data)
        self.lengths[split] += [len(d) + 1 for d in documents]
        self.text_bytes[split] += text_bytes

    def close(self, key: str) -> None:
        """Put the shard's files in place, then its marker, which carries the cache's `key`."""
        marker: dict[str, Any] = {"key": key}
        self.open_files.close()
        for split in SPLITS:
            lengths = np.array(self.lengths[split], LENGTH)
            write_atomic(shard_file(self.folder, split, self.index, "len"), lengths.tobytes())
            marker[split] = {
                "documents": len(lengths),
                "tokens": int(lengths.sum(dtype=np.int64)),
                "text_bytes": self.text_bytes[split],
                "bin": self.hashers[split].hexdigest(),
                "len": xxhash.xxh3_64_hexdigest(lengths.tobytes()),
            }
        counts = self.counts.astype("<u8").tobytes()
        marker["count"] = xxhash.xxh3_64_hexdigest(counts)
        write_atomic(self.folder / f"{self.index:05d}.count", counts)
        write_atomic(self.folder / f"{self.index:05d}.json", _json(marker))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def read_marker(folder: Path, index: int, key: str) -> dict[str, Any] | None:
    """Marker of a shard if it was finished for this `key`, else None."""
    path = folder / f"{index:05d}.json"
    try:
        marker = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return marker if isinstance(marker, dict) and marker.get("key") == key else None


def finish(folder: Path, key: str, shards: int, tokenizer: Tokenizer) -> None:
    """Write `cache.json` from the markers of all shards: the cache is complete after this."""
    markers = [read_marker(folder, i, key) for i in range(shards)]
    missing = [i for i, m in enumerate(markers) if m is None]
    if missing:
        raise DataError(f"{folder}: shard {missing[0]:05d} is not finished; run the build again")
    counts = np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    for i in range(shards):
        counts += np.fromfile(folder / f"{i:05d}.count", "<u8").reshape(counts.shape)
    splits = {}
    for row, split in zip(counts, SPLITS):
        parts = [m[split] for m in markers if m]
        splits[split] = {
            "documents": sum(p["documents"] for p in parts),
            "tokens": sum(p["tokens"] for p in parts),
            "text_bytes": sum(p["text_bytes"] for p in parts),
            "entropy": entropy(row),
            "shards": parts,
        }
    total = counts.astype("<u8").tobytes()
    write_atomic(folder / TOTAL, total)
    head = {"version": VERSION, "key": key, "tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab}
    tail = {"eos": tokenizer.eos, "count": xxhash.xxh3_64_hexdigest(total), "splits": splits}
    write_atomic(folder / "cache.json", _json({**head, **tail}))


def entropy(counts: np.ndarray) -> float:
    """Entropy, nats per token, of the distribution proportional to `counts` (non-negative numbers [V])."""
    p = counts[counts > 0].astype(np.float64)
    if not p.size:
        return 0.0
    p /= p.sum()
    return float(max(-(p * np.log(p)).sum(), 0.0))


class CachedSplit(TokenizedDocuments):
    """Documents of one split of a cache. Raises DataError where its files are not what was written."""

    def __init__(self, folder: Path, name: str, meta: dict[str, Any], dtype: np.dtype) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype.newbyteorder("<")
        self.text_bytes = meta.get("text_bytes")
        self._shards = meta["shards"]
        counts, sizes = ([s[k] for s in self._shards] for k in ("documents", "tokens"))
        lengths = np.concatenate([np.zeros(0, LENGTH), *map(self._read_lengths, range(len(counts)))])
        base = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths - np.repeat(base, counts)
        paths = [shard_file(folder, name, i, "bin") for i in range(len(counts))]
        super().__init__(name, paths, sizes, self.dtype, lengths, starts, counts, meta["entropy"])

    def _read_lengths(self, index: int) -> np.ndarray:
        path = shard_file(self.folder, self.name, index, "len")
        meta = self._shards[index]
        data = read(path)
        if len(data) != meta["documents"] * LENGTH.itemsize or xxhash.xxh3_64_hexdigest(data) != meta["len"]:
            raise damaged(path, "differs from what was written")
        found = size(shard_file(self.folder, self.name, index, "bin"))
        if found != meta["tokens"] * self.dtype.itemsize:
            expected = meta["tokens"] * self.dtype.itemsize
            raise damaged(shard_file(self.folder, self.name, index, "bin"), f"has {found} bytes instead of {expected}")
        return np.frombuffer(data, LENGTH)

    def verify(self) -> None:
        """Read every token and compare hashes. Raises DataError naming the first damaged file."""
        for index, meta in enumerate(self._shards):
            path = shard_file(self.folder, self.name, index, "bin")
            if hash_tokens(path) != meta["bin"]:
                raise damaged(path, "differs from what was written")


class TokenCache(TokenSource):
    """A complete cache."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.key, self.tokenizer, self.vocab, self.eos = (meta[k] for k in ("key", "tokenizer", "vocab", "eos"))
        self._count = meta["count"]
        dtype = smallest_dtype(self.vocab)
        self._splits = [CachedSplit(folder, s, meta["splits"][s], dtype) for s in SPLITS]
        self.train, self.validation = self._splits
        self.bytes = (self.train.tokens + self.validation.tokens) * dtype.itemsize

    def counts(self, split: str) -> np.ndarray:
        """Counts how often each id occurs in a split, uint64[vocab]. Raises DataError where the file is damaged."""
        path = self.folder / TOTAL
        data = read(path)
        if xxhash.xxh3_64_hexdigest(data) != self._count:
            raise damaged(path, "differs from what was written")
        return np.frombuffer(data, "<u8").reshape(len(SPLITS), self.vocab)[SPLITS.index(split)]

    def verify(self) -> None:
        """Read all of it and compare hashes. Raises DataError naming the first damaged file."""
        for split in self._splits:
            split.verify()


def unigram_entropy(cache: TokenSource, split: str = "train") -> float:
    """Entropy of the token frequencies of a split, nats per token; counted when the cache was built."""
    return cache.split(split).entropy


def open_cache(folder: str | Path) -> TokenCache:
    """Open a complete cache; tokens stay on disk and are read in place.

    Sizes and document lengths are always checked, the tokens themselves where that takes well under a second
    (`CHECKED` bytes); of larger caches `TokenCache.verify` checks them.

    Raises:
      DataError: no complete cache there, another version, or a damaged file, by name.
    """
    folder = Path(folder)
    path = folder / "cache.json"
    try:
        meta = json.loads(read(path))
        version = meta["version"]
        if version != VERSION:
            raise DataError(f"{path}: version {version} instead of {VERSION}; delete the folder to rebuild it")
        cache = TokenCache(folder, meta)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, "is not a cache description") from error
    if cache.bytes <= CHECKED:
        cache.verify()
    return cache
