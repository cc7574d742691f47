"""Files of a token cache: a folder of memory-mapped shards.

    cache.json              version, tokenizer, counts, hashes; written last, so a folder without it is incomplete
    SPLIT-00007.bin         tokens of shard 7, little-endian `dtype`; each document ends with the eos id
    SPLIT-00007.len         tokens of each of its documents, little-endian uint32
    00007.count             uint64[2, vocab]: how often each id occurs in train and validation
    00007.json              marker of shard 7, written after its other files: counts, bytes of text, hashes
    total.count             sum of all *.count

No file depends on time, machine or process: equal input gives equal bytes.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from jaxtrain.data.sources import SPLITS
from jaxtrain.data.token_files import TokenizedDocuments, TokenSource, damage_error, hash_file, read_error, read_file
from jaxtrain.data.tokenizer import Tokenizer, smallest_dtype
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import open_atomic, write_atomic

VERSION = 2
TOTAL_COUNTS = "total.count"
MAX_VERIFIED_BYTES = 256 << 20  # a cache of up to so many bytes is verified when it is opened: well under a second
LENGTH_DTYPE = np.dtype("<u4")


def shard_path(folder: Path, split: str, number: int, kind: str) -> Path:
    """Returns the path of the `bin` or `len` file of a shard."""
    return folder / f"{split}-{number:05d}.{kind}"


class ShardWriter:
    """Writes one shard: `add` documents, then `close`. The marker is written last, so a killed shard has none.

    Args:
      folder: of the cache.
      number: of the shard.
      vocab, eos: of the tokenizer.
    """

    def __init__(self, folder: Path, number: int, vocab: int, eos: int) -> None:
        self.folder, self.number, self.vocab = folder, number, vocab
        self.dtype = smallest_dtype(vocab)
        self.eos = np.array([eos], self.dtype)
        self.counts = np.zeros((len(SPLITS), vocab), np.uint64)
        self.lengths: dict[str, list[int]] = {s: [] for s in SPLITS}
        self.text_bytes: dict[str, int] = dict.fromkeys(SPLITS, 0)
        self.hashers = {s: xxhash.xxh3_64() for s in SPLITS}
        self.open_files = ExitStack()
        paths = {s: shard_path(folder, s, number, "bin") for s in SPLITS}
        self.files = {s: self.open_files.enter_context(open_atomic(path)) for s, path in paths.items()}

    def add(self, split: str, documents: list[np.ndarray], text_bytes: int) -> None:
        """Appends documents to a split.

        Args:
          split: `train` or `validation`.
          documents: token ids of each document, without eos.
          text_bytes: bytes of their text in UTF-8, in all.

        Raises:
          ValueError: an id outside the vocabulary.
        """
        if not documents:
            return
        tokens = np.concatenate([part for d in documents for part in (d, self.eos)]).astype(self.dtype, copy=False)
        if int(tokens.max()) >= self.vocab:
            raise ValueError(f"token id {int(tokens.max())} is outside the vocabulary of {self.vocab}")
        self.counts[SPLITS.index(split)] += np.bincount(tokens, minlength=self.vocab).astype(np.uint64)
        data = tokens.astype(self.dtype.newbyteorder("<"), copy=False).data.cast("B")
        self.hashers[split].update(data)
        self.files[split].write(data)
        self.lengths[split] += [len(d) + 1 for d in documents]
        self.text_bytes[split] += text_bytes

    def close(self, key: str) -> None:
        """Writes the files of the shard, then its marker with the `key` of the cache."""
        marker: dict[str, Any] = {"key": key}
        self.open_files.close()
        for split in SPLITS:
            lengths = np.array(self.lengths[split], LENGTH_DTYPE)
            write_atomic(shard_path(self.folder, split, self.number, "len"), lengths.tobytes())
            marker[split] = {
                "documents": len(lengths),
                "tokens": int(lengths.sum(dtype=np.int64)),
                "text_bytes": self.text_bytes[split],
                "bin": self.hashers[split].hexdigest(),
                "len": xxhash.xxh3_64_hexdigest(lengths.tobytes()),
            }
        counts = self.counts.astype("<u8").tobytes()
        marker["count"] = xxhash.xxh3_64_hexdigest(counts)
        write_atomic(self.folder / f"{self.number:05d}.count", counts)
        write_atomic(self.folder / f"{self.number:05d}.json", _json(marker))


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def read_marker(folder: Path, number: int, key: str) -> dict[str, Any] | None:
    """Returns the marker of a shard that is finished for this `key`, else None."""
    try:
        marker = json.loads((folder / f"{number:05d}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return marker if isinstance(marker, dict) and marker.get("key") == key else None


def finish_cache(folder: Path, key: str, shards: int, tokenizer: Tokenizer) -> None:
    """Writes `cache.json` from the markers of all shards, which completes the cache.

    Raises:
      DataError: a shard is not finished.
    """
    counts = np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    markers = []
    for number in range(shards):
        marker = read_marker(folder, number, key)
        if marker is None:
            raise DataError(f"{folder}: shard {number:05d} is not finished; run the build again")
        markers.append(marker)
        counts += np.fromfile(folder / f"{number:05d}.count", "<u8").reshape(counts.shape)
    splits = {}
    for row, split in zip(counts, SPLITS):
        parts = [marker[split] for marker in markers]
        sums = {name: sum(part[name] for part in parts) for name in ("documents", "tokens", "text_bytes")}
        splits[split] = {**sums, "entropy": entropy(row), "shards": parts}
    total = counts.astype("<u8").tobytes()
    write_atomic(folder / TOTAL_COUNTS, total)
    content = {
        "version": VERSION, "key": key, "tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab,
        "eos": tokenizer.eos, "count": xxhash.xxh3_64_hexdigest(total), "splits": splits,
    }  # fmt: skip
    write_atomic(folder / "cache.json", _json(content))


def entropy(counts: np.ndarray) -> float:
    """Returns the entropy, nats per token, of the distribution proportional to `counts` (non-negative numbers [V])."""
    p = counts[counts > 0].astype(np.float64)
    if not p.size:
        return 0.0
    p /= p.sum()
    return float(max(-(p * np.log(p)).sum(), 0.0))


class CachedSplit(TokenizedDocuments):
    """Documents of one split of a cache. Raises DataError if a file is missing, damaged or of the wrong size."""

    def __init__(self, folder: Path, name: str, meta: dict[str, Any], dtype: np.dtype) -> None:
        self.folder, self.name, self.dtype = folder, name, dtype.newbyteorder("<")
        self.text_bytes = meta.get("text_bytes")
        self._shards = meta["shards"]
        counts, sizes = ([shard[k] for shard in self._shards] for k in ("documents", "tokens"))
        lengths = np.concatenate([np.zeros(0, LENGTH_DTYPE), *map(self._read_lengths, range(len(counts)))])
        base = np.cumsum(sizes, dtype=np.int64) - np.array(sizes, np.int64)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths - np.repeat(base, counts)
        paths = [shard_path(folder, name, i, "bin") for i in range(len(counts))]
        super().__init__(name, paths, sizes, self.dtype, lengths, starts, counts, meta["entropy"])

    def _read_lengths(self, number: int) -> np.ndarray:
        """Reads the document lengths of a shard, and checks the size of its tokens."""
        path, tokens = (shard_path(self.folder, self.name, number, kind) for kind in ("len", "bin"))
        meta = self._shards[number]
        try:
            data, size = path.read_bytes(), tokens.stat().st_size
        except OSError as error:
            raise read_error(Path(error.filename), error) from error
        if len(data) != meta["documents"] * LENGTH_DTYPE.itemsize or xxhash.xxh3_64_hexdigest(data) != meta["len"]:
            raise damage_error(path, "differs from what was written")
        expected = meta["tokens"] * self.dtype.itemsize
        if size != expected:
            raise damage_error(tokens, f"has {size} bytes instead of {expected}")
        return np.frombuffer(data, LENGTH_DTYPE)

    def verify(self) -> None:
        """Reads all tokens and compares their hashes. Raises DataError with the first damaged file."""
        for number, meta in enumerate(self._shards):
            path = shard_path(self.folder, self.name, number, "bin")
            if hash_file(path) != meta["bin"]:
                raise damage_error(path, "differs from what was written")


class TokenCache(TokenSource):
    """A complete token cache."""

    def __init__(self, folder: Path, meta: dict[str, Any]) -> None:
        self.folder, self.meta = folder, meta
        self.key, self.tokenizer, self.vocab, self.eos = (meta[k] for k in ("key", "tokenizer", "vocab", "eos"))
        self._counts_hash = meta["count"]
        dtype = smallest_dtype(self.vocab)
        self.train, self.validation = self._splits = [CachedSplit(folder, s, meta["splits"][s], dtype) for s in SPLITS]
        self.bytes = (self.train.tokens + self.validation.tokens) * dtype.itemsize

    def counts(self, split: str) -> np.ndarray:
        path = self.folder / TOTAL_COUNTS
        data = read_file(path)
        if xxhash.xxh3_64_hexdigest(data) != self._counts_hash:
            raise damage_error(path, "differs from what was written")
        return np.frombuffer(data, "<u8").reshape(len(SPLITS), self.vocab)[SPLITS.index(split)]

    def verify(self) -> None:
        """Reads all tokens and compares their hashes. Raises DataError with the first damaged file."""
        for split in self._splits:
            split.verify()


def open_cache(folder: str | Path) -> TokenCache:
    """Opens a complete cache; its tokens are memory-mapped.

    Sizes and document lengths are always checked, tokens only in caches of up to `MAX_VERIFIED_BYTES`.
    `TokenCache.verify` checks larger ones.

    Raises:
      DataError: no complete cache, another version, or a damaged file.
    """
    path = Path(folder) / "cache.json"
    try:
        meta = json.loads(read_file(path))
        version = meta["version"]
        if version != VERSION:
            raise DataError(f"{path}: version {version} instead of {VERSION}; delete the folder to rebuild it")
        cache = TokenCache(Path(folder), meta)
    except DataError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise damage_error(path, "is not a cache description") from error
    if cache.bytes <= MAX_VERIFIED_BYTES:
        cache.verify()
    return cache
