"""A step at which all processes act together: process 0 chooses it, the others learn of it without waiting."""

from __future__ import annotations

from jaxtrain.distributed.kv_store import KeyValueStore

MARGIN = 4  # steps from the choice to the chosen one; a step's collectives keep processes within one of each other


class AgreedStep:
    """Step that all processes reach together. Every process has one; main thread only.

    Process 0 may choose only after every other process has one: from then on they look for its choice at each step.

    Args:
        store: key-value store that only this agreement uses.
        is_first: whether this is process 0.
    """

    def __init__(self, store: KeyValueStore, is_first: bool) -> None:
        self._store, self._is_first = store, is_first
        self._number = 0  # of the choice
        self.step: int | None = None

    def is_reached(self, step: int, may_choose: bool = True) -> bool:
        """Returns whether `step` is the chosen one. All call it after the same steps, in ascending order.

        Args:
            step: finished steps.
            may_choose: False to choose none yet; only process 0's counts.
        """
        if self.step is not None and step > self.step:  # it has passed; choose another
            self.step, self._number = None, self._number + 1
        if self.step is None:
            self.step = self._choose(step, may_choose) if self._is_first else self._read_choice()
        return step == self.step

    def _choose(self, step: int, may_choose: bool) -> int | None:
        if not may_choose:
            return None
        self._store.put(f"step-{self._number}", str(step + MARGIN))
        return step + MARGIN

    def _read_choice(self) -> int | None:
        text = self._store.get(f"step-{self._number}")
        return None if text is None else int(text)
