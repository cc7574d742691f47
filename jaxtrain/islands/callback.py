"""A run as an island: its rows, its place among the others, and its part of the exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.callbacks.base import Callback, StateSource, TrainerView
from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import island_config
from jaxtrain.config.sections.islands import STALE, WITHOUT_MEAN
from jaxtrain.core.program import Program, State
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.errors import DataError
from jaxtrain.islands.client import Door, IslandClient, ServerClient
from jaxtrain.islands.gossip.client import GossipClient
from jaxtrain.islands.gossip.synchronizer import GossipIsland
from jaxtrain.islands.messages import Hello
from jaxtrain.islands.partition import Spec
from jaxtrain.islands.peers.client import PeerClient
from jaxtrain.islands.peers.streaming import StreamingIsland
from jaxtrain.islands.peers.synchronizer import PeerRoundIsland
from jaxtrain.islands.rows import IslandRows, WholeBatches
from jaxtrain.islands.server.rule_of_config import learning_rate, rule_of
from jaxtrain.islands.synchronizer import ChangeIsland, GradientIsland, IslandSynchronizer, RoundIsland
from jaxtrain.islands.trees import flatten_dict, name
from jaxtrain.optim.optimizers import ema_init
from jaxtrain.sync.quantized_mean import BITS

Connect = Callable[[TrainerView], Door]


class IslandCallback(Callback):
    """Makes a run one of several islands.

    Args:
        island: its index.
        connect: opens the door to the coordinator.
    """

    def __init__(self, island: int, connect: Connect) -> None:
        self._island, self._connect = island, connect
        self._client: IslandClient | None = None
        self._synchronizer: IslandSynchronizer | None = None

    def program_config(self, config: Config, run_dir: Path) -> Config:
        """Returns the config of a run alone on the island's rows."""
        return island_config(config)

    def setup(self, trainer: TrainerView) -> None:
        """Gives the run the rows and the programs of the island, and joins the others."""
        if isinstance(trainer.data, IterableData):
            expected = "expected data with `batch(step, rows)`, or arrays"
            raise DataError(
                f"islands: {trainer.data.name} is read in order, and each island reads its rows; {expected}"
            )
        config, program = trainer.config, trainer.program
        rows = program.config.data.global_batch
        trainer.data = IslandRows(trainer.data, self._island, rows)
        for prefix, held_out in trainer.eval_sets.items():
            trainer.eval_sets[prefix] = WholeBatches(held_out, config.data.global_batch)
        trainer.meter.tokens = trainer.meter.tokens * rows // config.data.global_batch
        facts = {"version": trainer.manifest["versions"]["jaxtrain"], "data": str(trainer.manifest["data"])}
        island = open_island(config, program, self._island, self._connect(trainer), facts)
        island.waiting = lambda: trainer.ledger.phase("exchange")
        self._synchronizer, self._client, before = island, island.client, program.init
        trainer.program = replace(
            program, state=island.abstract(program.one), init=lambda *args: island.start(before(*args)),
            synchronizer=island,
        )  # fmt: skip
        self._client.join()
        trainer.ticker.add(self._client.beat)

    def find_state(self, trainer: TrainerView, newer_than: int) -> StateSource | None:
        """Returns what the others agree on, if they are further than the newest checkpoint of the island."""
        client, island = self._client, self._synchronizer
        assert client is not None
        assert island is not None
        if not client.has_values or client.clock <= max(newer_than, 0):
            return None
        with island.waiting():
            arrived = client.catch_up()
        if arrived is None:
            return None

        def load(abstract: State) -> State:
            state = trainer.program.init()
            state = island.with_values(state, arrived)
            if "ema" in state:
                state["ema"] = jax.jit(ema_init)(state["params"])
            return {**state, "step": jax.device_put(jnp.int32(arrived.clock), state["step"].sharding)}

        return StateSource(arrived.clock, trainer.manifest, "the other islands", load)

    def rewind(self, trainer: TrainerView, state: State, step: int) -> tuple[State, int] | None:
        """Takes an island that was left behind to the step of the others."""
        island = self._synchronizer
        if island is None or island.behind is None:
            return None
        target, island.behind = min(island.behind, trainer.config.steps), None
        if target <= step:
            return None
        trainer.trackers.event("warning", step=step, text=f"the other islands are at step {target}: continues there")
        return {**state, "step": jax.device_put(jnp.int32(target), state["step"].sharding)}, target

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Says goodbye, so that the others do not wait."""
        self.close(trainer)

    def close(self, trainer: TrainerView) -> None:
        """Says goodbye."""
        if self._synchronizer is not None:
            self._synchronizer.close()


def open_island(
    config: Config, program: Program, index: int, door: Door, facts: Mapping[str, str] = MappingProxyType({})
) -> IslandSynchronizer:
    """Returns what the host of an island runs in a step.

    Args:
        config: of the run.
        program: of its `island_config`.
        index: of the island.
        door: to the coordinator.
        facts: what it must have in common with the others, beside what the config says.
    """
    specs = tensors(config, program)
    described = {
        "sync": str(config.sync.model_dump(mode="json")),
        "islands": str(config.islands.model_dump(mode="json")),
        "seed": str(config.seed),
        "global_batch": str(config.data.global_batch),
        "model": str([(name(path), spec.shape, str(spec.dtype)) for path, spec in specs.items()]),
    }
    bits = BITS.get(config.sync.island_format, 0)
    hello = Hello(index, {**facts, **described}, specs, rule_of(config, program), bits)
    if config.sync.strategy in WITHOUT_MEAN:
        return GossipIsland(program, GossipClient(door, hello, config.sync.every), config.sync)
    if not config.islands.servers:
        peer = StreamingIsland if config.sync.strategy == "streaming_diloco" else PeerRoundIsland
        return peer(program, PeerClient(door, hello, config.sync.interval), config.sync)
    client = ServerClient(door, hello)
    if config.sync.strategy in STALE:
        return GradientIsland(program, client, config.sync, learning_rate(config, program.components))
    form = ChangeIsland if bits or config.sync.strategy == "async_diloco" else RoundIsland
    return form(program, client, config.sync)


def tensors(config: Config, program: Program) -> dict[Any, Spec]:
    """Returns the tensors that the servers hold: parameters, and in rounds mutable variables with fractions."""
    found = flatten_dict({"params": program.one["params"]})
    names = flatten_dict({"params": program.model_def.names})
    if config.sync.strategy not in STALE and "mutable" in program.one:
        mutable = flatten_dict({"mutable": program.one["mutable"]})
        found |= {path: x for path, x in mutable.items() if jnp.issubdtype(x.dtype, jnp.inexact)}
    return {path: Spec(tuple(x.shape), x.dtype, tuple(names.get(path, ()))) for path, x in found.items()}
