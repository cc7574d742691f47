"""Rates of network links as people write them: `10Gbit`, `400Mbit/s`, `1.25GB/s`."""

from __future__ import annotations

import re

from jaxtrain.errors import UserError

FACTORS = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def parse_rate(text: str, option: str = "--dcn") -> float:
    """Returns the bytes per second of a rate; `bit` or `b` are bits, `B` is bytes.

    Args:
        text: as given.
        option: that it was given for.

    Raises:
        UserError: anything else, or 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGTkmgt])(bit|b|bps|B)(?:/s)?", text.strip())
    if found is None or float(found[1]) == 0:
        raise UserError(f"{option} {text}: no rate of a link; expected one such as 10Gbit, 400Mbit or 1.25GB")
    return float(found[1]) * FACTORS[found[2].upper()] / (1 if found[3] == "B" else 8)
