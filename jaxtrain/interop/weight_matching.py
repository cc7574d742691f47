"""Matching of a model's variables with stored arrays of other names. Does not import JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from jaxtrain.config.sections.model import StoredNameConfig
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    import jax

Shape = tuple[int, ...]
TRAIN_STATE = ("params", "frozen", "mutable")  # collections of jaxtrain's own checkpoints, `params` of Linen's, too


class StoredName(NamedTuple):
    """Place of a variable among stored arrays.

    Attributes:
        names: one name; or, if `is_stacked`, one for each index of the variable's first dim.
        dims: dim of a stored array for each dim of the variable, without a stacked one.
        is_stacked: the variable is a stack of stored arrays.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    is_stacked: bool


class StoredWeights(Protocol):
    """Stored arrays that are loaded into shards."""

    @property
    def source(self) -> str:
        """Name of the place, for messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Name -> shape."""
        ...

    def load(
        self, found: Mapping[str, StoredName], variables: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Returns the variables, each in its dtype and sharding.

        Args:
            found: path of a variable -> its place.
            variables: path -> shape, dtype and sharding; may hold more.
        """
        ...


@dataclass(frozen=True)
class WeightMatch:
    """Match of a model's variables with stored arrays.

    Attributes:
        found: path of a variable -> its place.
        missing: paths of variables that are not stored.
        reshaped: `path [4, 2], stored [4, 3]` of variables that are stored in another shape.
        unused: stored names in the same collections that no variable has.
    """

    found: dict[str, StoredName]
    missing: list[str]
    reshaped: list[str]
    unused: list[str]

    @property
    def text(self) -> str:
        """The differences in one line; empty if there are none."""
        parts = (("not stored", self.missing), ("of another shape", self.reshaped), ("stored but unused", self.unused))
        return "; ".join(f"{len(names)} {title}: {abbreviate(names)}" for title, names in parts if names)


def match_weights(
    variables: Mapping[str, Shape], stored: Mapping[str, Shape], names: Mapping[str, StoredNameConfig]
) -> WeightMatch:
    """Finds the stored array of every variable of a model.

    Names are compared without a last part `value`, which NNX states have, and with dots for slashes. A stored array may
    be within one collection, such as `params` or `batch_stats`; then only those collections are looked at for unused
    arrays, so that optimizer states beside them do not count.

    Args:
        variables: path `a/b/c` -> shape.
        stored: name -> shape.
        names: pattern of a whole path -> stored name. The first one that matches is taken.

    Raises:
        UserError: a pattern is no regular expression, or its name has groups that it does not have.
    """
    index = {_dotted(name): name for name in stored}
    found: dict[str, StoredName] = {}
    missing, reshaped, used = [], [], set()
    for path, shape in variables.items():
        wanted = _stored_name(path, shape, names)
        lookup = tuple(_find(name, index) for name in wanted.names)
        if None in lookup or not lookup:
            missing.append(path)
            continue
        place = wanted._replace(names=tuple(name for name in lookup if name is not None))
        used |= set(place.names)
        shapes = {tuple(stored[name]) for name in place.names}
        if shapes == {_stored_shape(shape[place.is_stacked :], place.dims)}:
            found[path] = place
        else:
            reshaped.append(f"{path} {list(shape)}, stored {' and '.join(map(str, map(list, sorted(shapes))))}")
    return WeightMatch(found, missing, reshaped, _unused(index, used, variables))


def _stored_name(path: str, shape: Shape, names: Mapping[str, StoredNameConfig]) -> StoredName:
    """Returns the place that a pattern gives a variable; the same name without one."""
    for pattern, config in names.items():
        try:
            matched = re.fullmatch(pattern, path)
            name = "" if matched is None else matched.expand(config.name)
        except (re.error, IndexError) as error:
            raise UserError(f"model.weights.names: {pattern}: {error}; expected a regular expression") from error
        if matched is not None:
            is_stacked = "{index}" in name and shape != ()
            count = shape[0] if is_stacked else 1
            dims = tuple(range(len(shape) - is_stacked)) if config.dims is None else config.dims
            return StoredName(tuple(name.replace("{index}", str(i)) for i in range(count)), dims, is_stacked)
    return StoredName((path,), tuple(range(len(shape))), False)


def _stored_shape(shape: Shape, dims: Sequence[int]) -> Shape | None:
    """Returns the shape of a stored array; None if `dims` are no permutation of the variable's dims."""
    if sorted(dims) != list(range(len(shape))):
        return None
    return tuple(shape[dims.index(d)] for d in range(len(shape)))


def _find(name: str, index: Mapping[str, str]) -> str | None:
    """Returns the stored name, or that within a single collection, `params` and the like first."""
    name = _dotted(name)
    if name in index:
        return index[name]
    collections = [key.removesuffix(f".{name}") for key in index if key.endswith(f".{name}")]
    collections = [collection for collection in collections if "." not in collection]
    known = [collection for collection in TRAIN_STATE if collection in collections]
    chosen = known[:1] or (collections if len(collections) == 1 else [])
    return index[f"{chosen[0]}.{name}"] if chosen else None


def _unused(index: Mapping[str, str], used: set[str], variables: Mapping[str, Shape]) -> list[str]:
    """Returns the stored names in the collections of the used ones; all of them if those are in none."""
    paths = {_dotted(path) for path in variables}
    collections = set()
    for name in map(_dotted, used):
        first, _, rest = name.partition(".")
        collections.add(first if first in TRAIN_STATE or (rest in paths and name not in paths) else "")
    is_in = lambda key: "" in collections or key.partition(".")[0] in collections  # noqa: E731
    return [name for key, name in index.items() if name not in used and is_in(key)]


def _dotted(name: str) -> str:
    return name.replace("/", ".").removesuffix(".value")


def abbreviate(names: Sequence[str], count: int = 3) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")
