"""Computation of one server, for the part of the parameters that it holds. Pure functions of what it is given.

The state of a server is no attribute but a value that goes in and out, so that it outlives the process: the coordinator
keeps it in the store of the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as File
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxtrain.io.atomic import open_atomic
from jaxtrain.islands.partition import Spec
from jaxtrain.islands.pieces import Pieces, assemble, decoded, merged
from jaxtrain.islands.server.public_values import Message, PublicValues
from jaxtrain.islands.server.rules import Header, Rule, average, is_finite
from jaxtrain.islands.trees import Flat, Path, flatten_dict, unflatten_dict
from jaxtrain.sharding.quantized_blocks import Bits

# `rule`: of the rule; `mutable`: averages of mutable variables; `public`: of `PublicValues`
ServerState = dict[str, Any]
# The state, what islands read, the message of the update in few bits, and the bytes of both.
Values = tuple[ServerState, Flat, Message, tuple[int, int]]


class ServerProcess:
    """Computes for one server.

    Args:
        rule: what it makes of pushes.
        specs: tensors, or parts of them, that it holds.
        bits: of a value that islands read; 0: all of it.
    """

    def __init__(self, rule: Rule, specs: Mapping[Path, Spec], bits: Bits = 0) -> None:
        self._rule, self._specs = rule, specs
        self._public = PublicValues(specs, bits)
        self._names = _params(unflatten_dict({path: spec.names for path, spec in specs.items()}))

    def pid(self) -> int:
        """Returns the number of the process."""
        return os.getpid()

    def hold(self, *pieces: Pieces) -> tuple[Flat, bool]:
        """Returns the tensors of a push, and True if all numbers are finite.

        Args:
            pieces: of each process of the island.

        Raises:
            ValueError: pieces are missing.
        """
        flat = assemble(decoded(merged(pieces)), self._specs)
        return flat, is_finite(flat)

    def begin(self, flat: Flat) -> Values:
        """Returns the state at the start of a run with these values."""
        tree = unflatten_dict(flat)
        rule = self._rule.init(_params(tree), self._names)
        return self._values({"rule": rule, "mutable": tree.get("mutable", {}), "public": self._public.begin(flat)})

    def square(self, header: Header, *pushes: Flat) -> float | None:
        """Returns the part of this server in the square of the norm that an update depends on; None if on none."""
        return self._rule.square([_params(unflatten_dict(flat)) for flat in pushes], header, self._names)

    def update(self, state: ServerState, header: Header, *pushes: Flat) -> Values:
        """Returns the state after an update by pushes."""
        if not any(header.is_finite):
            return self._updated(state)
        trees = [unflatten_dict(flat) for flat in pushes]
        rule = self._rule.update(state["rule"], [_params(tree) for tree in trees], header, self._names)
        mean = average([tree.get("mutable", {}) for tree in trees], header, state["mutable"])
        share = np.float32(self._rule.share(header))
        mutable = jax.tree.map(lambda new, old: _between(old, new, share), mean, state["mutable"])
        return self._updated({"rule": rule, "mutable": mutable, "public": state["public"]})

    def save(self, state: ServerState, file: str) -> None:
        """Writes the state into a file. Raises OSError if the disk refuses it."""
        leaves = jax.tree.leaves(state)
        with open_atomic(File(file)) as opened:
            np.savez(opened, *map(_raw, leaves))

    def load(self, file: str) -> Values:
        """Returns the state of a file. Raises ValueError if it is not of these tensors."""
        leaves, structure = jax.tree.flatten(self._abstract())
        with np.load(file) as found:
            if len(found.files) != len(leaves):
                raise ValueError(f"{file}: {len(found.files)} arrays; expected {len(leaves)}")
            raw = [found[f"arr_{i}"] for i in range(len(leaves))]
        values = [x.view(leaf.dtype).reshape(leaf.shape) for x, leaf in zip(raw, leaves)]
        return self._values(jax.tree.unflatten(structure, values))

    def _abstract(self) -> ServerState:
        tree = unflatten_dict(
            {path: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for path, spec in self._specs.items()}
        )
        rule = jax.eval_shape(lambda params: self._rule.init(params, self._names), _params(tree))
        public = [jax.ShapeDtypeStruct(self._specs[path].shape, np.dtype(np.float32)) for path in self._public.paths]
        return {"rule": rule, "mutable": tree.get("mutable", {}), "public": public}

    def _updated(self, state: ServerState) -> Values:
        """Returns the values after an update, which sends a message if values travel in few bits."""
        state, message = jax.tree.map(np.asarray, state), {}
        if self._public.bits:
            message, public = self._public.update(state["public"], self._exact(state))
            state = {**state, "public": public}
        return self._values(state, message)

    def _values(self, state: ServerState, message: Message = MappingProxyType({})) -> Values:
        state = jax.tree.map(np.asarray, state)
        given = self._exact(state) | dict(zip(self._public.paths, state["public"], strict=True))
        sizes = [sum(value.nbytes for value in values.values()) for values in (given, message)]
        return state, given, dict(message), (sizes[0], sizes[1])

    def _exact(self, state: ServerState) -> Flat:
        flat = flatten_dict({"params": state["rule"]["params"], "mutable": state["mutable"]})
        return {path: flat[path] for path in self._specs}


def _params(tree: Mapping[str, Any]) -> Any:
    return tree.get("params", {})


def _between(old: np.ndarray, new: np.ndarray, share: np.float32) -> np.ndarray:
    """Returns `new` for a share of 1, less of the way from `old` for a smaller one."""
    return (new if share == 1 else old + share * (new - old)).astype(old.dtype)


def _raw(leaf: Any) -> np.ndarray:
    """Returns the bytes of an array, which may have a dtype that NumPy does not know."""
    return np.frombuffer(np.ascontiguousarray(leaf).tobytes(), np.uint8)
