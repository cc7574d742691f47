"""Types of config values: numbers with bounds, mesh sizes, rules, and weights by step."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticKnownError

LARGEST = 2**31 - 1  # sizes and steps are int32 on the device
Bool = Annotated[bool, Field(strict=True)]


def _whole(value: Any) -> Any:
    """Accepts a whole number that is written as 1e6."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST else value


PositiveInt = Annotated[int, Field(ge=1, le=LARGEST, strict=True), BeforeValidator(_whole)]
Devices = Annotated[int, Field(ge=1, le=4096, strict=True)]
Count = Annotated[int, Field(ge=0, le=LARGEST, strict=True), BeforeValidator(_whole)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]
NonZeroFraction = Annotated[float, Field(gt=0.0, le=1.0, strict=True)]
Share = Annotated[float, Field(ge=0.0, lt=1.0, strict=True)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]


def _no_lookalike(value: Any) -> Any:
    """Rejects true and 1.0, which `Literal` accepts for 1."""
    if isinstance(value, (bool, float)):
        raise PydanticKnownError("literal_error", {"expected": "0, 1, 2 or 3"})
    return value


ZeroStage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_lookalike)]


def _axis_size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value == 0 or not -1 <= value <= LARGEST:
        raise ValueError("a positive integer, or -1 to infer the size")
    return value


AxisSize = Annotated[
    int,
    BeforeValidator(_axis_size),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": LARGEST, "not": {"const": 0}}),
]


def _axes(value: Any) -> Any:
    """Accepts `null`, `fsdp` or `[data, fsdp]` for a rule; for a pattern of paths also `[embed, null]`."""
    if not isinstance(value, (str, list, tuple, type(None))):
        raise ValueError("a mesh axis, a list of mesh axes, or null")
    return () if value is None else (value,) if isinstance(value, str) else value


Axes = Annotated[
    tuple[str | None, ...],
    BeforeValidator(_axes),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "items": {"type": ["string", "null"]}}, {"type": "string"}, {"type": "null"}]}
    ),
]


def one_or_more(value: Any) -> Any:
    """Accepts one source without a list."""
    return [value] if isinstance(value, (str, dict)) else value


def _by_step(value: Any) -> Any:
    """Accepts `0.5` for a weight, which becomes a dict from steps to weights with an entry for step 0."""
    if isinstance(value, dict):
        return value if any(str(step) == "0" for step in value) else {0: 1.0, **value}
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError("a number, or numbers by step as in {0: 1.0, 1000: 0.5}")
    if not value > 0:
        raise PydanticKnownError("greater_than", {"gt": 0})
    return {0: value}


Weights = Annotated[
    dict[int, NonNegative],
    BeforeValidator(_by_step),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
            ]
        }
    ),
]
