"""Packing: every token exactly once an epoch, waste below 0.1%, random access equals sequential access."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import packing
from jaxtrain.data.packing import Packer, best_fit


def lognormal(documents: int, mean: float = 1400.0, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.maximum(rng.lognormal(np.log(mean) - 0.72, 1.2, documents), 1).astype(np.uint32)


def check_epoch(packer: Packer, epoch: int) -> None:
    """Every token of every document is in exactly one piece, and no row is overfull."""
    rows = np.arange(packer.rows) + epoch * packer.rows
    pieces = packer.pieces(rows)
    assert (pieces.length > 0).all()
    fill = np.bincount(pieces.row, pieces.length, minlength=packer.rows)
    assert fill.max() <= packer.sequence
    room = packer.sequence * packer.rows  # a row at the end, and the slack
    assert room - fill.sum() < packer.sequence + 3e-4 * room
    order = np.lexsort((pieces.offset, pieces.document))
    document, offset, length = pieces.document[order], pieces.offset[order], pieces.length[order]
    starts = np.flatnonzero(np.diff(document, prepend=-1))
    assert np.array_equal(document[starts], np.arange(packer.documents))
    assert (offset[starts] == 0).all()
    inside = np.setdiff1d(np.arange(len(document)), starts)
    assert np.array_equal(offset[inside], (offset + length)[inside - 1])
    ends = np.append(starts[1:], len(document)) - 1
    assert np.array_equal((offset + length)[ends], packer.lengths)


@settings(max_examples=80)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=120),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_every_token_once(lengths: list[int], sequence: int, block: int, epoch: int) -> None:
    check_epoch(Packer(np.array(lengths, np.uint32), sequence, 7, block), epoch)


@pytest.mark.parametrize("sequence", [512, 4096, 65_536])
def test_realistic_corpus(sequence: int) -> None:
    lengths = lognormal(20_000)
    packer = Packer(lengths, sequence, 0)
    check_epoch(packer, 1)
    assert 1 - packer.tokens / (packer.rows * sequence) < 1e-3
    pieces = packer.pieces(np.arange(packer.rows))
    needed = (-(-lengths.astype(np.int64) // sequence)).sum()  # pieces if none were cut without need
    assert len(pieces.row) < 1.002 * needed


def test_random_access_equals_sequential() -> None:
    lengths = lognormal(6000, 300)
    whole = Packer(lengths, 1024, 3, 256).pieces(np.arange(3 * Packer(lengths, 1024, 3).rows))
    picked = np.random.default_rng(1).permutation(int(whole.row[-1]) + 1)[:200]
    fresh = Packer(lengths, 1024, 3, 256).pieces(picked)
    for place, row in enumerate(picked):
        a, b = whole.row == row, fresh.row == place
        for column in range(1, 4):
            assert np.array_equal(whole[column][a], fresh[column][b])


def test_rows_are_not_sorted_by_length_of_documents() -> None:
    """Best-fit-decreasing lays long documents first; the rows of a block must be shuffled after."""
    packer = Packer(lognormal(4096, 300), 1024, 0)
    pieces = packer.pieces(np.arange(packer.rows))
    longest = np.zeros(packer.rows)
    np.maximum.at(longest, pieces.row, pieces.length)
    half = packer.rows // 2
    assert abs(longest[:half].mean() / longest[half:].mean() - 1) < 0.05


def test_epochs_and_seeds_differ() -> None:
    lengths = lognormal(3000, 200)
    a, b = Packer(lengths, 512, 0), Packer(lengths, 512, 1)
    first = a.pieces(np.arange(50)).document
    assert not np.array_equal(first[:40], a.pieces(np.arange(50) + a.rows).document[:40])
    assert not np.array_equal(first[:40], b.pieces(np.arange(50)).document[:40])


@pytest.mark.parametrize("row", [0, 8_000_000])
def test_cost_of_a_row_does_not_grow_with_its_number(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """A row costs one epoch index and one packed block, wherever it is."""
    packed: list[int] = []
    real = packing.pack
    monkeypatch.setattr(packing, "pack", lambda *a: packed.append(len(a[0])) or real(*a))
    packer = Packer(lognormal(30_000), 4096, 0)
    packer.pieces(np.array([row]))
    assert len(packed) == 1
    assert packed[0] <= 4096 + 64
    assert packer._index.cache_info().misses == 1


def test_best_fit_takes_the_tightest_hole() -> None:
    row, free = best_fit(np.array([6, 5, 4, 5]), 2, 10)
    assert row.tolist() == [0, 1, 0, 1]  # 6 + 4, 5 + 5
    assert free.tolist() == [0, 0]
    row, free = best_fit(np.array([7, 7, 7]), 2, 10)
    assert sorted(row.tolist()) == [-1, 0, 1]
    assert free.tolist() == [3, 3]


def test_load_is_balanced_by_tokens_not_by_documents() -> None:
    """Processes get rows, whatever the documents in them: the tokens are even where the documents are not."""
    packer, processes = Packer(lognormal(20_000), 4096, 0), 8
    rows = packer.rows // processes * processes
    pieces = packer.pieces(np.arange(rows) + packer.rows)
    tokens = np.bincount(pieces.row, pieces.length, minlength=rows)
    documents = np.bincount(pieces.row, minlength=rows)
    assert documents.max() > 20 * documents.min()
    by_process = tokens.reshape(-1, processes)
    total = by_process.sum(0)
    assert total.max() / total.min() < 1.001  # over an epoch
    assert np.mean(by_process.min(1) / by_process.max(1)) > 0.995  # in a step
    assert np.sort(tokens)[1] > 0.8 * 4096  # but for the last row of an epoch
