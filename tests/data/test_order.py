"""The permutation is a bijection, looks uniform, and depends on seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.order import permute


@settings(max_examples=60)
@given(st.integers(1, 5000) | st.integers(1, 70), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_bijective(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [2**31 - 1, 2**33 + 12345, 2**62 + 7])
def test_large_ranges_stay_inside_and_distinct(n: int) -> None:
    index = np.unique(np.random.default_rng(0).integers(0, n, 20_000))
    image = permute(index, n, 1, 2)
    assert image.min() >= 0
    assert image.max() < n
    assert len(np.unique(image)) == len(index)


def test_random_access_equals_the_full_permutation() -> None:
    whole = permute(np.arange(70_000), 70_000, 5, 3)  # spans several chunks
    picked = np.random.default_rng(0).integers(0, 70_000, (4, 7))
    assert np.array_equal(permute(picked, 70_000, 5, 3), whole[picked])
    assert int(permute(69_999, 70_000, 5, 3)) == whole[-1]


@pytest.mark.parametrize("n", [3, 5, 8, 31, 60, 100])
def test_uniform_over_seeds(n: int) -> None:
    """Chi-square of the image of each index, and of pairs of images, over many seeds: below mean + 5 sigma."""
    seeds = 2000
    images = np.array([permute(np.arange(n), n, seed, 0) for seed in range(seeds)])
    for i in range(0, n, max(n // 10, 1)):
        counts = np.bincount(images[:, i], minlength=n)
        chi2 = float(((counts - seeds / n) ** 2 / (seeds / n)).sum())
        assert chi2 < (n - 1) + 5 * np.sqrt(2 * (n - 1)) + 5
    pairs = np.zeros((n, n))
    np.add.at(pairs, (images[:, 0], images[:, 1]), 1)
    expected = seeds / (n * (n - 1))
    off = ~np.eye(n, dtype=bool)
    degrees = n * (n - 1) - 1
    assert float(((pairs[off] - expected) ** 2 / expected).sum()) < degrees + 5 * np.sqrt(2 * degrees) + 5


def test_uniform_displacement_in_one_large_permutation() -> None:
    """Where neighbours land is unrelated: chi-square over 64 x 64 cells of consecutive images."""
    n = 1_000_003
    image = permute(np.arange(n), n, 0, 0)
    cells = np.bincount(image[:-1] * 64 // n * 64 + image[1:] * 64 // n, minlength=4096)
    chi2 = float(((cells - cells.mean()) ** 2 / cells.mean()).sum())
    assert abs(chi2 - 4095) < 5 * np.sqrt(2 * 4095)


def test_seed_and_epoch_change_the_order() -> None:
    base = permute(np.arange(1000), 1000, 0, 0)
    for seed, epoch in ((1, 0), (0, 1), (1, 1)):
        assert (permute(np.arange(1000), 1000, seed, epoch) == base).mean() < 0.02


def test_index_outside_raises() -> None:
    with pytest.raises(IndexError, match=r"0\.\.9"):
        permute(np.array([3, 10]), 10, 0, 0)
