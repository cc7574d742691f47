"""The state of an island: that of one run, and what the islands agreed on at their last exchange."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.sync.added_state import replicated
from jaxtrain.sync.local_step import SYNC
from jaxtrain.sync.strategy import Strategy
from jaxtrain.sync.synchronizer import State, Synchronizer


class ConsensusSynchronizer(Synchronizer):
    """The state has a part `sync`: `tokens` since the last exchange, float32 scalar, and `agreed`, parameters after it.

    Args:
        strategy: of one run alone, which the island's step is.
        one: abstract state without the part, with shardings.
    """

    def __init__(self, strategy: Strategy, one: State) -> None:
        super().__init__(strategy)
        self.one = one

    def abstract(self, one: State) -> State:
        """Returns shapes, dtypes and shardings of the state, with the part `sync`."""
        tokens = replicated(jax.ShapeDtypeStruct((), jnp.float32), one["params"])
        return {**one, SYNC: {"tokens": tokens, "agreed": one["params"]}}

    def start(self, one: State) -> State:
        """Returns the state at the start of a run."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract(self.one)[SYNC])

        def make(params: Any) -> Any:
            return {"tokens": jnp.float32(0), "agreed": jax.tree.map(jnp.copy, params)}

        return {**one, SYNC: jax.jit(make, out_shardings=shardings)(one["params"])}

    def merge(self, state: State) -> State:
        """Returns the state without the part `sync`, from which a run alone may go on."""
        return {name: tree for name, tree in state.items() if name != SYNC}

    def agreed(self, state: State) -> State:
        """Returns the variables that validation and export use: those of the last exchange."""
        return {**self.merge(state), "params": state[SYNC]["agreed"]}
