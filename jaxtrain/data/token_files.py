"""Tokenized documents in memory-mapped files, and their errors."""

from __future__ import annotations

import errno
import hashlib
import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import xxhash

from jaxtrain.errors import DataError

MAX_OPEN_MAPS = 400  # files mapped at a time by this process, if its limit on open files allows
PAGE = mmap.PAGESIZE
Mapped = tuple[mmap.mmap, np.ndarray]


def open_file_limit() -> int | None:
    """Returns the number of files that this process may have open; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def max_open_maps() -> int:
    """Returns how many files to map at a time: each holds a descriptor, and maps may use a quarter of these."""
    limit = open_file_limit()
    return MAX_OPEN_MAPS if limit is None else max(min(MAX_OPEN_MAPS, limit // 4), 1)


class MappedFiles:
    """Maps files on first use, and unmaps the least recently used ones. Thread-safe.

    The limit `max_open_maps()` is shared by all objects of this class, because open files are limited per process.
    Deleting an object unmaps its files.

    Args:
      paths: the files, none of them empty.
      dtype: dtype of their content.
    """

    _lock: ClassVar = threading.Lock()
    _used: ClassVar[OrderedDict[tuple[weakref.ref[MappedFiles], int], None]] = OrderedDict()  # least recent first

    def __init__(self, paths: Sequence[Path], dtype: np.dtype) -> None:
        self._paths, self._dtype = paths, dtype
        self._maps: dict[int, Mapped] = {}
        self._ref: weakref.ref[MappedFiles] = weakref.ref(self)

    def get(self, index: int) -> Mapped:
        """Returns (map, content [n]) of a file. Raises DataError if it is damaged or cannot be opened."""
        key = (self._ref, index)
        with self._lock:
            if index not in self._maps:
                self._unmap(max_open_maps() - 1)
                self._maps[index] = self._map(self._paths[index])
            self._used[key] = None
            self._used.move_to_end(key)
            return self._maps[index]

    @classmethod
    def _unmap(cls, keep: int) -> None:
        """Drops all but `keep` maps; one that is still in use stays open until it is not."""
        while len(cls._used) > keep:
            (ref, index), _ = cls._used.popitem(last=False)
            files = ref()
            if files is not None:
                del files._maps[index]

    def _map(self, path: Path) -> Mapped:
        try:
            try:
                mapped = _open_map(path)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._unmap(0)  # other files use up the limit
                mapped = _open_map(path)
        except OSError as error:
            raise read_error(path, error) from error
        except ValueError as error:  # an empty file
            raise damage_error(path, f"cannot be mapped ({error})") from error
        return mapped, np.frombuffer(mapped, self._dtype)


def _open_map(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class TokenizedDocuments:
    """Documents of one split, read in place.

    Args:
      name: `train` or `validation`.
      paths: the files.
      sizes: tokens in each file, including those of other splits.
      dtype: dtype of the tokens.
      lengths: integers [N], tokens of each document, including its eos if it has one; file by file.
      starts: int64[N], index of each document's first token in its file.
      counts: documents in each file.
      entropy: of the token frequencies, nats per token.

    Attributes:
      documents, tokens: number of documents and of tokens.
      text_bytes: bytes of the documents' text in UTF-8; None if unknown.
    """

    text_bytes: int | None = None

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        sizes: Sequence[int],
        dtype: np.dtype,
        lengths: np.ndarray,
        starts: np.ndarray,
        counts: Sequence[int],
        entropy: float,
    ) -> None:
        self.name, self.dtype, self.lengths, self.entropy = name, dtype, lengths, entropy
        self.documents, self.tokens = len(lengths), int(lengths.sum(dtype=np.int64))
        self._sizes, self._starts = sizes, starts
        self._first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        self._files = MappedFiles(paths, dtype)

    def file(self, index: int) -> tuple[mmap.mmap | None, np.ndarray]:
        """Returns (map, tokens) of a file. Hold few of these at a time: each keeps a file open."""
        return self._files.get(index) if self._sizes[index] else (None, np.zeros(0, self.dtype))

    def locate(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (file int64[P], index of the first token in it int64[P]) of documents int64[P]."""
        return np.searchsorted(self._first, documents, side="right") - 1, self._starts[documents]

    def document(self, index: int) -> np.ndarray:
        """Returns the tokens of one document, a view of the file."""
        file, start = (int(x[0]) for x in self.locate(np.array([index])))
        return self.file(file)[1][start : start + int(self.lengths[index])]

    def read_ahead(self, file: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        """Asks the kernel to load runs of tokens (int64[P] each) into the page cache, without waiting for them.

        A cold disk then serves many reads in parallel instead of one page fault after another. Does nothing on systems
        without `madvise`. (For a mapped file it equals `posix_fadvise`, and needs no file descriptor.)
        """
        advice = getattr(mmap, "MADV_WILLNEED", None)
        if advice is None:
            return
        begin = start * self.dtype.itemsize // PAGE * PAGE
        count = (start + length) * self.dtype.itemsize - begin
        order = np.argsort(file, kind="stable")  # maps each file once
        for f, b, n in zip(file[order].tolist(), begin[order].tolist(), count[order].tolist()):
            mapped = self.file(f)[0]
            if mapped is not None:
                mapped.madvise(advice, b, n)


class TokenSource(ABC):
    """The tokens of a source: a token cache, or files that hold tokens already.

    Attributes:
      folder: folder in the cache directory.
      key: hash of everything that the tokens and the splits depend on.
      tokenizer: fingerprint of the tokenizer.
      vocab, eos: of the tokenizer.
      train, validation: the splits.
      bytes: of all tokens.
    """

    folder: Path
    key: str
    tokenizer: str
    vocab: int
    eos: int
    train: TokenizedDocuments
    validation: TokenizedDocuments
    bytes: int

    def split(self, name: str) -> TokenizedDocuments:
        """Returns the split `train` or `validation`."""
        return {"train": self.train, "validation": self.validation}[name]

    @abstractmethod
    def counts(self, split: str) -> np.ndarray:
        """Returns how often each id occurs in a split, uint64[vocab]. Raises DataError if a file is damaged."""


def hash_file(path: Path) -> str:
    """Returns the xxh3-64 of a file, hex. Raises DataError if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
    except OSError as error:
        raise read_error(path, error) from error


def read_file(path: Path) -> bytes:
    """Returns the content of a file. Raises DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise read_error(path, error) from error


def damage_error(path: Path, reason: str) -> DataError:
    """Returns the error for a file whose content is not what was written."""
    return DataError(f"{path}: damaged token cache: {reason}; `jaxtrain data build` repairs it")


def read_error(path: Path, error: OSError) -> DataError:
    """Returns the error for a file that cannot be opened: damage, unless a resource or a permission is missing."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = open_file_limit()
        allowed = f" (this process may have {limit})" if error.errno == errno.EMFILE and limit else ""
        return DataError(f"{path}: cannot be opened: too many open files{allowed}; raise the limit with `ulimit -n`")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ENOMEM):
        return DataError(f"{path}: cannot be read ({error.strerror})")
    return damage_error(path, str(error.strerror))
