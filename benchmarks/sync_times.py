"""Virtual time of replicas of different speeds over a slow link, by the steps that their strategy plans.

A step of replica i takes (1 + JITTER u) / speed_i, with u drawn from [0, 1) for each step, in units of an undisturbed
step; the last replica is half as fast as the others. All links are alike. In an exchange of all replicas each waits for
the last; in one of gossip for those whose messages it gets. What travels during a step starts when all have begun it,
and a replica waits for it at the end of its step. The server of `ssp` and `asp` is no bottleneck; their iterations take
their share of the link in proportion to the time that the model of clocks gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxtrain.config.schema import Config
from jaxtrain.sync.clocks import random_durations
from jaxtrain.sync.gossip.graphs import messages_of, round_number
from jaxtrain.sync.gossip.strategy import Gossip
from jaxtrain.sync.stale import Asynchronous, StaleSynchronous
from jaxtrain.sync.strategy import float32_bytes

JITTER, SEED = 0.5, 0
LINKS = {"slow": 1.0, "slowest": 10.0}  # steps that the float32 gradients of a step of `bsp` take


def speeds(replicas: int) -> tuple[float, ...]:
    """Of the replicas."""
    return (1.0,) * (replicas - 1) + (0.5,)


def steps_of(config: Config) -> int:
    """Steps in which a strategy trains on as many tokens as `bsp` does in those of the config."""
    kinds = {"ssp": StaleSynchronous, "asp": Asynchronous}
    if config.sync.strategy not in kinds:
        return config.steps
    strategy = kinds[config.sync.strategy](config.sync, config.mesh.replica)
    steps = config.steps
    while strategy.trained_batches(steps) < config.steps:
        steps += 1
    return steps


class Network:
    """The replicas of a run and their link.

    Args:
        synchronizer: of the run.
        params: shapes of the parameters.
        replicas: their number.
    """

    def __init__(self, synchronizer: Any, params: Any, replicas: int) -> None:
        self._synchronizer, self._params, self._replicas = synchronizer, params, replicas
        self._strategy = synchronizer.strategy
        self._durations = random_durations(speeds(replicas), JITTER, SEED)
        self.gradient_bytes = 2 * float32_bytes(params) * (replicas - 1) / replicas  # of a ring all-reduce
        self.values = float32_bytes(params) // 4

    def sent_bytes(self, steps: Sequence[int]) -> list[float]:
        """Bytes that a replica has sent after so many steps."""
        if isinstance(self._strategy, StaleSynchronous):
            return [self._strategy.sent_bytes(self._params, None) * self._strategy.trained_batches(s) for s in steps]
        total = np.cumsum([sum(self._sent(step)) for step in range(max(steps))])
        return [float(total[step - 1]) for step in steps]

    def wall_times(self, steps: Sequence[int], link: float) -> list[float]:
        """Virtual times at which so many steps are done by all.

        Args:
            steps: increasing numbers.
            link: steps that the gradients of `bsp` take.
        """
        if isinstance(self._strategy, StaleSynchronous):
            slower = 1 + link * self._strategy.sent_bytes(self._params, None) / self.gradient_bytes
            return [self._strategy.update(step - 1).time * slower for step in steps]
        now, found = np.zeros(self._replicas), []
        for step in range(max(steps)):
            now = self._after(step, now, link / self.gradient_bytes)
            if step + 1 in steps:
                found.append(float(now.max()))
        return found

    def _after(self, step: int, now: np.ndarray, pace: float) -> np.ndarray:
        """Times at which the replicas have finished a step that they began at `now`; `pace`: time of a byte."""
        joint, during, after = self._sent(step)
        done = now + [self._durations(replica, step) for replica in range(self._replicas)]
        if joint:
            return np.full(self._replicas, done.max() + joint * pace)
        if during:
            done = np.maximum(done, now.max() + during * pace)
        if not after:
            return done
        return np.where(self._heard(step), done, 0).max(axis=1) + after * pace

    def _heard(self, step: int) -> np.ndarray:
        """Whom each replica waits for in an exchange, [receivers, senders]."""
        if not isinstance(self._strategy, Gossip):
            return np.ones((self._replicas, self._replicas), bool)
        options, heard = self._strategy.config.gossip, np.eye(self._replicas, dtype=bool)
        exchange = (step + 1) // self._strategy.config.every - 1
        number = round_number(options.graph, self._replicas, exchange, options.seed)
        for part in messages_of(options.graph, self._replicas, number, options.edges):
            for sender, receiver in part.edges:
                heard[receiver, sender] = True
        return heard

    def _sent(self, step: int) -> tuple[float, float, float]:
        """Bytes of gradients, of what travels during the step, and of the exchange after it."""
        strategy = self._strategy.at(step)
        if not strategy.parameters_differ:
            is_compressed = strategy.combines_gradients
            return (strategy.sent_bytes(self._params, None) if is_compressed else self.gradient_bytes), 0.0, 0.0
        plan, sent = self._strategy.plan(step), self._synchronizer.sent_bytes
        if plan.is_joint:
            return self.gradient_bytes, 0.0, 0.0
        during, after = (0 if kind is None else sent(kind) for kind in (plan.send, plan.exchange))
        return 0.0, float(during), float(after)
