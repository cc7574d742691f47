"""Megatron-LM's `.bin` and `.idx` read in place: the tokens are there already, so that no token cache is built.

`NAME.bin` holds token ids and nothing else. `NAME.idx`, all little-endian: the 9 bytes `MMIDIDX\\0\\0`, version 1
(uint64), a code of the dtype (uint8), the number S of sequences and the number D of the entries of the document index
(uint64 each), tokens of each sequence (int32[S]), its first byte in the .bin (int64[S]), and the first sequence of
each document (int64[D], which ends with S). A document is what the index says; its end mark is there where it was
written with one (`--append-eod`). Source: `megatron/core/datasets/indexed_dataset.py` of Megatron-LM.

Once for all, the tokens are counted and checked against the vocabulary; counts and the documents kept for validation
stay in a folder beside the token caches, a file each.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxtrain.data.sources import SPLITS, File, split_of
from jaxtrain.data.token_cache.mapped_files import read
from jaxtrain.data.token_cache.store import entropy
from jaxtrain.data.token_runs import TokenizedDocuments, TokenSource
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import DataError
from jaxtrain.io.atomic import write_atomic

MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats
COUNTED = 1 << 22  # tokens counted at a time
Report = Callable[[int, int], None]


class Index(NamedTuple):
    """One .idx. `starts` int64[N], `lengths` int64[N]: first token and tokens of each document that is not empty;
    `numbers` int64[N]: their places in the document index. `dtype` of the tokens.
    """

    starts: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    dtype: np.dtype


def pairs(files: list[File]) -> list[tuple[File, File]]:
    """(bin, idx) of the files of a source. Raises DataError where one has no other."""
    by_name = {f.name: f for f in files}
    found = []
    for name, file in by_name.items():
        stem, _, suffix = name.rpartition(".")
        other = f"{stem}.{'idx' if suffix == 'bin' else 'bin'}"
        if suffix not in ("bin", "idx") or other not in by_name:
            raise DataError(f"{file.path}: no {Path(other).name} beside it; Megatron data are a .bin and its .idx")
        if suffix == "bin":
            found.append((file, by_name[other]))
    return found


def read_index(path: str, size: int) -> Index:
    """Read an .idx whose .bin has `size` bytes.

    Raises:
      DataError: not such a file, cut short, or it points outside of the .bin.
    """
    data = read(Path(path))
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise DataError(f"{path}: not an index of Megatron-LM, which begins with MMIDIDX")
    _, version, code, sequences, entries = HEADER.unpack_from(data)
    if version != 1 or code not in DTYPES:
        what = f"version {version}" if version != 1 else f"dtype code {code}"
        raise DataError(f"{path}: {what} is not read; only version 1 with whole numbers as tokens is")
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + sequences * 12 + entries * 8
    if len(data) not in (expected, expected + sequences):  # the latter: with a mode of each sequence, not needed
        raise DataError(f"{path}: has {len(data)} bytes instead of {expected}; is it complete?")
    sizes = np.frombuffer(data, "<i4", sequences, HEADER.size).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER.size + sequences * 4)
    bounds = np.frombuffer(data, "<i8", entries, HEADER.size + sequences * 12)
    if not entries or bounds[0] != 0 or bounds[-1] != sequences or (np.diff(bounds) < 0).any():
        raise DataError(f"{path}: its document index does not go from 0 to its {sequences} sequences")
    ends = pointers + sizes * dtype.itemsize
    if (sizes < 0).any() or (pointers < 0).any() or (pointers % dtype.itemsize).any() or ends.max(initial=0) > size:
        raise DataError(f"{path}: its sequences lie outside of the .bin, which has {size} bytes; are both complete?")
    return _documents(path, sizes, pointers, bounds, dtype)


def _documents(path: str, sizes: np.ndarray, pointers: np.ndarray, bounds: np.ndarray, dtype: np.dtype) -> Index:
    """Sequences int64[S] joined into documents, which must lie in one piece."""
    first, last = bounds[:-1], bounds[1:]
    inner = np.ones(max(len(sizes) - 1, 0), bool)
    inner[first[(first > 0) & (first < len(sizes))] - 1] = False  # sequences that begin a document
    apart = np.flatnonzero(inner & (pointers[1:] != pointers[:-1] + sizes[:-1] * dtype.itemsize))
    if apart.size:
        raise DataError(f"{path}: sequence {apart[0] + 1} does not follow the one before, of the same document")
    totals = np.concatenate(([0], np.cumsum(sizes)))
    lengths = totals[last] - totals[first]
    numbers = np.flatnonzero(lengths)
    return Index(pointers[first[numbers]] // dtype.itemsize, lengths[numbers], numbers, dtype)


def open_megatron(
    folder: Path,
    key: str,
    files: list[File],
    tokenizer: Tokenizer,
    validation: float,
    progress: Report | None = None,
    check: bool = False,
) -> TokenSource:
    """The documents of .bin/.idx pairs, as those of a token cache.

    Args:
      folder: for counts and splits, made if missing.
      key: hash of all that they depend on.
      files: of the source.
      tokenizer: what the tokens were made with.
      validation: share of documents in the validation split.
      progress: called with (bytes done, bytes in all) while tokens are counted.
      check: count again even where that was done.

    Raises:
      DataError: a bad .idx, or a token id outside of the vocabulary.
    """
    found = pairs(files)
    total, done = sum(data.size for data, _ in found), 0
    folder.mkdir(parents=True, exist_ok=True)
    indices, held, counts = [], [], np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    for number, (data, idx) in enumerate(found):
        index = read_index(idx.path, data.size)
        path = folder / f"{number:05d}.npz"
        known = None if check else _known(path, len(index.starts), tokenizer.vocab)
        if known is None:
            names = (f"{data.name}:{n}" for n in index.numbers.tolist())
            mine = np.array([split_of(n, validation) != SPLITS[0] for n in names], bool)
            known = mine, _count(data, index, mine, tokenizer, lambda n, d=done: progress and progress(d + n, total))
            _remember(path, *known)
        indices.append(index)
        held.append(known[0])
        counts += known[1]
        done += data.size
    if len({index.dtype for index in indices}) > 1:
        raise DataError(f"{files[0].path}: files of several dtypes; give each dtype a source of its own")
    return MegatronTokens(folder, key, tokenizer, [data for data, _ in found], indices, held, counts)


class MegatronTokens(TokenSource):
    """The documents of .bin files. `held[k]` bool[N]: which of file k are for validation; `counts` uint64[2, vocab]."""

    def __init__(
        self,
        folder: Path,
        key: str,
        tokenizer: Tokenizer,
        files: list[File],
        indices: list[Index],
        held: list[np.ndarray],
        counts: np.ndarray,
    ) -> None:
        self.folder, self.key, self.tokenizer = folder, key, tokenizer.fingerprint
        self.vocab, self.eos, self._counts = tokenizer.vocab, tokenizer.eos, counts
        self.bytes = sum(f.size for f in files)
        dtype = indices[0].dtype
        paths, sizes = [Path(f.path) for f in files], [f.size // dtype.itemsize for f in files]

        def runs(split: str) -> TokenizedDocuments:
            k = SPLITS.index(split)
            mine = [h == bool(k) for h in held]
            starts, lengths = (
                np.concatenate([getattr(index, part)[m] for index, m in zip(indices, mine)])
                for part in ("starts", "lengths")
            )
            documents = [int(m.sum()) for m in mine]
            return TokenizedDocuments(split, paths, sizes, dtype, lengths, starts, documents, entropy(counts[k]))

        self.train, self.validation = runs("train"), runs("validation")

    def counts(self, split: str) -> np.ndarray:
        return self._counts[SPLITS.index(split)]


def _count(
    data: File, index: Index, held: np.ndarray, tokenizer: Tokenizer, report: Callable[[int], object]
) -> np.ndarray:
    """Counts how often each id occurs in the documents of train and of validation, uint64[2, vocab]."""
    counts = np.zeros((len(SPLITS), tokenizer.vocab), np.uint64)
    ends = np.cumsum(index.lengths)
    tokens = np.memmap(data.path, index.dtype, "r") if data.size else np.zeros(0, index.dtype)
    first = 0
    while first < len(ends):
        last = int(np.searchsorted(ends, (ends[first - 1] if first else 0) + COUNTED, side="right"))
        last = max(last, first + 1)
        for split in range(len(SPLITS)):
            chosen = first + np.flatnonzero(held[first:last] == bool(split))
            parts = [tokens[s : s + n] for s, n in zip(index.starts[chosen].tolist(), index.lengths[chosen].tolist())]
            if parts:
                counts[split] += _histogram(data, np.concatenate(parts), tokenizer)
        report(int(ends[last - 1]) * index.dtype.itemsize)
        first = last
    report(data.size)
    return counts


def _histogram(data: File, tokens: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    for worst in (int(tokens.max()), int(tokens.min())):
        if not 0 <= worst < tokenizer.vocab:
            known = f"outside of the vocabulary of {tokenizer.vocab} of data.tokenizer ({tokenizer.name})"
            raise DataError(f"{data.path}: token id {worst} is {known}; name the tokenizer that it was written with")
    return np.bincount(tokens, minlength=tokenizer.vocab).astype(np.uint64)


def _known(path: Path, documents: int, vocab: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(held bool[N], counts uint64[2, V]) as an earlier opening left them."""
    try:
        with np.load(path) as saved:
            held = np.unpackbits(saved["held"], count=documents).astype(bool)
            counts = saved["counts"]
    except (OSError, ValueError, KeyError, EOFError):
        return None
    return (held, counts) if counts.shape == (len(SPLITS), vocab) else None


def _remember(path: Path, held: np.ndarray, counts: np.ndarray) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, held=np.packbits(held), counts=counts)
    write_atomic(path, buffer.getvalue())
