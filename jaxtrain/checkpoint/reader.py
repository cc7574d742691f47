"""Reading of checkpoints: finds, checks and restores them; renames and deletes nothing."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import orbax
from jaxtrain.checkpoint.events import Event, SetAside
from jaxtrain.checkpoint.files import MARKER, failure_reason, file_problem, size_problem
from jaxtrain.checkpoint.state_tree import describe_mismatch, flatten, make_donatable, nest, tensor_specs, unflatten
from jaxtrain.checkpoint.store import CheckpointStore, StepInfo
from jaxtrain.distributed.multihost import broadcast, first_message
from jaxtrain.errors import CheckpointError


class CheckpointReader:
    """Finds, checks and restores the checkpoints of a folder; renames and deletes nothing.

    With several processes, all of them call each method, on the main thread.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.store = CheckpointStore(directory)
        self._events: deque[Event] = deque()
        self._rejected: set[int] = set()  # damaged steps

    @property
    def directory(self) -> Path:
        """Folder of the checkpoints."""
        return self.store.directory

    def latest(self) -> int | None:
        """Returns the newest committed step, or None."""
        return self.store.latest()

    def steps(self) -> list[StepInfo]:
        """Lists the committed steps with metrics and sizes, ascending."""
        return self.store.steps()

    def poll(self) -> list[Event]:
        """Returns the events since the last call, oldest first. Never blocks."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def restore(
        self, step: int | None, abstract_state: Any, *, partial: bool = False, verify: bool = True
    ) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint into the target shardings, on any mesh and number of processes.

        Args:
          step: step to read; None: the newest good one, where a damaged one is skipped with a `SetAside` event
            (and renamed to `bad-N` by a `Checkpointer`).
          abstract_state: pytree of jax.ShapeDtypeStruct, each with its sharding.
          partial: the checkpoint may hold more tensors, e.g. `{"params": ...}` is enough to evaluate.
          verify: check the digest of every file first (each process reads its share); else only their sizes.

        Returns:
          (state, manifest). The state has the structure of `abstract_state`. Its arrays own their buffers, so
          a donating step reuses all of them.

        Raises:
          CheckpointError: none found; damaged (with an explicit `step`); or a tensor is missing, superfluous or has
            another shape or dtype, naming them.
        """
        wanted = flatten(abstract_state)
        for name, leaf in wanted.items():
            if getattr(leaf, "sharding", None) is None:
                raise CheckpointError(f"cannot restore {name}: its ShapeDtypeStruct has no sharding")
        while True:
            chosen = self._find_step(step, verify)
            if chosen is None:
                damaged = ", ".join(map(str, sorted(self._rejected, reverse=True)))
                skipped = f" (skipped as damaged: {damaged})" if damaged else ""
                raise CheckpointError(f"no usable checkpoint in {self.directory}{skipped}")
            restored, problem = self._read(chosen, abstract_state, wanted, partial)
            if restored is not None:
                return restored
            if step is not None or not self._is_deleted(chosen):
                raise CheckpointError(self._describe(chosen, f"cannot be read: {problem}"))

    def _read(
        self, step: int, abstract_state: Any, wanted: dict[str, Any], partial: bool
    ) -> tuple[tuple[Any, dict[str, Any]] | None, str | None]:
        """Reads a step. Returns ((state, manifest), None), or (None, problem) on every process if one cannot."""
        arrays, marker, mismatch, problem = {}, {}, None, None
        try:
            marker = self.store.read(step)
            mismatch = describe_mismatch(marker["tensors"], tensor_specs(abstract_state), partial)
            if mismatch is None:
                arrays = flatten(orbax.read(self.store.path(step), nest(wanted), partial))
            if self.store.read(step) != marker:  # a rewound run has saved the step again
                problem = "it was replaced while it was read; try again"
        except Exception as error:
            problem = failure_reason(error)
        if problem := first_message(problem):
            return None, problem
        if mismatch is not None:
            raise CheckpointError(f"checkpoint {step} in {self.directory} does not fit this model: {mismatch}")
        make_donatable(arrays)
        return (unflatten(arrays, abstract_state), marker["manifest"]), None

    def read_file(self, step: int, name: str) -> str | None:
        """Returns the text of a further file of a step, see `Checkpointer.save`; None if the step has none."""
        if name not in self.store.read(step)["files"]:
            return None
        try:
            return (self.store.path(step) / name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(self._describe(step, f"has a file that cannot be read: {error}")) from error

    def latest_good(self) -> int | None:
        """Returns the newest step whose every byte is intact, the same on every process; None if there is none.

        Skips damaged steps as `restore` does.
        """
        return self._find_step(None, verify=True)

    def _find_step(self, step: int | None, verify: bool) -> int | None:
        """Returns `step`, or the newest good one, after checking it. The same on every process."""
        share = (jax.process_index(), jax.process_count()) if verify else (0, 1)
        while True:
            self._fetch_missing(step)
            candidates = [marked for marked in self.store.marked() if marked not in self._rejected]
            chosen = broadcast(step if step is not None else (candidates[-1] if candidates else -1))
            if step is None and chosen < 0:
                return None
            if step is not None:
                missing = None if self.store.path(chosen).is_dir() else self.store.missing(chosen)
                if missing := first_message(missing):
                    raise CheckpointError(missing)
            problem = first_message(self.store.problem(chosen, share, file_problem if verify else size_problem))
            if problem is None:
                return chosen
            if step is not None:
                raise CheckpointError(self._describe(chosen, f"is damaged: {problem}"))
            if not self._is_deleted(chosen):
                self._reject(chosen, problem)

    def _is_deleted(self, step: int) -> bool:
        """Returns whether a step that could not be read was deleted meanwhile, and skips it then from now on.

        The same on every process.
        """
        if first_message("deleted" if self.store.is_deleted(step) else None) is None:
            return False
        self._rejected.add(step)  # its name may be listed for a while
        return True

    def _describe(self, step: int, problem: str) -> str:
        """Describes why a step cannot be used: a problem, unless the step was deleted meanwhile."""
        if not problem.endswith(f"{MARKER} is missing") and self.store.is_deleted(step):
            return f"checkpoint {step} was deleted while it was read: {self.store.missing(step)}"
        return f"checkpoint {step} in {self.directory} {problem}"

    def _fetch_missing(self, step: int | None) -> None:
        """Called before each search for `step` or the newest one; a `CheckpointReader` has only its folder."""

    def _reject(self, step: int, problem: str) -> None:
        """Skips a damaged step from now on."""
        self._rejected.add(step)
        self._events.append(SetAside(step, problem, None))
