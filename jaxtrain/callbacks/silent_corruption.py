"""The check for silent corruption: a step computed twice gives the same bits, and replicas hold the same."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxtrain.callbacks.bit_digest import digests, odd_ones
from jaxtrain.errors import CorruptionError

State = dict[str, Any]
Step = Callable[[State, Any], tuple[State, dict[str, jax.Array]]]
SHOWN = 3  # tensors and devices that a message names


class Check:
    """Checks every `every`-th step, and replicas also before every save.

    The second computation starts from a copy that waits in host memory, and what came of the first is deleted before
    it, so that devices never hold two states. The program is the same one, compiled once. On a GPU it is deterministic
    where XLA is told so: XLA_FLAGS=--xla_gpu_deterministic_ops=true.

    Args:
        abstract: of the train state, with shardings of `mesh`.
        report: `event(kind, **fields)` of the observers.
        last_good: what there is to go on from, in words.
    """

    def __init__(
        self, every: int, abstract: State, mesh: Mesh, report: Callable[..., None], last_good: Callable[[], str]
    ) -> None:
        self._every, self._abstract, self._mesh = every, abstract, mesh
        self._report, self._last_good = report, last_good
        self._sums = digests(abstract, mesh)
        self._names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in _leaves(abstract)]

    def due(self, done: int) -> bool:
        """Whether the step after `done` steps is checked."""
        return (done + 1) % self._every == 0

    def step(self, step: Step, state: State, batch: Any, done: int) -> tuple[State, dict[str, jax.Array]]:
        """The step after `done` steps, computed twice.

        Raises:
            CorruptionError: replicas, or both results, differ.
        """
        self.replicas(state, done)
        held = jax.device_put(state, _on_host(self._abstract), may_alias=False)
        placed = jax.tree.map(lambda leaf: leaf.sharding, self._abstract)
        jax.block_until_ready(held)
        first, _ = step(state, batch)
        before = self._read(first)
        for leaf in jax.tree.leaves(first):
            leaf.delete()
        second, metrics = step(jax.device_put(held, placed, may_alias=False), batch)
        differs = before != self._read(second)
        if differs.any():
            names = [name for name, column in zip(self._names, differs.T) if column.any()]
            self._fail(done + 1, "recompute", names, np.flatnonzero(differs.any(axis=1)).tolist(), "computed twice")
        return second, metrics

    def replicas(self, state: State, done: int) -> None:
        """Compares what should be equal on several devices. Raises CorruptionError where it is not."""
        odd = odd_ones(self._read(state), self._abstract, self._mesh)
        if odd:
            devices = sorted({device for _, places in odd for device in places})
            self._fail(done, "replicas", [name for name, _ in odd], devices, "compared with its replicas")

    def _read(self, state: State) -> np.ndarray:
        return np.asarray(jax.device_get(self._sums(state)))

    def _fail(self, step: int, kind: str, names: list[str], places: list[int], how: str) -> None:
        devices = [self._mesh.devices.flat[place] for place in places]
        where = _some([_named(device) for device in devices])
        everywhere = "; all devices are affected, so that none can be blamed" if _all(places, self._mesh) else ""
        self._report("corruption", step=step, found_by=kind, devices=where, tensors=_some(names))
        said = f"{_some(names)}, {how}, differs on {where}{everywhere}"
        raise CorruptionError(f"silent corruption at step {step}: {said}; {self._last_good()}")


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_leaves_with_path(tree)


def _all(places: list[int], mesh: Mesh) -> bool:
    return len(places) == mesh.devices.size > 1


def _named(device: Any) -> str:
    """A device, its process, and the host where that is this one."""
    host = f" on {socket.gethostname()}" if device.process_index == jax.process_index() else ""
    return f"device {device.id} ({device.device_kind}, process {device.process_index}{host})"


def _some(items: list[str]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return ", ".join(items[:SHOWN]) + more


def _on_host(abstract: State) -> Any:
    """Shardings in pinned host memory; on CPU devices as they are."""

    def one(leaf: Any) -> Any:
        device = next(iter(leaf.sharding.device_set))
        return leaf.sharding if device.platform == "cpu" else leaf.sharding.with_memory_kind("pinned_host")

    return jax.tree.map(one, abstract)
