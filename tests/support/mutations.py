"""Mutations of valid files: flipped, cut, repeated and replaced bytes, extreme numbers, deep nesting, long texts.

Those of JSON keep it JSON: values of other types, extreme ones, fields that are missing or have other names.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Mutation = Callable[[bytes, random.Random], bytes]

NUMBERS = (b"0", b"-1", b"1e999", b"99999999999999999999", b"-0.0", b"NaN", b"true", b"null", b'""', b"[]", b"{}")
PIECES = (
    b"\0", b"\xff", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b'"', b"{", b"}", b"[" * 3000,
    b"{" * 3000, b'{"a":' * 2000, b"\\u0000", b"\\ud800", b"\r\n", b"\n\n", b"../", b"/etc/passwd", "é€😀".encode(),
    b"\xff" * 7 + b"\x7f", b"\xfe" + b"\xff" * 6 + b"\x7f", b"(" * 3000, b"A" * 10000,
    b"&a [*a,*a]", b"<<: ", b"!!python/object:os.system ", b"%", b"$",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 1.5, float("inf"), float("nan"), 1 << 20, 1 << 40, 1 << 63, 10**400, "", "x", "4",
    "a" * 5000, "line\nline", "\0", "\ud800", "../x", [], {}, [[]], [None], [1, "a"], {"a": None}, {"": {}},
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


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Returns changed JSON, or in every third case other bytes."""
    return mutate(data, rng) if rng.randrange(3) == 0 else json.dumps(mutate_value(json.loads(data), rng)).encode()


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Returns a JSON value with one or two changes."""
    for _ in range(rng.choice((1, 1, 2))):
        value = _change_value(value, rng)
    return value


def _change_value(value: Any, rng: random.Random) -> Any:
    """Goes down to a random part of a value and changes it."""
    if not isinstance(value, dict | list) or not value or rng.randrange(20) == 0:
        return rng.choice(VALUES)
    items = dict(value) if isinstance(value, dict) else list(value)
    key = rng.choice(list(items)) if isinstance(items, dict) else rng.randrange(len(items))
    kind = rng.randrange(12)
    if kind == 0:
        del items[key]
    elif kind == 1 and isinstance(items, dict):
        items[str(rng.choice(VALUES))] = items.pop(key)
    elif kind == 2 and isinstance(items, list):
        items.insert(key, items[key])
    else:
        items[key] = _change_value(items[key], rng)
    return items
