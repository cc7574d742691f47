"""Updates by pushes: those of an optimizer by gradients, or an exchange of a strategy. Pure functions.

The state of a server is a dict of trees: `params`, what the islands read, and what the rule adds. Pushes are trees of
NumPy arrays in the order of the islands, in which they are summed, so that the result does not depend on their arrival.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.optim.optimizers import clip_by_global_norm
from jaxtrain.sync.island_state import exchange_by_mean, strategy_by_mean
from jaxtrain.sync.strategy import Strategy

Tree = Any
State = dict[str, Tree]


class Header(NamedTuple):
    """Facts about the pushes of an update, from the coordinator.

    Attributes:
        islands: who pushed, ascending.
        tokens: that each has trained on since its last push.
        scales: factor of each, less than 1 for work that is late.
        step: steps of all islands together, over their number.
        share: islands that pushed over those that are there.
        is_finite: of each push, over all servers.
        square: of the norm of the mean gradient, over all servers; None: of this one alone.
    """

    islands: tuple[int, ...]
    tokens: tuple[float, ...]
    scales: tuple[float, ...]
    step: int
    share: float
    is_finite: tuple[bool, ...]
    square: float | None = None

    def weights(self) -> list[np.float32]:
        """Returns the weight of each push, of sum 1 if no work is late: its share of the tokens of finite ones."""
        return [np.float32(share * scale) for share, scale in zip(self._shares(), self.scales)]

    def missing(self) -> np.float32:
        """Returns the weight that late work lacks to its share: 0 if no work is late."""
        return np.float32(sum(share * (1 - scale) for share, scale in zip(self._shares(), self.scales)))

    def _shares(self) -> np.ndarray:
        tokens = np.where(self.is_finite, np.asarray(self.tokens, np.float32), np.float32(0))
        if not tokens.sum():
            tokens = np.asarray(self.is_finite, np.float32)
        return tokens / (tokens.sum() or np.float32(1))


class Rule(ABC):
    """Makes updates. It is sent to the servers, so it must be picklable."""

    @abstractmethod
    def init(self, params: Tree, names: Tree) -> State:
        """Returns the state of a server at the start of a run."""

    def square(self, pushes: Sequence[Tree], header: Header, names: Tree) -> float | None:
        """Returns the square of the norm of what is updated by, if the update depends on that of all servers."""
        return None

    @abstractmethod
    def update(self, state: State, pushes: Sequence[Tree], header: Header, names: Tree) -> State:
        """Returns the state after an update by pushes, of which at least one is finite."""

    def share(self, header: Header) -> float:
        """Returns how far mutable variables move to the average of the pushes, 1 to become it."""
        return 1.0


def weighted_mean(trees: Sequence[Tree], weights: Sequence[np.float32]) -> Tree:
    """Returns the weighted sum in float32: products are rounded, then added in the order of the trees.

    As replicas of one program do it, which multiply first and then reduce. Trees of weight 0 need not be finite.
    """

    def one(*leaves: np.ndarray) -> np.ndarray:
        total = None
        for leaf, weight in zip(leaves, weights):
            if weight:
                product = np.asarray(leaf, np.float32) * weight
                total = product if total is None else np.add(total, product, out=total)
        return np.zeros(leaves[0].shape, np.float32) if total is None else total

    return jax.tree.map(one, *trees)


def average(trees: Sequence[Tree], header: Header, present: Tree) -> Tree:
    """Returns the average of values by the weights of the pushes; what late work lacks stays with the present ones."""
    mean, missing = weighted_mean(trees, header.weights()), header.missing()
    if not missing:
        return mean
    return jax.tree.map(lambda x, now: x + missing * np.asarray(now, np.float32), mean, present)


def is_finite(tree: Tree) -> bool:
    """Returns whether all numbers are finite."""
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(tree))
    return all(bool(np.isfinite(leaf.astype(np.float32, copy=False)).all()) for leaf in leaves)


@dataclass(frozen=True, eq=False)
class GradientRule(Rule):
    """`bsp`, `ssp`, `asp`: x <- x + share u, with u the optimizer's update by the mean gradient of the pushes.

    Attributes:
        make_optimizer: (parameters, their names, step) -> optimizer; the step is what its learning rate follows.
        max_norm: the mean gradient is clipped to it.
    """

    make_optimizer: Callable[[Tree, Tree, Any], optax.GradientTransformationExtraArgs]
    max_norm: float | None
    _compiled: dict[Any, Any] = field(default_factory=dict)

    def init(self, params: Tree, names: Tree) -> State:
        """Returns the parameters and the optimizer's state."""
        optimizer = self.make_optimizer(params, names, 0)
        return {"params": params, "opt_state": jax.jit(optimizer.init)(params)}

    def square(self, pushes: Sequence[Tree], header: Header, names: Tree) -> float | None:
        """Returns the square of the norm of the mean gradient of this server."""
        if self.max_norm is None:
            return None
        _, norm = clip_by_global_norm(weighted_mean(pushes, header.weights()), None, names)
        return float(norm) ** 2

    def update(self, state: State, pushes: Sequence[Tree], header: Header, names: Tree) -> State:
        """Returns parameters and the optimizer's state."""
        grads = weighted_mean(pushes, header.weights())
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state["params"])
        structure = jax.tree.structure(state["params"])
        if structure not in self._compiled:
            self._compiled[structure] = jax.jit(self._update_for(names))
        share = None if header.share == 1 else np.float32(header.share)  # a product by 1 would be rounded by itself
        square = None if header.square is None else np.float32(header.square)
        params, opt_state = self._compiled[structure](
            state["params"], state["opt_state"], grads, np.int32(header.step), share, square
        )
        return {"params": params, "opt_state": opt_state}

    def _update_for(self, names: Tree) -> Callable[..., tuple[Tree, Tree]]:
        def update(
            params: Tree,
            opt_state: Tree,
            grads: Tree,
            step: jax.Array,
            share: jax.Array | None,
            square: jax.Array | None,
        ) -> tuple[Tree, Tree]:
            optimizer = self.make_optimizer(params, names, step)
            clipped, _ = clip_by_global_norm(grads, self.max_norm if square is None else None, names)
            if square is not None and self.max_norm is not None:
                factor = self.max_norm / jnp.maximum(jnp.sqrt(square), self.max_norm)
                clipped = jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), grads)
            updates, opt_state = optimizer.update(clipped, opt_state, params)
            if share is not None:
                updates = jax.tree.map(lambda u: (u * share).astype(u.dtype), updates)
            return optax.apply_updates(params, updates), opt_state

        return update


@dataclass(frozen=True, eq=False)
class ExchangeRule(Rule):
    """`local_sgd`, `diloco` or `muloco`: the exchange of the strategy, with the average of the pushes.

    Attributes:
        sync: section of the config.
        of_changes: pushes are changes, (parameters that an island read) - (its own), which the average of `diloco` is
            less than the outer parameters.
    """

    sync: SyncConfig
    of_changes: bool = False

    @cached_property
    def _strategy(self) -> Strategy:
        return strategy_by_mean(self.sync)

    def init(self, params: Tree, names: Tree) -> State:
        """Returns the parameters, and what the strategy adds."""
        self._strategy.prepare(params, names)
        return {"params": params, "own": jax.jit(self._strategy.init)(params)}

    def update(self, state: State, pushes: Sequence[Tree], header: Header, names: Tree) -> State:
        """Returns the parameters that the islands continue from, and what the strategy keeps."""
        outer = state["own"].get("outer", state["params"])
        if self.of_changes:
            change = weighted_mean(pushes, header.weights())
            mean = jax.tree.map(lambda x, d: np.asarray(x, np.float32) - d, outer, change)
        else:
            mean = average(pushes, header, outer)
        own, params = self._exchange(state["own"], state["params"], mean)
        return {"params": params, "own": own}

    @cached_property
    def _exchange(self) -> Callable[..., tuple[Tree, Tree]]:
        def exchange(own: Tree, params: Tree, mean: Tree) -> tuple[Tree, Tree]:
            return exchange_by_mean(self._strategy, own, params, mean, jnp.ones(1))

        return jax.jit(exchange)
