"""What comes back from the durable tier to the run's folder. No JAX; process 0 alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxtrain.checkpoint.durable import Tier, fetch
from jaxtrain.checkpoint.events import Event, Fetched, NotCopied, SetAside
from jaxtrain.checkpoint.files import CheckpointError
from jaxtrain.checkpoint.reasons import reason_of
from jaxtrain.checkpoint.store import Store


class Comeback:
    """Steps of a tier, as a run that restores wants them. A tier that is away is an event.

    Attributes:
      fetched: steps that came from the tier.
    """

    def __init__(self, store: Store, tier: Tier, report: Callable[[Event], None]) -> None:
        self._store, self._tier, self._report = store, tier, report
        self._lost: set[int] = set()  # steps that could not be fetched
        self.fetched: set[int] = set()

    @property
    def place(self) -> str:
        """Where the tier is."""
        return self._tier.place

    def is_empty(self) -> bool:
        """Whether the tier holds no step. Raises CheckpointError when nobody can tell."""
        try:
            return not self._tier.steps()
        except Exception as error:  # each store has its own classes of them
            raise CheckpointError(f"{self.place} cannot be listed: {reason_of(error)}") from error

    def supply(self, step: int | None) -> int | None:
        """Fetches `step`, or the newest one that is good and newer than those in the folder. Returns it, or None."""
        here = self._store.marked()
        newest = here[-1] if here else -1
        for known in reversed(self._steps()):
            is_wanted = known > newest if step is None else known == step and step not in here
            if is_wanted and known not in self._lost and self._fetch(known):
                return known
        return None

    def forget(self, after: int) -> None:
        """Later steps are not listed any more."""
        for step in self._steps():
            if step <= after:
                continue
            try:
                self._tier.set_aside(step)
            except Exception as error:
                reason = f"the abandoned step {step} stays there, delete it by hand ({reason_of(error)})"
                self._report(NotCopied(None, self.place, reason))

    def _steps(self) -> list[int]:
        """Ascending; none, with an event, where they cannot be read."""
        try:
            return self._tier.steps()
        except Exception as error:
            self._report(NotCopied(None, self.place, f"cannot be listed ({reason_of(error)})"))
            return []

    def _fetch(self, step: int) -> bool:
        begun = time.perf_counter()
        try:
            fetch(self._tier, step, self._store)
        except Exception as error:
            self._lost.add(step)
            self._report(SetAside(step, f"in {self.place}: {reason_of(error)}", None))
            return False
        self.fetched.add(step)
        self._report(Fetched(step, self.place, time.perf_counter() - begun))
        return True
