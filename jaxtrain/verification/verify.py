"""Runs a config on one device and on every layout, and compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import ConfigError, UserError
from jaxtrain.config.schema import LAYOUT_KEYS, Config, MeshConfig
from jaxtrain.core.placement import placer
from jaxtrain.core.program import Program, build_program
from jaxtrain.core.resolve import resolve
from jaxtrain.data.dataset import open_datasets
from jaxtrain.distributed import runtime
from jaxtrain.errors import join_words
from jaxtrain.hlo.collectives import report, summary
from jaxtrain.models.spec import is_decoder
from jaxtrain.sharding.rules import BATCH
from jaxtrain.verification.candidates import Candidate, candidates
from jaxtrain.verification.compare import Verdict, cause, compare
from jaxtrain.verification.known_faults import INJECTIONS, broken, variants
from jaxtrain.verification.recording import Flat, Runner, Seen
from jaxtrain.verification.shrink import shrunk
from jaxtrain.verification.test_batch import Batch, packed

SHORT = {
    "all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A", "ragged-all-to-all": "RA2A",
    "collective-permute": "CP", "collective-broadcast": "CB",
}  # fmt: skip


@dataclass(frozen=True)
class LayoutResult:
    """One layout on one mesh: its verdict, or why it could not run; `collectives` per step by axis."""

    candidate: Candidate
    verdict: Verdict | None
    collectives: str = ""
    error: str = ""

    @property
    def is_equal(self) -> bool:
        """True if it ran and equals one device."""
        return self.verdict is not None and self.verdict.is_equal


@dataclass(frozen=True)
class Outcome:
    """changes: what was made smaller. refused: layout -> why no mesh of these devices fits it."""

    rows: list[LayoutResult]
    changes: list[str]
    refused: dict[str, str]
    devices: int
    steps: int


class Rows:
    """Packed random documents for the decoder, as a dataset."""

    def __init__(self, config: Config):
        self._size = (config.data.global_batch, config.data.sequence, config.model.vocab or 0)

    def batch(self, step: int, rows: Any) -> Batch:
        """The rows of a step's batch."""
        return {name: value[rows] for name, value in packed(step, *self._size).items()}


def verify(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str] = ("all",),
    devices: int = 8,
    steps: int = 3,
    inject: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Losses, gradients and updates of the user's own model, shrunk, on every layout against one device, in float32.

    Args:
        path, overrides: the config, as for `jaxtrain train`.
        layouts: names, or `all`: every shipped layout, those beside the config, and the config's own.
        devices: simulated devices.
        steps: of training whose losses are compared.
        inject: a fault of `verify.faults` to put into every layout, for tests.

    Raises:
        UserError: a config or a layout that is wrong.
    """
    if inject is not None and inject not in INJECTIONS:
        raise UserError(f"--inject: no fault `{inject}`; expected {join_words(INJECTIONS)}")
    config, _ = resolve(path, *overrides, paths=False, checks=())
    small, changes = shrunk(config, devices)
    kept = [text for text in overrides if not text.startswith(("layout", *LAYOUT_KEYS))]
    found, refused = candidates(
        small, layouts, devices, folder=Path(path).parent,
        load_layout=lambda name: resolve(path, *kept, f"layout={name}", paths=False, checks=())[0],
    )  # fmt: skip
    every = runtime.start(small)
    split = Rows(small) if is_decoder(small.model) else open_datasets(small.data, small.seed, progress)[0]
    hosts = [dict(split.batch(step, slice(None))) for step in range(steps)]
    alone = small.model_copy(
        update={"mesh": MeshConfig(), "rules": {}, "zero": 0, "context_parallel": "auto", "simulate": None}
    )
    runner = Reference(build_program(alone, small.model.vocab, every[:1]), hosts)
    rows: list[LayoutResult] = []
    for index, candidate in enumerate(found):
        progress(index, len(found))
        row = check_one(candidate, split, hosts, runner, every, inject)
        if isinstance(row, LayoutResult):
            rows.append(row)
        else:
            refused.setdefault(candidate.layout, row)
    return Outcome(rows, changes, refused, devices, steps)


class Reference:
    """One device, and what it gives for any batch."""

    def __init__(self, program: Program, hosts: list[Batch]):
        self._runner, self._state = Runner(program, hosts[0]), program.init()
        self.seen = self._runner.observe(hosts)

    def gradients(self, host: Batch) -> Flat:
        """Gradients of the first step on another batch."""
        return self._runner.gradients(self._state, host)


def check_one(
    candidate: Candidate, split: Any, hosts: list[Batch], reference: Reference, devices: list[Any], inject: str | None
) -> LayoutResult | str:
    """The comparison of one layout, or the mesh doctor's reason against it, seen in the model's own tensors."""
    config = candidate.config
    try:
        with broken(inject):
            program = build_program(config, config.model.vocab, devices)
            place = placer(split, program)
            batches = [place(step) for step in range(len(hosts))]
            seen = Runner(program, batches[0]).observe(batches)
    except ConfigError as error:
        return str(error.problems[0])
    except (UserError, jax.errors.JaxRuntimeError) as error:  # what only tracing or compiling shows
        return LayoutResult(candidate, None, error=" ".join(str(error).split())[:200])
    want = reference.seen
    verdict = compare((seen.losses, want.losses), (seen.gradients, want.gradients), (seen.updates, want.updates))
    if not verdict.is_equal:
        verdict = _explained(verdict, seen, hosts[0], program, reference)
    return LayoutResult(candidate, verdict, collectives(seen.text, program.layout.sizes))


def _explained(verdict: Verdict, seen: Seen, host: Batch, program: Program, reference: Reference) -> Verdict:
    """The verdict with a cause, where one is recognised."""
    sizes = program.layout.sizes
    shards = {axis: sizes[axis] for axis in program.sharder.axes(BATCH)}
    faults = variants(reference.gradients, host, shards, program.config.step.microbatches)
    text = cause(seen.gradients, reference.seen.gradients, faults, sizes)
    return Verdict(verdict.loss, verdict.gradient, verdict.tensor, verdict.update, verdict.first, text)


def collectives(text: str, sizes: Mapping[str, int]) -> str:
    """`data 12 AR 0.4 MB, model 8 AG 1.2 MB` of a step: runs and bytes per device."""
    totals = summary(report(text, sizes))
    return ", ".join(f"{axes} {count} {SHORT[op]} {size / 1e6:.2g} MB" for (axes, op), (count, size) in totals.items())
