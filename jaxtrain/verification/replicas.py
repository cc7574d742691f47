"""Verification of `sync`: replicas on layouts equal replicas of one device each, and equal rows make one replica.

The layout inside a replica must not change what a strategy does: its steps and exchanges are compared with those of as
many replicas of one device each. Replicas that train on equal rows with equal noise must stay one, where the strategy
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import ConfigError, UserError
from jaxtrain.config.schema import Config, MeshConfig
from jaxtrain.config.sections.compression_checks import compresses_over_data
from jaxtrain.core.components import Components
from jaxtrain.core.placement import placer
from jaxtrain.core.program import Program, State, build_program
from jaxtrain.data.replica_rows import ReplicaRows
from jaxtrain.sharding.rules import BATCH, DATA_AXIS, REPLICA_AXIS
from jaxtrain.verification.candidates import Candidate, candidates, layout_problems
from jaxtrain.verification.compare import Recording, Verdict, compare_runs
from jaxtrain.verification.known_faults import injected
from jaxtrain.verification.outcome import LayoutResult
from jaxtrain.verification.packed_batch import Batch, RecordedBatches
from jaxtrain.verification.recording import flatten
from jaxtrain.verification.shrink import shrink_sync

EXCHANGES = 2  # in a comparison, at least


@dataclass(frozen=True)
class ReplicaComparison:
    """A small config of several replicas that is compared.

    Attributes:
        config: with `sync` and several replicas; its other axes are those of no layout.
        axis: mesh axis of the replicas.
        steps: number of steps, with `EXCHANGES` exchanges.
    """

    config: Config
    axis: str
    steps: int

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return getattr(self.config.mesh, self.axis)

    def on(self, inner: Config) -> Config:
        """Returns the config whose replicas have the layout of another one."""
        mesh = inner.mesh.model_copy(update={self.axis: self.replicas})
        data = inner.data.model_copy(update={"global_batch": self.config.data.global_batch})
        return inner.model_copy(update={"mesh": mesh, "data": data, "sync": self.config.sync})

    def of_one_replica(self, is_strategy_kept: bool) -> Config:
        """Returns the config of one replica on one device, with the rows of one."""
        data = self.config.data.model_copy(update={"global_batch": self.config.data.global_batch // self.replicas})
        sync = self.config.sync if is_strategy_kept else type(self.config.sync)()
        return self.config.model_copy(update={"mesh": MeshConfig(), "data": data, "sync": sync})

    def note(self) -> str:
        """Returns the line that says with what the rows were compared."""
        name = self.config.sync.strategy
        return (
            f"sync.strategy {name}: rows `{name}` are compared with {self.replicas} replicas of one device each, over "
            f"{self.steps} steps and their exchanges; the other rows are of plain bsp"
        )


def replica_check(config: Config, small: Config, devices: int) -> ReplicaComparison | None:
    """Returns the comparison of a config; None if its replicas agree in every step, as layouts do.

    Raises:
        UserError: the devices are too few for its replicas.
    """
    if not (config.sync.is_loose or config.sync.is_compressed):
        return None
    is_over_data = compresses_over_data(config)  # of many devices two replicas are enough, with a layout inside
    replicas = config.mesh.replica if config.mesh.replica > 1 else 2
    if devices % replicas:
        message = f"{replicas} replicas cannot share {devices} devices"
        raise UserError(f"mesh.replica: {message}; expected --simulate {2 * replicas}, for two devices each")
    rules, axis = ({BATCH: (DATA_AXIS,)}, DATA_AXIS) if is_over_data else ({}, REPLICA_AXIS)
    unsharded = {
        "rules": rules,
        "zero": 0,
        "context_parallel": "auto",
        "mesh": MeshConfig().model_copy(update={axis: replicas}),
    }
    sync = shrink_sync(config.sync)
    return ReplicaComparison(small.model_copy(update={**unsharded, "sync": sync}), axis, EXCHANGES * sync.every + 1)


class ReplicaVerifier:
    """Compares the replicas of a check with those of its reference.

    Args:
        check: the comparison.
        batches: of each step.
        devices: all simulated devices.
        components: Python objects in place of what the config names.
        inject: a fault of `known_faults`.
    """

    def __init__(
        self, check: ReplicaComparison, batches: Sequence[Batch], devices: Sequence[Any], components: Components,
        inject: str | None,
    ) -> None:  # fmt: skip
        self._check, self._batches, self._devices = check, list(batches), devices
        self._components, self._inject = components, inject

    def layouts(
        self, small: Config, names: Sequence[str], progress: Callable[[int, int], None], **options: Any
    ) -> list[LayoutResult]:
        """Compares one mesh of each layout inside a replica.

        Args:
            small: the shrunk config.
            names: of layouts, as in `candidates`.
            progress: called with the number of layouts that are done, and of all.
            options: of `candidates`.
        """
        inside = len(self._devices) // self._check.replicas
        data = small.data.model_copy(update={"global_batch": small.data.global_batch // self._check.replicas})
        mesh = small.mesh.model_copy(update={self._check.axis: 1})
        one = small.model_copy(update={"mesh": mesh, "data": data})
        found: dict[str, Candidate] = {}
        for candidate in candidates(one, names, inside, **options)[0]:
            if getattr(candidate.config.mesh, self._check.axis) > 1:
                continue
            config = self._check.on(candidate.config)
            if candidate.layout not in found and not layout_problems(config, len(self._devices)):
                found[candidate.layout] = Candidate(f"{config.sync.strategy}: {candidate.layout}", config)
        reference = self._run(self._check.config, self._devices[: self._check.replicas]) if found else None
        rows = []
        for index, candidate in enumerate(found.values()):
            progress(index, len(found))
            assert reference is not None
            rows.append(self._compare(candidate, reference))
        return rows

    def _compare(self, candidate: Candidate, reference: Recording) -> LayoutResult:
        try:
            with injected(self._inject):
                actual = self._run(candidate.config, self._devices)
        except ConfigError as error:
            return LayoutResult(candidate, None, error=str(error.problems[0]))
        except (UserError, jax.errors.JaxRuntimeError) as error:
            return LayoutResult(candidate, None, error=" ".join(str(error).split())[:200])
        return LayoutResult(candidate, self._verdict(actual, reference), actual.text)

    def equal_rows(self) -> LayoutResult | None:
        """Compares replicas that train on equal rows with one; None if the strategy does not keep them equal."""
        config, count = self._check.config, self._check.replicas
        program = self._build(config, self._devices[:count])
        strategy = program.synchronizer.strategy
        if not strategy.keeps_equal_replicas:
            return None
        rows = config.data.global_batch // count
        one = [{name: value[:rows] for name, value in batch.items()} for batch in self._batches]
        same = [{name: jnp.concatenate([value] * count) for name, value in batch.items()} for batch in one]
        actual = self._record(program, same, _with_one_key(program.init()))
        alone = self._build(self._check.of_one_replica(strategy.min_replicas == 1), self._devices[:1])
        candidate = Candidate(f"{config.sync.strategy}: equal rows", config)
        return LayoutResult(candidate, self._verdict(actual, self._record(alone, one, alone.init())), actual.text)

    def _verdict(self, actual: Recording, expected: Recording) -> Verdict:
        return compare_runs(actual, expected, is_rounded=self._check.config.sync.is_rounded)

    def _build(self, config: Config, devices: Sequence[Any]) -> Program:
        config = config.model_copy(update={"simulate": None})
        return build_program(config, config.model.vocab, devices, self._batches[0], self._components)

    def _run(self, config: Config, devices: Sequence[Any]) -> Recording:
        program = self._build(config, devices)
        return self._record(program, self._batches, program.init())

    def _record(self, program: Program, batches: Sequence[Any], state: State) -> Recording:
        """Trains with all exchanges. Updates are of what the replicas agree on, from the first step to the last."""
        data: Any = RecordedBatches(batches)
        strategy, rows = program.synchronizer.strategy, program.config.data.global_batch
        if strategy.mixes_batches:
            data = ReplicaRows(data, strategy.data_steps, rows)
        place, losses, sent = placer(data, program), [], 0.0
        before = flatten(program.agreed(state)["params"])
        for step in range(self._check.steps):
            state, metrics = program.step_at(step)(state, place(step))
            losses.append(float(metrics["loss"]))
            sent = max(sent, float(metrics.get("exchanged_bytes", 0.0)))
        after = flatten(program.agreed(state)["params"])
        updates = {path: value - before[path] for path, value in after.items()}
        return Recording(losses, {}, updates, f"an exchange sends {sent / 1e6:.2g} MB" if sent else "")


def _with_one_key(state: State) -> State:
    """Returns a state in which all replicas draw the noise of replica 0."""
    keys = state["rng"]
    if keys.ndim < 2:  # there is one replica dim less: all share it
        return state
    return state | {"rng": jax.device_put(jnp.broadcast_to(keys[:1], keys.shape), keys.sharding)}
