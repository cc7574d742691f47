"""The checkpoints of a run from Python. Changes nothing but by `prune` and `rewind`, and does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from jaxtrain.checkpoint import durable
from jaxtrain.checkpoint.files import MARKER, Lock
from jaxtrain.checkpoint.store import CheckpointStore, largest_first
from jaxtrain.config.run_dir import saved_config
from jaxtrain.core.resolve import resolve
from jaxtrain.errors import CheckpointError, UserError
from jaxtrain.io import html
from jaxtrain.reports import checkpoint_listing as listing
from jaxtrain.reports.checkpoint_listing import TITLES, CheckpointRow, checkpoint_cells

ReadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Pruned:
    """Names of the folders that `prune` deleted, or would delete, and their size in bytes."""

    names: tuple[str, ...]
    bytes: int


class Checkpoints(Sequence[CheckpointRow]):
    """The checkpoints of a run as they were when this was made: complete ones, damaged and unfinished ones.

    Args:
        folder: folder of a run, or of steps, such as a durable copy.
        is_durable: list the copies in `checkpoint.durable` of the run's config instead.

    Raises:
        UserError: there are none, or the config has no durable copies.
    """

    def __init__(self, folder: Path, is_durable: bool = False) -> None:
        inner = folder / "checkpoints"
        self._store = CheckpointStore(inner if inner.is_dir() else folder)
        rows = listing.list_checkpoints(self._store) if self._store.directory.is_dir() else []
        if not rows:
            raise UserError(f"{folder}: no checkpoints found; expected a run directory")
        self._tier = _durable_tier(folder) if is_durable else durable.FolderTier(self._store.directory)
        self._rows = _durable_rows(self._tier) if is_durable else rows

    @overload
    def __getitem__(self, index: int) -> CheckpointRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CheckpointRow]: ...
    def __getitem__(self, index: int | slice) -> CheckpointRow | Sequence[CheckpointRow]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def steps(self) -> list[int]:
        """Lists the steps whose bytes `verify` reads, as they are now."""
        return self._tier.steps()

    def inspect(self, step: int | None = None) -> dict[str, Any]:
        """Returns what was recorded with a step: time, bytes, metrics, tensors (shape, dtype), files, who wrote it.

        Args:
            step: default: the newest good one.

        Raises:
            CheckpointError: no such step, or it is damaged.
        """
        step = self._store.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"no good checkpoint in {self._store.directory}; `jaxtrain checkpoint ls` shows why")
        return self._store.marker(step)

    def verify(self, *steps: int, progress: ReadProgress = lambda done, total: None) -> dict[int, list[str]]:
        """Reads every byte of steps and compares it with what was written.

        Args:
            steps: default: all.
            progress: called with (bytes read, bytes in all) of a step.

        Returns:
            the problems of each step, none for a good one; without steps that the run deleted meanwhile.

        Raises:
            CheckpointError: no such step.
        """
        existing, found = self.steps(), dict[int, list[str]]()
        for step in steps:
            if step not in existing:
                raise CheckpointError(f"no checkpoint {step} in {self._tier.location}; it has {existing or 'none'}")
        for step in steps or existing:
            problems = _problems(self._tier, step, progress)
            if not problems or step in self.steps():
                found[step] = problems
        return found

    def prune(
        self, keep: int | None = None, steps: Collection[int] = (), *, set_aside: bool = False, dry_run: bool = False
    ) -> Pruned:
        """Deletes steps atomically, never the last good one.

        Args:
            keep: delete all but so many of the newest, and the best.
            steps: delete these.
            set_aside: delete the folders `bad-N` and `old-N`, too.
            dry_run: delete nothing.

        Raises:
            UserError: nothing is named that would be deleted.
            CheckpointError: no such step, no good one would stay, or the run is training.
        """
        if not steps and keep is None and not set_aside:
            raise UserError("checkpoint prune: expected keep, steps or set_aside")
        store = self._store
        with ExitStack() as stack:
            if not dry_run:
                lock = Lock(store.directory / ".lock", advice="its own checkpoint.keep prunes; end it")
                stack.callback(lock.release)
            chosen = listing.steps_to_prune(store, keep, steps)
            if chosen and listing.newest_intact(store, chosen) is None:
                last = listing.newest_intact(store, ())
                why = "none of them is good" if last is None else f"{last} is the last good one"
                raise CheckpointError(f"{store.directory}: not deleted, {why}; expected a good checkpoint to stay")
            aside = [row.name for row in listing.list_checkpoints(store) if row.state == listing.ASIDE]
            names = [*map(str, chosen), *(aside if set_aside else ())]
            files = (path for name in names for path in (store.directory / name).rglob("*") if path.is_file())
            freed = sum(path.stat().st_size for path in files)
            if not dry_run:
                store.delete(*names)
        return Pruned(tuple(names), freed)

    def rewind(self, step: int) -> list[int]:
        """Sets the checkpoints after a step aside, as `old-N`, so that the run is resumed from that step.

        They are deleted once the run saves a step as late as theirs again. The same for copies in `checkpoint.durable`;
        an object store cannot rename, so there they are deleted at once.

        Returns:
            the steps that were set aside, ascending.

        Raises:
            CheckpointError: no such step, or the run is training.
        """
        store = self._store
        if step not in store.marked():
            raise CheckpointError(f"no checkpoint {step} in {store.directory}; it has {store.marked() or 'none'}")
        lock = Lock(store.directory / ".lock", advice="end it first")
        try:
            later = store.set_aside_after(step)
            run = store.directory.parent
            if (run / "config.yaml").exists() and (tier := _durable_tier_or_none(run)) is not None:
                for abandoned in reversed([copied for copied in tier.steps() if copied > step]):
                    tier.set_aside(abandoned)
        finally:
            lock.release()
        return list(later)

    def _repr_html_(self) -> str:
        return html.table(TITLES, [checkpoint_cells(row) for row in self._rows])


def checkpoints(run: str | Path, *, is_durable: bool = False) -> Checkpoints:
    """Lists the checkpoints of a run, which may be training.

    Args:
        run: folder of the run, or of steps.
        is_durable: list the copies in `checkpoint.durable`.

    Returns:
        a sequence of steps, which can be inspected, verified and pruned; the run can be set back to one.

    Raises:
        UserError: there are none.
    """
    return Checkpoints(Path(run).expanduser(), is_durable)


def _durable_tier(folder: Path) -> durable.DurableTier:
    """Opens the durable tier of the run's config. Raises UserError if it has none."""
    if (tier := _durable_tier_or_none(folder)) is None:
        raise UserError(f"{folder}: the config sets no checkpoint.durable; so there are no such copies")
    return tier


def _durable_tier_or_none(folder: Path) -> durable.DurableTier | None:
    config, _ = resolve(str(saved_config(folder)), paths=False, checks=())
    location = durable.run_location(config.checkpoint.durable, folder)
    return None if location is None else durable.open_tier(location)


def _durable_rows(tier: durable.DurableTier) -> list[CheckpointRow]:
    """Lists the steps of the durable tier by their markers."""
    rows: list[CheckpointRow] = []
    for step in tier.steps():
        try:
            rows.append(CheckpointRow(str(step), step, listing.GOOD, content=tier.content(step)))
        except CheckpointError as error:
            rows.append(CheckpointRow(str(step), step, listing.DAMAGED, str(error)))
    return rows


def _problems(tier: durable.DurableTier, step: int, progress: ReadProgress) -> list[str]:
    """Returns all problems of a step."""
    try:
        content = tier.content(step)
    except FileNotFoundError:
        return [f"{MARKER} is missing"]
    except CheckpointError as error:
        return [str(error)]
    return list(_file_problems(tier, step, content, progress))


def _file_problems(
    tier: durable.DurableTier, step: int, content: dict[str, Any], progress: ReadProgress
) -> Iterator[str]:
    done = 0
    for name, expected in largest_first(content["files"]):
        problem = tier.file_problem(step, name, expected)
        done += expected[0]
        progress(done, content["bytes"])
        if problem:
            yield problem
