"""Train state that says in one line that it was used too late."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import jax

from jaxtrain.errors import UserError


class StepState(Mapping[str, Any]):
    """Train state after a step, a pytree. The next step takes its memory.

    Args:
        tree: state, or a dict within it.
        step: finished steps.
        now: returns the finished steps of the run.

    Raises:
        UserError: when it is read after another step.
    """

    def __init__(self, tree: Mapping[str, Any], step: int, now: Callable[[], int]) -> None:
        self._tree, self._step, self._now = tree, step, now

    def __getitem__(self, name: str) -> Any:
        value = self._checked()[name]
        if not isinstance(value, dict):
            return value
        return StepState(cast("dict[str, Any]", value), self._step, self._now)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __repr__(self) -> str:
        return f"StepState(step {self._step}: {', '.join(self._tree)})"

    def _checked(self) -> Mapping[str, Any]:
        if self._now() != self._step:
            message = f"the state of step {self._step} is read after step {self._now()}, which took its memory"
            raise UserError(f"state: {message}; expected a copy before: jax.tree.map(jnp.copy, trainer.state)")
        return self._tree

    def flatten(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        """Returns the entries with their keys, as JAX asks for them."""
        tree, names = self._checked(), tuple(sorted(self._tree))
        return [(jax.tree_util.DictKey(name), tree[name]) for name in names], names


def _unflatten(names: Any, values: Iterable[Any]) -> Any:
    return dict(zip(names, values))


jax.tree_util.register_pytree_with_keys(StepState, StepState.flatten, _unflatten)
