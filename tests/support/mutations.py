"""Mutations of valid files: flipped, cut, repeated and replaced bytes, extreme numbers, deep nesting, long texts."""

from __future__ import annotations

import random

NUMBERS = (b"0", b"-1", b"1e999", b"99999999999999999999", b"-0.0", b"NaN", b"true", b"null", b'""', b"[]", b"{}")
PIECES = (
    b"\0", b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b'"', b"{", b"}", b"[" * 3000,
    b"{" * 3000, b'{"a":' * 2000, b"\\u0000", b"\\ud800", b"\r\n", b"\n\n", b"../", b"/etc/passwd", "é€😀".encode(),
    b"A" * 10000, b"&a [*a,*a]", b"<<: ", b"!!python/object:os.system ", b"%", b"$",
)  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Returns the data with one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        data = _change(data, rng)
    return data


def _change(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    kind = rng.randrange(8)
    if kind == 0 and data:  # one bit
        at = min(at, len(data) - 1)
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 1:  # cut off
        return data[:at]
    if kind == 2:  # a part left out
        return data[:at] + data[at + rng.randint(1, 40) :]
    if kind == 3:  # a part repeated
        return data[:at] + data[at : at + rng.randint(1, 200)] * rng.randint(1, 3) + data[at:]
    if kind == 4:  # something put in
        return data[:at] + rng.choice(PIECES) + data[at:]
    if kind == 5:  # something put over
        piece = rng.choice(PIECES)
        return data[:at] + piece + data[at + len(piece) :]
    if kind == 6:  # a number of a text
        places = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
        if places:
            at = rng.choice(places)
            end = at
            while end < len(data) and 48 <= data[end] <= 57:
                end += 1
            return data[:at] + rng.choice(NUMBERS) + data[end:]
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
