"""Finding, checking and restoring checkpoints; renames and deletes nothing."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.events import Event, SetAside
from jaxtrain.checkpoint.files import reason_of
from jaxtrain.checkpoint.snapshot import mismatch, named, nest, rematerialise, tensors, unnest
from jaxtrain.checkpoint.store import CheckpointStore, StepInfo
from jaxtrain.distributed.agreement import agreed, first_text
from jaxtrain.errors import CheckpointError


class Reader:
    """Finds, checks and restores the checkpoints of a folder; renames and deletes nothing.

    With several processes each method is called by all of them, on the main thread.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.store = CheckpointStore(directory)
        self._events: deque[Event] = deque()
        self._passed: set[int] = set()

    @property
    def directory(self) -> Path:
        """The folder."""
        return self.store.directory

    def latest(self) -> int | None:
        """Newest committed step, or None."""
        return self.store.latest()

    def steps(self) -> list[StepInfo]:
        """Committed steps with metrics and sizes, ascending."""
        return self.store.steps()

    def poll(self) -> list[Event]:
        """Returns the events since the last call, oldest first. Never blocks."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False, verify: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint straight into the target shardings, on any mesh and number of processes.

        Args:
          step: which; None for the newest good one. Then a damaged step is passed over with a `SetAside` event
            (and renamed `bad-N` by a `Checkpointer`) and the one before it is tried.
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its sharding. The result has its structure.
          partial: the checkpoint may hold more, e.g. `{"params": ...}` is enough to evaluate.
          verify: check size and xxh3 digest of every file first (each process reads its share).

        Returns: (state, manifest). The arrays own their buffers, so that a donating step reuses all of them.

        Raises:
          CheckpointError: none found; damaged (with an explicit `step`); or a tensor is missing, superfluous or has
            another shape or dtype, naming them.
        """
        wanted = named(abstract_state)
        for name, leaf in wanted.items():
            if getattr(leaf, "sharding", None) is None:
                raise CheckpointError(f"cannot restore {name}: its ShapeDtypeStruct has no sharding")
        chosen = self._choose(step, verify)
        if chosen is None:
            passed = ", ".join(map(str, sorted(self._passed, reverse=True)))
            tried = f" (passed over as damaged: {passed})" if passed else ""
            raise CheckpointError(f"no usable checkpoint in {self.directory}{tried}")
        marker = self.store.marker(chosen)
        difference = mismatch(marker["tensors"], tensors(abstract_state), partial)
        if difference:
            raise CheckpointError(f"checkpoint {chosen} in {self.directory} does not fit this model: {difference}")
        try:
            flat = named(orbax.read(self.store.path(chosen), nest(wanted), wanted, partial))
        except Exception as error:
            message = f"checkpoint {chosen} in {self.directory} cannot be read: {reason_of(error)}"
            raise CheckpointError(message) from error
        rematerialise(flat)
        return unnest(nest(flat), abstract_state), marker["manifest"]

    def choose(self) -> int | None:
        """The newest good step, every file of which was read and is as it was written; None where there is none.

        Damaged ones are passed over as by `restore`. The same on every process.
        """
        return self._choose(None, verify=True)

    def _choose(self, step: int | None, verify: bool) -> int | None:
        """The step to read: verified, the same on every process."""
        while True:
            self._supply(step)
            candidates = [known for known in self.store.marked() if known not in self._passed]
            chosen = agreed(step if step is not None else (candidates[-1] if candidates else -1))
            if chosen < 0:
                return None
            if step is not None:
                missing = None if self.store.path(chosen).is_dir() else f"no checkpoint {chosen} in {self.directory}"
                if missing := first_text(missing):
                    raise CheckpointError(f"{missing}: there is {[info.step for info in self.steps()] or 'none'}")
            share = (jax.process_index(), jax.process_count()) if verify else (0, 1 << 30)
            problem = first_text(self.store.problem(chosen, share))
            if problem is None:
                return chosen
            if step is not None:
                raise CheckpointError(f"checkpoint {chosen} in {self.directory} is damaged: {problem}")
            self._reject(chosen, problem)

    def _supply(self, step: int | None) -> None:
        """Called before each look for `step`, or for the newest. A `Reader` has what lies in its folder."""

    def _reject(self, step: int, problem: str) -> None:
        """A `Reader` only remembers that a step is damaged."""
        self._passed.add(step)
        self._events.append(SetAside(step, problem, None))
