"""An XProf trace of some steps of a run."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.trackers.goodput import Ledger


class Profile:
    """Traces the steps [start, stop) into RUN_DIR/profile; without a span it does nothing.

    Time spent on starting and writing is no step's.
    """

    def __init__(self, run_dir: Path, span: tuple[int, int] | None, ledger: Ledger):
        self.path, self._span, self._is_on, self._ledger = run_dir / "profile", span, False, ledger

    def at(self, step: int) -> Path | None:
        """Called before each step. Returns the folder of the trace when it has just been written."""
        if self._span is None:
            return None
        if self._is_on and step >= self._span[1]:
            return self.close()
        if not self._is_on and self._span[0] <= step < self._span[1]:
            import jax

            with self._ledger.phase("eval"):
                jax.profiler.start_trace(str(self.path))
            self._is_on = True
        return None

    def close(self) -> Path | None:
        """Ends a trace that is still on, and returns its folder."""
        if not self._is_on:
            return None
        import jax

        with self._ledger.phase("eval"):
            jax.profiler.stop_trace()
        self._is_on, self._span = False, None
        return self.path
