"""Check for silent data corruption: a step computed twice must give the same bits, and replicas must be equal."""

from __future__ import annotations

import socket
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.callbacks.base import Callback, StepFn, TrainerView
from jaxtrain.callbacks.health.bit_digest import device_digests, differing_replicas
from jaxtrain.checkpoint.state_tree import flatten, host_sharding
from jaxtrain.core.program import State
from jaxtrain.errors import CorruptionError

SHOWN = 3  # tensors and devices that a message names


class ReplicaCheck(Callback):
    """Computes every `every`-th step twice, and compares replicas then and before every save.

    The second computation starts from a copy in host memory, after the result of the first is deleted, so that devices
    never hold two states. Both run the same compiled program. On a GPU it is deterministic only with
    XLA_FLAGS=--xla_gpu_deterministic_ops=true. Does nothing without a mesh.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._mesh: Mesh | None = None

    def setup(self, trainer: TrainerView) -> None:
        """Prepares the digests of the state."""
        self._mesh, self._abstract = trainer.program.sharder.mesh, trainer.program.state
        if self._mesh is None:
            return
        self._sums = device_digests(self._abstract, self._mesh)
        self._names = list(flatten(self._abstract))

    def run_step(self, trainer: TrainerView, step_fn: StepFn, state: State, batch: Any, step: int) -> Any | None:
        """Runs the step after `step` twice, if it is due.

        Raises:
            CorruptionError: replicas or the two results differ.
        """
        if self._mesh is None or (step + 1) % self._every:
            return None
        self._compare_replicas(trainer, state, step)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        held = jax.device_put(state, jax.tree.map(host_sharding, shardings), may_alias=False)
        jax.block_until_ready(held)
        first, _ = step_fn(state, batch)
        before = self._read(first)
        for leaf in jax.tree.leaves(first):
            leaf.delete()
        second, metrics = step_fn(jax.device_put(held, shardings, may_alias=False), batch)
        differs = before != self._read(second)
        if differs.any():
            names = [name for name, column in zip(self._names, differs.T) if column.any()]
            devices = np.flatnonzero(differs.any(axis=1)).tolist()
            self._fail(trainer, step + 1, "recompute", names, devices, "computed twice")
        return second, metrics

    def allows_save(self, trainer: TrainerView, state: State, step: int, is_last: bool) -> bool:
        """Compares replicas before a save. Raises CorruptionError if they differ."""
        if self._mesh is not None:
            self._compare_replicas(trainer, state, step)
        return True

    def _compare_replicas(self, trainer: TrainerView, state: State, step: int) -> None:
        assert self._mesh is not None
        differing = differing_replicas(self._read(state), self._abstract, self._mesh)
        if differing:
            devices = sorted({device for _, positions in differing for device in positions})
            names = [name for name, _ in differing]
            self._fail(trainer, step, "replicas", names, devices, "compared with its replicas")

    def _read(self, state: State) -> np.ndarray:
        return np.asarray(jax.device_get(self._sums(state)))

    def _fail(
        self, trainer: TrainerView, step: int, kind: str, names: list[str], positions: list[int], how: str
    ) -> None:
        assert self._mesh is not None
        is_everywhere = len(positions) == self._mesh.devices.size > 1
        devices = [self._mesh.devices.flat[position] for position in positions]
        where = _join_some([_describe(device) for device in devices])
        everywhere = "; all devices are affected, so no single one can be named" if is_everywhere else ""
        trainer.trackers.event("corruption", step=step, found_by=kind, devices=where, tensors=_join_some(names))
        trainer.callbacks.each(Callback.on_rewind, trainer, -1)  # in-memory checkpoints were not checked
        text = f"{_join_some(names)}, {how}, differs on {where}{everywhere}"
        raise CorruptionError(f"silent corruption at step {step}: {text}; {trainer.last_good_checkpoint()}")


def _describe(device: Any) -> str:
    """Describes a device, its process, and the host if it is this one."""
    host = f" on {socket.gethostname()}" if device.process_index == jax.process_index() else ""
    return f"device {device.id} ({device.device_kind}, process {device.process_index}{host})"


def _join_some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more
