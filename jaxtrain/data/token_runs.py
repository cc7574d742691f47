"""Documents as runs of tokens in memory-mapped files: what packing and batches need of a token cache."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxtrain.data.token_cache.mapped_files import Maps

PAGE = mmap.PAGESIZE


class TokenizedDocuments:
    """Documents of one split, read in place.

    Args:
      name: `train` or `validation`.
      paths: of the files. sizes: tokens in each, whether they are of this split or not.
      dtype: of the tokens in all of them.
      lengths: integers [N], tokens of each document, with its eos where it has one; file by file.
      starts: int64[N], index of each document's first token in its file.
      counts: documents in each file.
      entropy: of the tokens' frequencies, nats per token.

    Attributes: `name`, `dtype`, `lengths`, `entropy`; `documents`, `tokens`: how many; `text_bytes`: of the documents'
      text in UTF-8, None where it is not known.
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
        self._maps = Maps(paths, dtype)

    def shard(self, index: int) -> tuple[mmap.mmap | None, np.ndarray]:
        """(map, tokens) of a file. Hold on to few at a time: each keeps a file open."""
        if not self._sizes[index]:
            return None, np.zeros(0, self.dtype)
        return self._maps.get(index)

    def locate(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(file int64[P], index of the first token in it int64[P]) of documents int64[P]."""
        return np.searchsorted(self._first, documents, side="right") - 1, self._starts[documents]

    def document(self, index: int) -> np.ndarray:
        """Tokens of one document with its eos, a view of the file."""
        shard, start = (int(x[0]) for x in self.locate(np.array([index])))
        return self.shard(shard)[1][start : start + int(self.lengths[index])]

    def advise(self, shard: np.ndarray, start: np.ndarray, length: np.ndarray) -> None:
        """Ask the kernel to read runs of tokens (int64[P] each) now, many at once, without waiting for them.

        On a cold cache reads then go to the disk in parallel rather than one page fault after another. Does nothing
        where the system has no such advice. (`madvise` on a file's map is `posix_fadvise` by another name, and needs
        no open file of its own.)
        """
        advice = getattr(mmap, "MADV_WILLNEED", None)
        if advice is None:
            return
        begin = start * self.dtype.itemsize // PAGE * PAGE
        count = (start + length) * self.dtype.itemsize - begin
        order = np.argsort(shard, kind="stable")  # a file is then mapped once, however many there are
        for s, b, n in zip(shard[order].tolist(), begin[order].tolist(), count[order].tolist()):
            mapped = self.shard(s)[0]
            if mapped is not None:
                mapped.madvise(advice, b, n)


class TokenSource(ABC):
    """The tokens of a source: a cache that was built, or files that hold tokens already.

    Attributes:
      folder: what belongs to it beside the caches. key: changes with all that the tokens and the splits depend on.
      tokenizer: fingerprint. vocab, eos: of the tokenizer. train, validation: the splits. bytes: of tokens, in all.
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
        """`train` or `validation`."""
        return {"train": self.train, "validation": self.validation}[name]

    @abstractmethod
    def counts(self, split: str) -> np.ndarray:
        """Counts how often each id occurs in a split, uint64[vocab]. Raises DataError where a file is damaged."""
