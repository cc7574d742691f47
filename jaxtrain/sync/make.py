"""The strategy of a config."""

from __future__ import annotations

from typing import Any

from jax.sharding import Mesh

from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.config.user_class import make_object
from jaxtrain.errors import UserError
from jaxtrain.sync.strategies import STRATEGIES
from jaxtrain.sync.strategy import Strategy


def make_strategy(config: SyncConfig, replicas: int, mesh: Mesh | None = None, names: Any = None) -> Strategy:
    """Returns the strategy of a config.

    Args:
        config: section `sync`.
        replicas: size of the mesh axis of the replicas, see `SyncConfig.replica_axis`.
        mesh: the mesh; None: all is on one device.
        names: logical names of the dims of the parameters.

    Raises:
        UserError: a user's own class that does not exist, fails, or is no `Strategy`; or too few replicas.
    """
    if config.is_builtin:
        strategy: Any = STRATEGIES[config.strategy](config, replicas, mesh)
    else:
        given = {"config": config, "replicas": replicas, "mesh": mesh}
        strategy = make_object("sync.strategy", config.strategy, config.options, "strategies", given)
    if not isinstance(strategy, Strategy):
        message = f"{config.strategy} makes {type(strategy).__name__}; expected a subclass of jaxtrain.Strategy"
        raise UserError(f"sync.strategy: {message}")
    if replicas < strategy.min_replicas:
        message = f"{config.strategy} needs {strategy.min_replicas} replicas; expected mesh.replica"
        raise UserError(f"sync.strategy: {message} >= {strategy.min_replicas}, and it is {replicas}")
    strategy.names = names
    return strategy


def check_optimizer(strategy: Strategy, is_schedule_free: bool) -> None:
    """Raises UserError if the optimizer keeps weights in its state, which an exchange of parameters does not reach."""
    if strategy.parameters_differ and is_schedule_free:
        message = f"{strategy.config.strategy} exchanges parameters, and a schedule-free optimizer keeps others beside"
        raise UserError(f"sync.strategy: {message} them in its state; expected another optimizer, or bsp")
