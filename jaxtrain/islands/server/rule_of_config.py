"""The rule of the servers, from the config of the islands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optax

from jaxtrain.config.schema import Config, OptimizerConfig
from jaxtrain.config.sections.islands import STALE
from jaxtrain.core.components import Components
from jaxtrain.core.program import Program
from jaxtrain.islands.server.delayed_nesterov import DelayedNesterovRule
from jaxtrain.islands.server.rules import ExchangeRule, GradientRule, Rule
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.optim.schedules import Schedule, make_schedule


@dataclass(frozen=True, eq=False)
class ServerOptimizer:
    """Makes the optimizer of the parameters that a server holds.

    Attributes:
        config: section `optimizer`.
        rate: learning rate by step of the islands; None: the optimizer has its own.
        bias_rate: of the selection biases of experts.
        component: an optax transformation in place of the one that the config names.
    """

    config: OptimizerConfig
    rate: Schedule | None
    bias_rate: float | None
    component: Any

    def __call__(self, params: Any, names: Any, step: Any) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer of an update after some steps of the islands, which its own count does not tell."""
        rate = self.rate
        fixed: Any = None if rate is None else lambda _: rate(step)
        return make_optimizer(self.config, fixed, names, params, self.bias_rate, self.component)


def rule_of(config: Config, program: Program) -> Rule:
    """Returns the rule of a config.

    Args:
        config: of the run, not of the island's program.
        program: the island's.
    """
    if config.sync.strategy in STALE:
        bias_rate = None if config.model.moe is None else config.model.moe.bias_update_rate
        rate = learning_rate(config, program.components)
        optimizer = ServerOptimizer(config.optimizer, rate, bias_rate, program.components.optimizer)
        return GradientRule(optimizer, config.optimizer.grad_clip_norm)
    if config.sync.strategy == "async_diloco":
        return DelayedNesterovRule(config.sync.outer)
    of_changes = config.sync.island_format != "none"
    return ExchangeRule(config.sync, of_changes)


def learning_rate(config: Config, components: Components) -> Schedule | None:
    """Returns the learning rate by step; None if the optimizer has its own."""
    if components.optimizer is not None:
        return None
    return make_schedule(config.optimizer.lr, config.schedule, config.steps)
