"""Virtual times of benchmarks/sync.py against sums by hand."""

from __future__ import annotations

from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmark_modules import load_benchmark

import jaxtrain
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.sync.gossip.strategy import Gossip
from jaxtrain.sync.stale import StaleSynchronous
from jaxtrain.sync.strategies import LocalSGD
from jaxtrain.sync.strategy import StepPlan, Strategy

PARAMS = {"w": jax.ShapeDtypeStruct((100,), jnp.float32)}
TIMES = np.array([[1.0, 3.0], [2.0, 1.0], [2.0, 1.0], [1.0, 5.0]])  # [steps, replicas]


@pytest.fixture(scope="module")
def times() -> ModuleType:
    return load_benchmark("sync_times")


def network(times: ModuleType, strategy: Strategy, steps: np.ndarray = TIMES) -> Any:
    """Two replicas, or as many as the strategy has, whose steps take so long."""
    synchronizer = SimpleNamespace(strategy=strategy, sent_bytes=partial(strategy.sent_bytes, PARAMS))
    made = times.Network(synchronizer, PARAMS, strategy.replicas)
    made._durations = lambda replica, step: steps[step, replica]
    return made


class Bsp(Strategy):
    parameters_differ = False


class Overlapped(Strategy):
    """Sends as many bytes as gradients have during step 1."""

    def plan(self, step: int) -> StepPlan:
        return StepPlan(send="part" if step == 1 else None)


def test_all_wait_for_the_slowest_in_every_step_of_bsp(times: ModuleType):
    assert network(times, Bsp(SyncConfig(), 2)).wall_times([1, 2, 4], 10) == [13, 25, 52]


def test_first_steps_of_another_compression_send_their_bytes(times: ModuleType):

    class Compressed(Bsp):
        phases = ((3, Bsp(SyncConfig(), 2)),)
        combines_gradients = True

        def sent_bytes(self, params: Any, kind: Any) -> int:
            return 7

    assert network(times, Compressed(SyncConfig(), 2)).sent_bytes([3, 5]) == [3 * 400, 3 * 400 + 2 * 7]


def test_replicas_wait_at_exchanges_alone(times: ModuleType):
    own = network(times, LocalSGD(SyncConfig(strategy="local_sgd", every=2), 2))
    assert own.wall_times([1, 2, 3, 4], 10) == [3, 14, 16, 30]
    assert own.sent_bytes([1, 2, 4]) == [0, 400, 800]


def test_what_travels_during_a_step_begins_when_all_have_begun_it(times: ModuleType):
    assert network(times, Overlapped(SyncConfig(strategy="x", every=2), 2)).wall_times([2], 10) == [13]
    assert network(times, Overlapped(SyncConfig(strategy="x", every=2), 2)).wall_times([2], 0.5) == [4]


def test_gossip_waits_for_those_whose_messages_it_gets(times: ModuleType):
    config = SyncConfig(strategy="gossip", every=1, gossip={"graph": "exponential"})
    slow = np.array([[1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 1.0]])
    own = network(times, Gossip(config, 4), slow)
    first = own._after(0, np.zeros(4), 0.0)
    np.testing.assert_array_equal(first, [9, 1, 1, 9])  # 0 hears 3
    np.testing.assert_array_equal(own._after(1, first, 0.0), [10, 10, 10, 10])  # 2 hears 0, and 1 hears 3


def test_ssp_trains_on_as_many_tokens_as_bsp(times: ModuleType):
    sync = {"strategy": "ssp", "stale": {"bound": 3, "speeds": (1.0, 1.0, 1.0, 0.5)}}
    config = jaxtrain.load(
        "quickstart", "steps=50", sync=sync, mesh={"replica": 4, "data": 1}, layout="ddp", simulate=4
    )
    steps = times.steps_of(config)
    strategy = StaleSynchronous(config.sync, 4)
    assert strategy.trained_batches(steps - 1) < 50 <= strategy.trained_batches(steps)
    own = network(times, strategy)
    assert own.sent_bytes([steps])[0] == pytest.approx(2 * 400 * 50, rel=0.02)
    assert own.wall_times([steps], 0)[0] == strategy.update(steps - 1).time
