r"""Megatron-LM `.bin` and `.idx` files, read in place: they hold tokens already, so no token cache is built.

`NAME.bin` holds token ids only. `NAME.idx`, all little-endian: the 9 bytes `MMIDIDX\0\0`, version 1 (uint64), a code
of the dtype (uint8), the number S of sequences and the number D of entries of the document index (uint64 each), tokens
of each sequence (int32[S]), its first byte in the .bin (int64[S]), and the first sequence of each document (int64[D],
which ends with S). Documents are those of the index; they end with an eos only if written with one (`--append-eod`).
Source: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.

The tokens are counted and checked against the vocabulary once. The counts and the choice of validation documents are
stored in a folder beside the token caches, in one file for each pair.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.sources import SPLITS, File, Progress, split_of
from jaxtrain.data.sources.formats import paired_name
from jaxtrain.data.token_cache.store import entropy
from jaxtrain.data.token_files import TokenizedDocuments, TokenSource, read_file
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import open_atomic

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
COUNT_CHUNK = 1 << 22  # tokens counted at a time


class MegatronIndex(NamedTuple):
    """Content of an .idx file, of documents that are not empty.

    Attributes:
      starts: int64[N], index of the first token in the .bin.
      lengths: int64[N], tokens.
      numbers: int64[N], position in the document index.
      dtype: dtype of the tokens.
    """

    starts: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    dtype: np.dtype


def pair_files(files: list[File]) -> list[tuple[File, File]]:
    """Returns the (bin, idx) pairs of a source. Raises DataError if a file is not in a pair."""
    by_name = {f.name: f for f in files}
    for file in files:
        other = paired_name(file.name)
        if other is None or other not in by_name:
            problem = f"no {Path(other).name} beside it" if other else "neither a .bin nor an .idx"
            raise DataError(f"{file.path}: {problem}; Megatron data are a .bin and its .idx")
    return [(f, by_name[f"{f.name.removesuffix('.bin')}.idx"]) for f in files if f.name.endswith(".bin")]


def read_index(path: str, size: int) -> MegatronIndex:
    """Reads an .idx whose .bin has `size` bytes.

    Raises:
      DataError: not such a file, truncated, or it points outside of the .bin.
    """
    data = read_file(Path(path))
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise DataError(f"{path}: not an index of Megatron-LM, which begins with MMIDIDX")
    _, version, code, sequences, entries = HEADER.unpack_from(data)
    if version != 1 or code not in DTYPES:
        name = f"version {version}" if version != 1 else f"dtype code {code}"
        raise DataError(f"{path}: {name} is not supported; expected version 1 with integer tokens")
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + sequences * 12 + entries * 8
    if len(data) not in (expected, expected + sequences):  # the latter has a mode of each sequence
        raise DataError(f"{path}: has {len(data)} bytes instead of {expected}; is it complete?")
    sizes = np.frombuffer(data, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER.size + sequences * 4)
    bounds = np.frombuffer(data, "<i8", entries, HEADER.size + sequences * 12)
    if not entries or bounds[0] != 0 or bounds[-1] != sequences or (bounds[1:] < bounds[:-1]).any():
        raise DataError(f"{path}: its document index does not go from 0 to its {sequences} sequences")
    is_outside = (sizes < 0) | (pointers < 0) | (pointers > size - sizes * dtype.itemsize)  # a sum could overflow
    if is_outside.any() or (pointers % dtype.itemsize).any():
        raise DataError(f"{path}: its sequences are outside of the .bin, which has {size} bytes; are both complete?")
    return _join_sequences(path, sizes, pointers, bounds, dtype)


def _join_sequences(
    path: str, sizes: np.ndarray, pointers: np.ndarray, bounds: np.ndarray, dtype: np.dtype
) -> MegatronIndex:
    """Joins sequences int64[S] into documents; those of a document must be contiguous."""
    first, last = bounds[:-1], bounds[1:]
    inner = np.ones(max(len(sizes) - 1, 0), bool)
    inner[first[(first > 0) & (first < len(sizes))] - 1] = False  # sequences that begin a document
    gaps = np.flatnonzero(inner & (pointers[1:] != pointers[:-1] + sizes[:-1] * dtype.itemsize))
    if gaps.size:
        raise DataError(f"{path}: sequence {gaps[0] + 1} does not follow the previous one of the same document")
    totals = np.concatenate(([0], np.cumsum(sizes)))
    lengths = totals[last] - totals[first]
    numbers = np.flatnonzero(lengths)
    return MegatronIndex(pointers[first[numbers]] // dtype.itemsize, lengths[numbers], numbers, dtype)


def open_megatron(
    folder: Path,
    key: str,
    files: list[File],
    tokenizer: Tokenizer,
    validation: float,
    progress: Progress | None = None,
    check: bool = False,
) -> TokenSource:
    """Opens .bin/.idx pairs as the documents of a token cache.

    Args:
      folder: for counts and splits; created if missing.
      key: hash of everything that they depend on.
      files: files of the source.
      tokenizer: tokenizer of the tokens.
      validation: share of documents in the validation split.
      progress: called with (bytes done, bytes in all) while tokens are counted.
      check: count again even if counts are stored.

    Raises:
      DataError: a bad .idx, or a token id outside of the vocabulary.
    """
    pairs = pair_files(files)
    total, done = sum(data.size for data, _ in pairs), 0
    folder.mkdir(parents=True, exist_ok=True)
    indices, masks, counts = [], [], np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    for number, (data, idx) in enumerate(pairs):
        index = read_index(idx.path, data.size)
        path = folder / f"{number:05d}.npz"
        stored = None if check else _load_counts(path, len(index.starts), tokenizer.vocab)
        if stored is None:
            names = (f"{data.name}:{n}" for n in index.numbers.tolist())
            mask = np.array([split_of(n, validation) == "validation" for n in names], bool)
            stored = mask, _count(data, index, mask, tokenizer, lambda n, d=done: progress and progress(d + n, total))
            with open_atomic(path) as file:
                np.savez(file, held=np.packbits(mask), counts=stored[1])
        indices.append(index)
        masks.append(stored[0])
        counts += stored[1]
        done += data.size
    if len({index.dtype for index in indices}) > 1:
        raise DataError(f"{files[0].path}: files of several dtypes; give each dtype a source of its own")
    return MegatronTokens(folder, key, tokenizer, [data for data, _ in pairs], indices, masks, counts)


class MegatronTokens(TokenSource):
    """The documents of .bin files.

    Args:
      folder, key, tokenizer: as in `open_megatron`.
      files: the .bin files.
      indices: index of each file.
      masks: bool[N] for each file: its validation documents.
      counts: uint64[2, vocab], how often each id occurs in train and validation.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        tokenizer: Tokenizer,
        files: list[File],
        indices: list[MegatronIndex],
        masks: list[np.ndarray],
        counts: np.ndarray,
    ) -> None:
        self.folder, self.key, self.tokenizer = folder, key, tokenizer.fingerprint
        self.vocab, self.eos, self._counts = tokenizer.vocab, tokenizer.eos, counts
        self.bytes = sum(f.size for f in files)
        dtype = indices[0].dtype
        paths, sizes = [Path(f.path) for f in files], [f.size // dtype.itemsize for f in files]

        def documents(name: str) -> TokenizedDocuments:
            chosen = [mask == (name == "validation") for mask in masks]
            starts = np.concatenate([index.starts[mask] for index, mask in zip(indices, chosen)])
            lengths = np.concatenate([index.lengths[mask] for index, mask in zip(indices, chosen)])
            number = [int(mask.sum()) for mask in chosen]
            return TokenizedDocuments(name, paths, sizes, dtype, lengths, starts, number, entropy(self.counts(name)))

        self.train, self.validation = documents("train"), documents("validation")

    def counts(self, split: str) -> np.ndarray:
        return self._counts[SPLITS.index(split)]


def _count(
    data: File, index: MegatronIndex, mask: np.ndarray, tokenizer: Tokenizer, report: Callable[[int], object]
) -> np.ndarray:
    """Counts how often each id occurs in the documents of train and of validation (`mask`), uint64[2, vocab]."""
    counts = np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    ends = np.cumsum(index.lengths)
    tokens = np.memmap(data.path, index.dtype, "r") if data.size else np.zeros(0, index.dtype)
    first = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, (ends[first - 1] if first else 0) + COUNT_CHUNK, side="right"))
        last = max(last, first + 1)
        for split in range(len(SPLITS)):
            chosen = first + np.flatnonzero(mask[first:last] == bool(split))
            parts = [tokens[s : s + n] for s, n in zip(index.starts[chosen].tolist(), index.lengths[chosen].tolist())]
            if parts:
                counts[split] += _histogram(data, np.concatenate(parts), tokenizer)
        report(int(ends[last - 1]) * index.dtype.itemsize)
        first = last
    report(data.size)
    return counts


def _histogram(data: File, tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    for token in (int(tokens.max()), int(tokens.min())):
        if not 0 <= token < tokenizer.vocab:
            vocabulary = f"the vocabulary of {tokenizer.vocab} of data.tokenizer ({tokenizer.name})"
            message = f"token id {token} is outside of {vocabulary}; name the tokenizer that it was written with"
            raise DataError(f"{data.path}: {message}")
    return np.bincount(tokens, minlength=tokenizer.vocab).astype(np.uint64)


def _load_counts(path: Path, documents: int, vocab: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the stored (validation documents bool[N], counts uint64[2, V]); None if missing or unusable."""
    try:
        with np.load(path) as stored:
            mask = np.unpackbits(stored["held"], count=documents).astype(bool)
            counts = stored["counts"]
    except (OSError, ValueError, KeyError, EOFError):
        return None
    return (mask, counts) if counts.shape == (len(SPLITS), vocab) else None
