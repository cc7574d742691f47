"""Runs a config on one device and on every layout, and compares them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config import ConfigError, UserError
from jaxtrain.config.schema import LAYOUT_KEYS, Config, MeshConfig
from jaxtrain.core.components import NO_COMPONENTS, Components, with_objects
from jaxtrain.core.gradients import uses_rng
from jaxtrain.core.placement import placer, row_order
from jaxtrain.core.program import Program, build_program, model_from_config
from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.core.state import non_trainable
from jaxtrain.data.dataset import open_datasets
from jaxtrain.data.objects.open import as_dataset
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.distributed import runtime
from jaxtrain.errors import join_words
from jaxtrain.hlo.collectives import count_collectives, totals_by_axes
from jaxtrain.models.spec import has_token_rows, is_decoder
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder
from jaxtrain.verification.candidates import Candidate, candidates
from jaxtrain.verification.compare import Flat, Recording, compare, diagnose
from jaxtrain.verification.known_faults import INJECTIONS, injected, variants
from jaxtrain.verification.outcome import LayoutResult, Outcome
from jaxtrain.verification.packed_batch import Batch, RecordedBatches, packed_batch
from jaxtrain.verification.recording import Recorder
from jaxtrain.verification.replicas import ReplicaVerifier, replica_check
from jaxtrain.verification.shrink import shrink

ABBREVIATIONS = {
    "all-gather": "AG", "reduce-scatter": "RS", "all-reduce": "AR", "all-to-all": "A2A", "ragged-all-to-all": "RA2A",
    "collective-permute": "CP", "collective-broadcast": "CB",
}  # fmt: skip

DEVICES = 8  # simulated, where neither the call nor the config says how many
OF_LAYOUT = ("layout", *LAYOUT_KEYS, "sync")  # keys that are not read when another layout is


def _batches(
    config: Config, given: Config, steps: int, components: Components, progress: Callable[[int, int], None]
) -> list[Batch]:
    """Returns batches of the user's own data, or of random documents, so that text need not be here.

    Args:
        config: the shrunk config.
        given: the user's config, by whose batches objects yield.
        steps: number of batches.
        components: Python objects.
        progress: called while a cache is built.

    Raises:
        UserError: the batches of an object are smaller than the shrunk one, or there are too few.
    """
    rows = config.data.global_batch
    if components.data is not None:
        data = as_dataset(components.data, given.data.global_batch, given.seed)
        if given.data.global_batch < rows:
            message = f"{given.data.global_batch} rows are too few to compare layouts of {rows // 2} devices"
            raise UserError(f"data.global_batch: {message}; expected at least {rows}")
        return [dict(data.batch(step, slice(0, rows))) for step in range(steps)]
    if given.data.is_object:
        raise UserError("data: the run has some that was given in Python; expected it again, as `data=...`")
    if is_decoder(config.model) or config.data.is_text:
        vocab = config.model.vocab if is_decoder(config.model) else load_tokenizer(config.data.tokenizer).vocab
        return [packed_batch(step, rows, config.data.sequence, vocab or 0) for step in range(steps)]
    data = open_datasets(config.data, config.seed, progress)[0]
    return [dict(data.batch(step, slice(None))) for step in range(steps)]


def verify(
    source: ConfigSource,
    *overrides: str,
    layouts: Sequence[str] = ("all",),
    devices: int | None = None,
    steps: int = 3,
    inject: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    components: Components = NO_COMPONENTS,
) -> Outcome:
    """Compares losses, gradients and updates of the user's model, shrunk, on every layout with one device, in float32.

    Args:
        source: the config, see `core.resolve.load_config`.
        overrides: `key=value`.
        layouts: names, or `all`: every shipped layout, those in the config's folder, and the config's own.
        devices: number of simulated devices; None: `simulate` of the config if that is above 1, else 8.
        steps: of training.
        inject: a fault of `known_faults` to inject into every layout, for tests.
        progress: called with the number of layouts that are done, and of all.
        components: Python objects in place of what the config names.

    Returns:
        the result of each layout, and what was changed to shrink the model.

    Raises:
        UserError: an invalid config or layout.
    """
    if inject is not None and inject not in INJECTIONS:
        raise UserError(f"--inject: no fault `{inject}`; expected {join_words(INJECTIONS)}")
    config = with_objects(load_config(source, *overrides, paths=False, checks=()), components)
    devices = devices or (config.simulate if (config.simulate or 1) > 1 else None) or DEVICES
    small, changes = shrink(config, devices)
    others = [text for text in overrides if not text.startswith(OF_LAYOUT)]
    options: dict[str, Any] = {
        "folder": Path(source).parent if isinstance(source, (str, os.PathLike)) else None,
        "load_layout": lambda name: load_config(_without_layout(source), *others, layout=name, paths=False, checks=()),
    }
    accepted, refused = candidates(small, layouts, devices, **options)
    check = replica_check(config, small, devices)
    all_devices = runtime.start(small.simulate)
    batches = _batches(small, config, max(steps, check.steps if check else 0), components, progress)
    unsharded = small.model_copy(
        update={"mesh": MeshConfig(), "rules": {}, "zero": 0, "context_parallel": "auto", "simulate": None}
    )
    references = References(unsharded, all_devices[:1], batches[:steps], components)
    rows: list[LayoutResult] = []
    for index, candidate in enumerate(accepted):
        progress(index, len(accepted))
        reference = references(candidate.config.step.microbatches)
        row = verify_layout(candidate, batches[:steps], reference, all_devices, inject, components)
        if isinstance(row, LayoutResult):
            rows.append(row)
        else:
            refused.setdefault(candidate.layout, row)
    notes = _notes(small, references.returns_mean)
    if check is not None:
        verifier = ReplicaVerifier(check, batches, all_devices, components, inject)
        equal = verifier.equal_rows()
        rows += [*([equal] if equal else []), *verifier.layouts(small, layouts, progress, **options)]
        notes = (*notes, check.note())
    return Outcome(rows, changes, refused, devices, steps, notes)


def _without_layout(source: ConfigSource) -> ConfigSource:
    """Returns a source without the layout that is in it, and `sync`, which may need its replicas; for another one."""
    if isinstance(source, Config):
        source = source.model_dump(mode="json", exclude_unset=not source.has_layout)
    if isinstance(source, Mapping):
        return {key: value for key, value in source.items() if key not in OF_LAYOUT}
    return source


def _notes(config: Config, returns_mean: bool) -> tuple[str, ...]:
    """Returns what rows, microbatches or documents of a batch do to one another on any layout."""
    notes = []
    if returns_mean:
        notes.append("the loss returns a mean, weighted by the rows of a microbatch: microbatches give a mean of means")
    if is_decoder(config.model) and config.model.moe is not None and config.model.moe.capacity_factor is not None:
        text = "documents of a row compete for the slots of an expert, and so change one another; null keeps them apart"
        notes.append(f"model.moe.capacity_factor: {text}")
    return tuple(notes)


class References:
    """Recordings on one device, for layouts of any number of microbatches.

    A model whose rows are independent and which draws no noise must not notice how a batch is split: its reference has
    one microbatch. Another one is compared at equal microbatches.
    """

    def __init__(self, config: Config, devices: list[Any], batches: list[Batch], components: Components):
        self._config, self._devices, self._batches, self._components = config, devices, batches, components
        self._by_count: dict[int, Reference] = {}
        model_def = model_from_config(
            config, Sharder(), config.model.vocab, batches[0], components.model, components.loss
        )
        self.returns_mean = model_def.returns_mean(batches[0])
        self._is_split_invariant = (
            model_def.rows_are_independent
            and not jax.tree.leaves(model_def.non_trainable)
            and not uses_rng(model_def, model_def.params, batches[0], jax.random.key(0))
        )

    def __call__(self, microbatches: int) -> Reference:
        """Returns the reference for a number of microbatches.

        Raises:
            UserError: its loss is not finite.
        """
        count = 1 if self._is_split_invariant else microbatches
        if count not in self._by_count:
            step = self._config.step.model_copy(update={"microbatches": count})
            config = self._config.model_copy(update={"step": step})
            program = build_program(config, config.model.vocab, self._devices, self._batches[0], self._components)
            self._by_count[count] = Reference(program, self._batches)
        return self._by_count[count]


class Reference:
    """Recording on one device, and its gradients for other batches."""

    def __init__(self, program: Program, batches: list[Batch]):
        self._recorder, self._state = Recorder(program, batches[0]), program.init()
        self._batches, self.recording = batches, self._recorder.record(batches)
        bad = [(step, loss) for step, loss in enumerate(self.recording.losses) if not np.isfinite(loss)]
        if bad:
            message = f"on one device the loss of step {bad[0][0]} is {bad[0][1]}, so there is nothing to compare with"
            raise UserError(f"verify: {message}; expected a model and data that train")

    @cached_property
    def recording_as_trained(self) -> Recording:
        """Recording by code that is compiled as for training."""
        return Recorder(self._recorder.program, self._batches[0], as_trained=True).record(self._batches)

    def gradients(self, batch: Batch) -> Flat:
        """Gradients of the first step on another batch."""
        return self._recorder.gradients(self._state, batch)

    def weight(self, batch: Batch) -> float:
        """Weight of all loss terms of a batch."""
        terms, _ = self._recorder.program.evaluate(self._state["params"], batch, non_trainable(self._state))
        return float(sum(weight for _, weight in terms.values()))


def verify_layout(
    candidate: Candidate, host_batches: list[Batch], reference: Reference, devices: list[Any], inject: str | None,
    components: Components = NO_COMPONENTS,
) -> LayoutResult | str:  # fmt: skip
    """Compares one layout with the reference, or returns why the layout check refuses it for the model's tensors."""
    config = candidate.config
    try:
        with injected(inject):
            program = build_program(config, config.model.vocab, devices, next(iter(host_batches), None), components)
            place = placer(RecordedBatches(host_batches), program)
            batches = [place(step) for step in range(len(host_batches))]
            actual, expected = Recorder(program, batches[0]).record(batches), reference.recording
            if not compare(actual, expected).is_equal:  # it may be the code that compiles fast, see `Recorder`
                actual = Recorder(program, batches[0], as_trained=True).record(batches)
                expected = reference.recording_as_trained
    except ConfigError as error:
        return str(error.problems[0])
    except (UserError, jax.errors.JaxRuntimeError) as error:  # found in tracing or compiling
        return LayoutResult(candidate, None, error=" ".join(str(error).split())[:200])
    verdict = compare(actual, expected)
    if not verdict.is_equal:
        shards = {axis: program.layout.sizes[axis] for axis in program.sharder.axes(BATCH)}
        count, context = config.step.microbatches, _first_context_shard(program)
        faults = variants(reference.gradients, reference.weight, host_batches[0], shards, count, context)
        cause = diagnose(actual.gradients, expected.gradients, faults, program.layout.sizes)
        verdict = replace(verdict, cause=cause)
    return LayoutResult(candidate, verdict, collectives_text(actual.text, program.layout.sizes))


def _first_context_shard(program: Program) -> np.ndarray | None:
    """Returns the tokens of a row that the first shard of `context` holds; None if each shard holds all."""
    config, count = program.config, program.sharder.size(CONTEXT)
    if count == 1 or not has_token_rows(config.model, config.data):
        return None
    order = row_order(config.context_parallel, config.data.sequence, program.sharder)
    tokens = np.arange(config.data.sequence) if order is None else order
    return tokens[: len(tokens) // count]


def collectives_text(text: str, sizes: Mapping[str, int]) -> str:
    """`data 12 AR 0.4 MB, model 8 AG 1.2 MB`: runs and bytes per device of a compiled step."""
    totals = totals_by_axes(count_collectives(text, sizes))
    return ", ".join(
        f"{axes} {count} {ABBREVIATIONS[op]} {size / 1e6:.2g} MB" for (axes, op), (count, size) in totals.items()
    )
