"""Format of the part of a step that one process has: a header that lists pieces of tensors, and their bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from jaxtrain.errors import PeerMemoryError

Tensors = dict[str, list[Any]]  # name -> [shape, dtype]


class Key(NamedTuple):
    """Names a part. `generation`: of the launch that made it."""

    generation: int
    step: int
    process: int


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: where it begins and its shape, in elements; its bytes in the part, and their xxh3-64."""

    name: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    size: int
    digest: str


@dataclass(frozen=True)
class Header:
    """Header of a part.

    Attributes:
        processes: parts that make up the step.
        size: bytes of this one.
        tensors: of the whole state.
        pieces: what lies in this part.
        manifest: as in a checkpoint.
    """

    processes: int
    size: int
    tensors: Tensors
    pieces: tuple[Piece, ...]
    manifest: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return asdict(self)


def read_header(found: Any) -> Header:
    """The header of its JSON. Raises PeerMemoryError where it is none, or names bytes outside of its part."""
    try:
        pieces = tuple(map(_piece, found["pieces"]))
        tensors = {str(name): [list(_sizes(shape)), str(dtype)] for name, (shape, dtype) in found["tensors"].items()}
        header = Header(int(found["processes"]), int(found["size"]), tensors, pieces, dict(found["manifest"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise PeerMemoryError("a part's header is not readable") from None
    for piece in pieces:
        if piece.name not in tensors or not 0 <= piece.offset <= piece.offset + piece.size <= header.size:
            raise PeerMemoryError(f"a part names bytes of {piece.name} that it does not have")
    return header


def _piece(found: Any) -> Piece:
    start, shape = _sizes(found["start"]), _sizes(found["shape"])
    return Piece(str(found["name"]), start, shape, int(found["offset"]), int(found["size"]), str(found["digest"]))


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values)


def covered(pieces: list[Piece], shape: tuple[int, ...]) -> bool:
    """Returns whether pieces that do not overlap are all of a tensor."""
    return sum(prod(piece.shape) for piece in pieces) == prod(shape)
