"""Callbacks of every training run."""

from __future__ import annotations

from jaxtrain.callbacks.base import Callback
from jaxtrain.callbacks.exchange_monitor import ExchangeMonitor
from jaxtrain.callbacks.fault_injection import FaultInjection
from jaxtrain.callbacks.goodput import GoodputRecorder
from jaxtrain.callbacks.health.guard import StepGuard
from jaxtrain.callbacks.health.run_folder import RunFolderWatch
from jaxtrain.callbacks.health.silent_corruption import ReplicaCheck
from jaxtrain.callbacks.health.stragglers import StragglerDetector
from jaxtrain.callbacks.health.watchdog import HangWatchdog
from jaxtrain.callbacks.memory_checkpoint import MemoryCheckpoint
from jaxtrain.callbacks.profiler import Profiler
from jaxtrain.callbacks.run_summary import RunSummary
from jaxtrain.config import Config
from jaxtrain.config.user_class import make_object
from jaxtrain.errors import UserError
from jaxtrain.islands.member import this_island


def default_callbacks(
    config: Config, *, profile: tuple[int, int] | None = None, deadline: float | None = None, verbose: bool = False
) -> list[Callback]:
    """Builds the callbacks of a run, in the order in which they are called.

    Args:
        config: config of the run.
        profile: (start, stop) of the steps to trace for XProf into RUN_DIR/profile.
        deadline: seconds that a step or its data may hang before the process is ended; None: from measured step times;
            0: never.
        verbose: print the layout of every parameter.

    Raises:
        UserError: a class that the config names does not exist or fails.
    """
    callbacks: list[Callback] = [HangWatchdog(deadline), RunSummary(verbose), GoodputRecorder(), StragglerDetector()]
    if config.islands.has_islands:
        callbacks.insert(0, this_island(config))  # the others see the program that it makes
    callbacks += [RunFolderWatch(), ExchangeMonitor()]
    if profile is not None:
        callbacks.append(Profiler(profile))
    callbacks += [FaultInjection(), StepGuard(config.guard.spike)]  # faults happen before a state is judged
    if config.guard.replica_check_every is not None:
        callbacks.append(
            ReplicaCheck(config.guard.replica_check_every)
        )  # compares the replicas of states that the guard lets pass only
    return [*callbacks, MemoryCheckpoint(), *_own_callbacks(config)]


def _own_callbacks(config: Config) -> list[Callback]:
    """Builds the callbacks that the config names.

    Raises:
        UserError: no such class, it fails, or it is no `Callback`.
    """
    members: list[Callback] = []
    for index, plugin in enumerate(config.callbacks):
        where = f"callbacks.{index}"
        made = make_object(where, plugin.type, plugin.options, "callbacks")
        if not isinstance(made, Callback):
            message = f"{plugin.type} makes {type(made).__name__}; expected a subclass of jaxtrain.Callback"
            raise UserError(f"{where}.type: {message}")
        members.append(made)
    return members
