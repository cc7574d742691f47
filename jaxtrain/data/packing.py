"""Packing of documents into rows of fixed length with random access to every row.

In each epoch the documents are permuted (`order.permute`) and cut into blocks of K documents. A row holds S tokens but
gets only Q = S (1 - 1/SLACK) of them on average, so that an epoch of T tokens has ceil(T / Q) rows for every
permutation: the epoch of a row is a division. Block b has the rows from ceil(start_b / Q) to ceil(start_{b+1} / Q),
where start_b is the number of tokens before it. The first tokens of its first document belong to the last row of the
previous block; in return it takes tokens of the next block up to the end of its last row.

Within a block the documents are packed by best-fit-decreasing (Johnson 1973) into exactly its rows. A document that
fits into no row is split over the largest holes. The slack of 0.024% lets holes of a few tokens stay empty that would
otherwise be filled with tiny pieces of documents (0.02% more pieces than documents need, instead of 3 to 6%). One
cumulative sum per epoch (8 bytes per block) finds the block of a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxtrain.data.order import permute

BLOCK_DOCUMENTS = 4096  # documents packed together; larger blocks split hardly fewer documents
BLOCK_TOKENS = 1 << 23  # limits blocks of long documents, so that a random row takes only milliseconds
SLACK = 4096  # one token in so many may stay empty
INDEX_CHUNK = 1 << 18  # documents whose lengths are summed at a time to index an epoch


class Pieces(NamedTuple):
    """Runs of tokens, sorted by row, that fill each row from its left end. All fields are int64[P].

    Attributes:
      row: position of the row in the request.
      document: index in the split.
      offset: position of the first token in its document.
      length: number of tokens.
      source: index of the source; 0 unless a dataset has several.
    """

    row: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    source: np.ndarray


class _PackedBlock(NamedTuple):
    """Rows of one block: `pieces[bounds[r] : bounds[r + 1]]` are those of row r."""

    pieces: Pieces
    bounds: np.ndarray


def concat_pieces(parts: Sequence[Pieces]) -> Pieces:
    """Concatenates pieces and sorts them by row; pieces of one row keep their order."""
    if len(parts) == 1:
        return parts[0]
    columns = [np.concatenate(column) for column in zip(np.zeros((5, 0), np.int64), *parts)]
    order = np.argsort(columns[0], kind="stable")
    return Pieces(*(column[order] for column in columns))


def groups(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (value, its positions int64[m]) for the distinct values of int64[n], in ascending order."""
    if values.size and (values == values[0]).all():  # the usual case, and much cheaper
        yield int(values[0]), np.arange(values.size)
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)


def best_fit(lengths: np.ndarray, rows: int, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items of lengths in (0, sequence] into `rows` rows of `sequence` tokens, best-fit-decreasing.

    Items of equal length are placed in the given order, and equal holes are filled from the lowest row: the result is
    a pure function of the arguments.

    Returns:
      (row int64[n] of each item, -1 if it fits into no row; free tokens int64[rows] of each row).
    """
    row_of = np.full(len(lengths), -1, np.int64)
    order = np.argsort(-lengths, kind="stable")
    placed = [-1] * len(lengths)
    holes = [sequence * rows + r for r in range(rows)]  # free * rows + row, ascending: the best fit is one bisection
    for i, length in enumerate(lengths[order].tolist()):
        position = bisect_left(holes, length * rows)
        if position == len(holes):
            continue
        hole = holes.pop(position)
        placed[i] = hole % rows
        left = hole - length * rows
        if left >= rows:
            insort(holes, left)
    row_of[order] = placed
    free = np.zeros(rows, np.int64)
    keys = np.array(holes, np.int64)
    free[keys % rows] = keys // rows
    return row_of, free


def _spill(length: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Splits items over holes, one after the other; needs sum(length) <= sum(free).

    Returns:
      (item, start in the item, hole, size) of each part, int64 arrays.
    """
    ends, holes = np.cumsum(length), np.cumsum(free)
    cuts = np.union1d(ends, holes)
    cuts = cuts[(cuts > 0) & (cuts <= ends[-1])]
    starts = np.concatenate(([0], cuts[:-1]))
    item = np.searchsorted(ends, starts, side="right")
    hole = np.searchsorted(holes, starts, side="right")
    return item, starts - (ends[item] - length[item]), hole, cuts - starts


def pack(document: np.ndarray, offset: np.ndarray, length: np.ndarray, rows: int, sequence: int) -> _PackedBlock:
    """Packs pieces of documents (int64[n] each) into `rows` rows; needs sum(length) <= rows * sequence."""
    full, rest = length // sequence, length % sequence
    item = np.repeat(np.arange(len(length)), full)  # rows that one long document fills alone
    nth = np.arange(len(item)) - np.repeat(np.cumsum(full) - full, full)
    parts = [(np.arange(len(item)), document[item], offset[item] + nth * sequence, np.full(len(item), sequence))]
    tail = np.flatnonzero(rest)
    tail_offset = offset[tail] + full[tail] * sequence
    row, free = best_fit(rest[tail], rows - len(item), sequence)
    fits = row >= 0
    parts.append((row[fits] + len(item), document[tail[fits]], tail_offset[fits], rest[tail[fits]]))
    if not fits.all():
        over, hole_rows = np.flatnonzero(~fits), np.argsort(-free, kind="stable")
        over = over[np.argsort(-rest[tail[over]], kind="stable")]
        part, start, hole, size = _spill(rest[tail[over]], free[hole_rows])
        origin = over[part]
        parts.append((hole_rows[hole] + len(item), document[tail[origin]], tail_offset[origin] + start, size))
    pieces = (Pieces(*part, np.zeros(len(part[0]), np.int64)) for part in parts)
    return _index_rows(concat_pieces([*pieces]), rows)


def _index_rows(pieces: Pieces, rows: int) -> _PackedBlock:
    return _PackedBlock(pieces, np.searchsorted(pieces.row, np.arange(rows + 1)))


def _select_rows(block: _PackedBlock, rows: np.ndarray, positions: np.ndarray) -> Pieces:
    """Returns the pieces of rows int64[R] of a block, with `positions` int64[R] as their new row numbers."""
    count = block.bounds[rows + 1] - block.bounds[rows]
    ends = np.cumsum(count)
    index = np.arange(ends[-1]) + np.repeat(block.bounds[rows] - (ends - count), count)
    return Pieces(np.repeat(positions, count), *(column[index] for column in block.pieces[1:]))


class Packer:
    """Random access to an endless sequence of rows of packed documents; row r belongs to epoch r // rows.

    Every token is in exactly one row of an epoch. Methods are pure functions and thread-safe; the last few blocks are
    cached.

    Args:
      lengths: tokens of each document, integers [N], all positive, N >= 1.
      sequence: tokens per row.
      seed: selects the permutations.
      block: documents per block; by default chosen by the mean length.

    Attributes:
      rows: rows per epoch.
      documents, tokens: per epoch.
    """

    def __init__(self, lengths: np.ndarray, sequence: int, seed: int, block: int | None = None) -> None:
        self.lengths, self.sequence, self.seed = lengths, sequence, seed
        self.documents = len(lengths)
        self.tokens = int(lengths.sum(dtype=np.int64))
        self.rows = int(self._first_row(np.array([self.tokens]))[0])
        mean = max(self.tokens // self.documents, 1)
        self.block = block or min(max(BLOCK_TOKENS // mean, 64), BLOCK_DOCUMENTS)
        self._index = lru_cache(maxsize=2)(self._count_tokens)
        self._pack = lru_cache(maxsize=4)(self._pack_block)

    def _first_row(self, start: np.ndarray) -> np.ndarray:
        """Returns the first row that begins at or after token `start` int64[n] of an epoch."""
        return -(-start * SLACK // (self.sequence * (SLACK - 1)))

    def _first_token(self, row: int) -> int:
        """Returns the position in the epoch of the first token of a row."""
        return min(row * self.sequence * (SLACK - 1) // SLACK, self.tokens)

    def pieces(self, rows: np.ndarray) -> Pieces:
        """Returns the pieces of rows int64[R], in the order of the rows."""
        epochs, row = np.divmod(np.asarray(rows, np.int64), self.rows)
        parts: list[Pieces] = []
        for epoch, in_epoch in groups(epochs):
            first = self._first_row(self._index(epoch))  # of each block; the last entry is the rows of the epoch
            blocks = np.searchsorted(first, row[in_epoch], side="right") - 1
            for block, in_block in groups(blocks):
                positions = in_epoch[in_block]
                parts.append(_select_rows(self._pack(epoch, block), row[positions] - first[block], positions))
        return concat_pieces(parts)

    def _count_tokens(self, epoch: int) -> np.ndarray:
        """Counts the tokens before each block of an epoch, and in all: int64[blocks + 1]."""
        sums = []
        chunk = max(INDEX_CHUNK // self.block, 1) * self.block
        for low in range(0, self.documents, chunk):
            high = min(low + chunk, self.documents)
            lengths = self.lengths[permute(np.arange(low, high), self.documents, self.seed, epoch)]
            sums.append(np.add.reduceat(lengths, np.arange(0, high - low, self.block), dtype=np.int64))
        return np.concatenate(([0], np.cumsum(np.concatenate(sums))))

    def _pack_block(self, epoch: int, block: int) -> _PackedBlock:
        start = self._index(epoch)
        first_row, last_row = (int(r) for r in self._first_row(start[block : block + 2]))
        low, high = self._first_token(first_row), self._first_token(last_row)
        # The documents of this block, and as many of the next as reach the end of the last row.
        first, last = block * self.block, min((block + 1) * self.block, self.documents)
        document = permute(np.arange(first, last), self.documents, self.seed, epoch)
        end = int(start[block + 1])
        while end < high:
            more = permute(np.arange(last, min(last + 64, self.documents)), self.documents, self.seed, epoch)
            document = np.concatenate((document, more))
            last += len(more)
            end += int(self.lengths[more].sum(dtype=np.int64))
        ends = int(start[block]) + np.cumsum(self.lengths[document], dtype=np.int64)
        begins = ends - self.lengths[document]
        offset = np.maximum(low - begins, 0)
        length = np.minimum(ends, high) - begins - offset
        used = length > 0
        packed = pack(document[used], offset[used], length[used], last_row - first_row, self.sequence)
        return _shuffle(packed, self.seed, epoch, block)


def _shuffle(packed: _PackedBlock, seed: int, epoch: int, block: int) -> _PackedBlock:
    """Permutes the rows of a block: best-fit-decreasing puts long documents first and short ones last."""
    rows = len(packed.bounds) - 1
    if rows < 2:
        return packed
    key = np.random.SeedSequence([seed, epoch, block]).generate_state(rows, np.uint64)
    return _index_rows(_select_rows(packed, np.argsort(key, kind="stable"), np.arange(rows)), rows)
