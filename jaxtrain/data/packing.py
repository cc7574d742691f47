"""Packing documents into rows of fixed length so that any row can be asked for directly.

In each epoch the documents stand in a permuted order (`order.permute`) and are cut into blocks of K documents.
A row holds S tokens and is given Q = S (1 - 1/SLACK) of them, so that an epoch of T tokens has ceil(T / Q) rows
whatever the permutation: the epoch of a row is a division. Block b owns the rows from ceil(start_b / Q) up to
ceil(start_{b+1} / Q), start_b being the tokens before it: it gives the first tokens of its first document to the
block before, and takes as many from the block after as its last row is given.

Inside a block documents are laid best-fit-decreasing (Johnson 1973) into exactly its rows; what fits nowhere whole
is split over the largest holes. The slack of 0.024% is what makes this gentle: it leaves the holes of a few tokens
empty which else would have to be filled with crumbs of documents (3 to 6% more pieces against 0.02%). One
cumulative sum per epoch (8 bytes a block) finds the block of a row.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from jaxtrain.data.order import permute

BLOCK_DOCUMENTS = 4096  # documents packed together: with more, hardly fewer are cut
BLOCK_TOKENS = 1 << 23  # long documents: fewer together, so that a random row stays a matter of milliseconds
SLACK = 4096  # one token in so many may stay empty
INDEX_CHUNK = 1 << 18  # documents whose lengths are summed together while an epoch is indexed


class Pieces(NamedTuple):
    """Runs of tokens, grouped by row in the order asked for, each row filled from its left end.

    All int64[P]: `row` is the place in the request, `document` the index in the split, `offset` the first token's
    place in its document, `length` the number of tokens.
    """

    row: np.ndarray
    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray


class _PackedBlock(NamedTuple):
    """Packed rows of one block: pieces sorted by row, `bounds[r]:bounds[r + 1]` are those of row r."""

    document: np.ndarray
    offset: np.ndarray
    length: np.ndarray
    bounds: np.ndarray


def groups(values: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(value, where it stands int64[m]) of the distinct values of int64[n], ascending."""
    if values.size and (values == values[0]).all():  # the usual case, and much cheaper
        yield int(values[0]), np.arange(values.size)
        return
    for value in np.unique(values).tolist():
        yield value, np.flatnonzero(values == value)


def best_fit(lengths: np.ndarray, rows: int, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Best-fit-decreasing of lengths in (0, sequence] into `rows` rows of `sequence` tokens.

    Returns:
      (row int64[n], -1 where it fits nowhere whole; free int64[rows] tokens left in each row). Equal lengths go in
      the given order, equal holes to the lowest row: the result is a pure function of the arguments.
    """
    row_of = np.full(len(lengths), -1, np.int64)
    order = np.argsort(-lengths, kind="stable")
    placed = [-1] * len(lengths)
    holes = [sequence * rows + r for r in range(rows)]  # free * rows + row, ascending: the best fit is one bisection
    for i, length in enumerate(lengths[order].tolist()):
        at = bisect_left(holes, length * rows)
        if at == len(holes):
            continue
        hole = holes.pop(at)
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
    """Pour items of `length` one after the other into holes of `free`; sum(length) <= sum(free).

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
    """Pack pieces (int64[n] each) into `rows` rows; needs sum(length) <= rows * sequence."""
    whole, rest = length // sequence, length % sequence
    item = np.repeat(np.arange(len(length)), whole)  # rows filled by one long document alone
    nth = np.arange(len(item)) - np.repeat(np.cumsum(whole) - whole, whole)
    parts = [(np.arange(len(item)), document[item], offset[item] + nth * sequence, np.full(len(item), sequence))]
    tail = np.flatnonzero(rest)
    tail_offset = offset[tail] + whole[tail] * sequence
    row, free = best_fit(rest[tail], rows - len(item), sequence)
    fits = row >= 0
    parts.append((row[fits] + len(item), document[tail[fits]], tail_offset[fits], rest[tail[fits]]))
    if not fits.all():
        over, hole_rows = np.flatnonzero(~fits), np.argsort(-free, kind="stable")
        over = over[np.argsort(-rest[tail[over]], kind="stable")]
        part, start, hole, size = _spill(rest[tail[over]], free[hole_rows])
        source = over[part]
        parts.append((hole_rows[hole] + len(item), document[tail[source]], tail_offset[source] + start, size))
    row, document, offset, length = (np.concatenate(column).astype(np.int64) for column in zip(*parts))
    order = np.argsort(row, kind="stable")
    bounds = np.searchsorted(row[order], np.arange(rows + 1))
    return _PackedBlock(document[order], offset[order], length[order], bounds)


class Packer:
    """Rows of packed documents, addressable for ever: row r belongs to epoch r // rows.

    Every token is in exactly one row of an epoch. All methods are pure functions of their arguments and safe to
    call from several threads; the last few blocks are remembered.

    Args:
      lengths: tokens of each document, unsigned or signed integers [N], all positive, N >= 1.
      sequence: tokens per row.
      seed: selects the permutations.
      block: documents per block; default by the mean length.
    """

    def __init__(self, lengths: np.ndarray, sequence: int, seed: int, block: int | None = None) -> None:
        self.lengths, self.sequence, self.seed = lengths, sequence, seed
        self.documents = len(lengths)
        self.tokens = int(lengths.sum(dtype=np.int64))
        self.rows = int(self._first_row(np.array([self.tokens]))[0])  # of an epoch
        mean = max(self.tokens // self.documents, 1)
        self.block = block or min(max(BLOCK_TOKENS // mean, 64), BLOCK_DOCUMENTS)
        self._index = lru_cache(maxsize=2)(self._count)
        self._pack = lru_cache(maxsize=4)(self._pack_block)

    def _first_row(self, start: np.ndarray) -> np.ndarray:
        """First row that is given no token before `start` int64[n] of the epoch's stream."""
        return -(-start * SLACK // (self.sequence * (SLACK - 1)))

    def _first_token(self, row: int) -> int:
        """Returns the position in the stream of the first token of a row."""
        return min(row * self.sequence * (SLACK - 1) // SLACK, self.tokens)

    def pieces(self, rows: np.ndarray) -> Pieces:
        """Pieces of the rows int64[R], in that order."""
        rows = np.asarray(rows, np.int64)
        epoch, row = np.divmod(rows, self.rows)
        found: list[Pieces] = []
        for e, at in groups(epoch):
            first = self._first_row(self._index(e))  # of each block; the last entry is the rows of the epoch
            block = np.searchsorted(first, row[at], side="right") - 1
            for b, place in groups(block):
                mine = at[place]
                found.append(self._pick(self._pack(e, b), row[mine] - first[b], mine))
        if len(found) == 1:
            return found[0]
        if not found:
            return Pieces(*np.zeros((4, 0), np.int64))
        columns = [np.concatenate(c) for c in zip(*found)]
        order = np.argsort(columns[0], kind="stable")
        return Pieces(*(c[order] for c in columns))

    @staticmethod
    def _pick(packed: _PackedBlock, rows: np.ndarray, place: np.ndarray) -> Pieces:
        """Pieces of some rows of a block; `place` is where each row stands in the request."""
        count = packed.bounds[rows + 1] - packed.bounds[rows]
        ends = np.cumsum(count)
        at = np.arange(ends[-1]) + np.repeat(packed.bounds[rows] - (ends - count), count)
        return Pieces(np.repeat(place, count), packed.document[at], packed.offset[at], packed.length[at])

    def _count(self, epoch: int) -> np.ndarray:
        """Tokens before each block of an epoch, and in all: int64[blocks + 1]."""
        sums = []
        chunk = max(INDEX_CHUNK // self.block, 1) * self.block
        for lo in range(0, self.documents, chunk):
            hi = min(lo + chunk, self.documents)
            lengths = self.lengths[permute(np.arange(lo, hi), self.documents, self.seed, epoch)]
            sums.append(np.add.reduceat(lengths, np.arange(0, hi - lo, self.block), dtype=np.int64))
        return np.concatenate(([0], np.cumsum(np.concatenate(sums))))

    def _pack_block(self, epoch: int, block: int) -> _PackedBlock:
        start = self._index(epoch)
        begin, end = (int(r) for r in self._first_row(start[block : block + 2]))
        rows, lo, hi = end - begin, self._first_token(begin), self._first_token(end)
        # The documents of this block, and as many of the next as reach the end of the last row.
        first, last = block * self.block, min((block + 1) * self.block, self.documents)
        document = permute(np.arange(first, last), self.documents, self.seed, epoch)
        end = int(start[block + 1])
        while end < hi:
            more = permute(np.arange(last, min(last + 64, self.documents)), self.documents, self.seed, epoch)
            document = np.concatenate((document, more))
            last += len(more)
            end += int(self.lengths[more].sum(dtype=np.int64))
        ends = int(start[block]) + np.cumsum(self.lengths[document], dtype=np.int64)
        begins = ends - self.lengths[document]
        offset = np.maximum(lo - begins, 0)
        length = np.minimum(ends, hi) - begins - offset
        some = length > 0
        packed = pack(document[some], offset[some], length[some], rows, self.sequence)
        return _shuffle(packed, self.seed, epoch, block)


def _shuffle(packed: _PackedBlock, seed: int, epoch: int, block: int) -> _PackedBlock:
    """Permute the rows of a block: best-fit-decreasing leaves the long documents first and the short ones last."""
    rows = len(packed.bounds) - 1
    if rows < 2:
        return packed
    key = np.random.SeedSequence([seed, epoch, block]).generate_state(rows, np.uint64)
    order = np.argsort(key, kind="stable")
    picked = Packer._pick(packed, order, np.arange(rows))
    bounds = np.searchsorted(picked.row, np.arange(rows + 1))
    return _PackedBlock(picked.document, picked.offset, picked.length, bounds)
