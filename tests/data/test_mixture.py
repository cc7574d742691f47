"""Mixtures: deviation below one row at every prefix, also across changes of weight; pure in the row index."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.mixture import Mixture, integer_weights, interleave, weight_ranges
from jaxtrain.errors import DataError


def deviation(source: np.ndarray, counts: np.ndarray) -> Fraction:
    """Greatest |rows of k so far - its share| over all prefixes and sources, exactly."""
    period = int(counts.sum())
    prefix = np.cumsum(source[:, None] == np.arange(len(counts)), axis=0)
    ideal = np.arange(1, len(source) + 1)[:, None] * counts  # times 1 / period
    return Fraction(int(np.abs(prefix * period - ideal).max()), period)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any))
def test_deviation_below_one(counts: list[int]) -> None:
    exact = integer_weights(counts)
    table = interleave(exact)
    assert np.array_equal(np.bincount(table, minlength=len(counts)), exact)
    assert deviation(np.tile(table, 3), exact) < 1


@settings(max_examples=15)
@given(st.lists(st.floats(1e-4, 10, allow_nan=False), min_size=2, max_size=5))
def test_deviation_with_rounded_weights(weights: list[float]) -> None:
    counts = integer_weights(weights)
    assert (counts > 0).all()
    assert deviation(interleave(counts), counts) < 1
    share, wanted = counts / counts.sum(), np.array(weights) / sum(weights)
    assert np.abs(share - wanted).max() < 5e-4


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)), max_size=4
    ),
    st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any),
)
def test_rows_of_each_source_continue_across_weight_changes(changes: list, first: list[int]) -> None:
    starts = np.cumsum([0] + [gap for gap, _ in changes]).tolist()
    mixture = Mixture(list(zip(starts, [first] + [w for _, w in changes])))
    rows = np.arange(starts[-1] + 300)
    source, local = mixture.locate(rows)
    for k in range(3):  # the n-th row of a source is its row n: none skipped, none repeated
        assert np.array_equal(local[source == k], np.arange((source == k).sum()))
    for start, end, weights in zip(starts, [*starts[1:], len(rows)], [first] + [w for _, w in changes]):
        assert deviation(source[start:end], integer_weights(weights)) < 1
    picked = np.random.default_rng(0).integers(0, len(rows), 50)
    again = mixture.locate(picked)
    assert np.array_equal(again[0], source[picked])
    assert np.array_equal(again[1], local[picked])


def test_far_rows_are_computed_directly() -> None:
    mixture = Mixture([(0, [1.0, 2.0]), (3000, [1.0, 0.0])])
    source, local = mixture.locate(np.array([10**12]))
    assert source.tolist() == [0]
    assert local.tolist() == [1000 + 10**12 - 3000]


def test_exact_ratios_are_kept() -> None:
    assert integer_weights([0.1, 0.2]).tolist() == [1, 2]
    assert integer_weights([3.0]).tolist() == [1]
    assert integer_weights([1e-9, 1.0]).min() == 1


def test_ranges_from_steps() -> None:
    ranges = weight_ranges([{0: 1.0, 10: 0.5}, {0: 1.0, 10: 0.0, 20: 2.0}], 8)
    assert ranges == [(0, [1.0, 1.0]), (80, [0.5, 0.0]), (160, [0.5, 2.0])]


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], []])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError, match="mixture weights"):
        Mixture([(0, weights)])
