"""Stateless shuffling: a keyed permutation of 0..n-1 with random access.

A Feistel network permutes the integers below a power of two. Applying it again until the result is below n ("cycle
walking") restricts it to a permutation of 0..n-1.
Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, methods 2 and 3.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 6  # even, so that both halves end with their initial widths; fewer than 4 fail chi-square tests
CHUNK = 1 << 15  # indices permuted at a time, so that temporaries fit into the L2 cache
MIN_BITS = 6  # fewer fail chi-square tests; for a small n all 64 integers are permuted instead


def _mix(x: np.ndarray) -> np.ndarray:
    """Scrambles uint32 values in place (the hash finalizer lowbias32)."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x21F0AAAD)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x735A2D97)
    x ^= x >> np.uint32(15)
    return x


def _feistel(x: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Permutes uint64 values below 2**bits, bits <= 64. The halves may differ by one bit; each round swaps them."""
    low = bits // 2
    widths = (bits - low, low)
    left = (x >> np.uint64(low)).astype(np.uint32)
    right = (x & np.uint64((1 << low) - 1)).astype(np.uint32)
    for key in keys:
        mixed = _mix(right + key)
        mixed &= np.uint32((1 << widths[0]) - 1)
        mixed ^= left
        left, right = right, mixed
        widths = (widths[1], widths[0])
    return (left.astype(np.uint64) << np.uint64(low)) | right


def permute(index: np.ndarray | int, n: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the images of `index` under the permutation of 0..n-1 that (seed, epoch) selects.

    Args:
      index: integers in [0, n), any shape.
      n: size of the permuted range, 1 <= n < 2**63.
      seed, epoch: non-negative integers; together they select the permutation.

    Returns:
      int64 array of the shape of `index`. Each element takes some tens of nanoseconds.

    Raises:
      IndexError: an index outside [0, n).
    """
    index = np.asarray(index)
    if index.size and (int(index.min()) < 0 or int(index.max()) >= n):
        raise IndexError(f"index outside 0..{n - 1}")
    flat = index.reshape(-1).astype(np.uint64)
    out = np.empty(flat.shape, np.int64)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint32)
    bits = (n - 1).bit_length()
    if bits < MIN_BITS:
        permutation = _feistel(np.arange(1 << MIN_BITS, dtype=np.uint64), MIN_BITS, keys).astype(np.int64)
        return permutation[permutation < n][index]
    for start in range(0, flat.size, CHUNK):
        y = _feistel(flat[start : start + CHUNK], bits, keys)
        outside = np.flatnonzero(y >= n)
        while outside.size:  # the domain is smaller than 2n, so half of them get inside each time
            y[outside] = _feistel(y[outside], bits, keys)
            outside = outside[y[outside] >= n]
        out[start : start + CHUNK] = y
    return out.reshape(index.shape)
