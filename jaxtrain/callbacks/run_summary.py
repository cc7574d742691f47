"""Prints a summary of a run when it begins: directory, devices and mesh, model, precision, batch and data."""

from __future__ import annotations

import io

import jax

from jaxtrain.callbacks.base import Callback, TrainerView
from jaxtrain.core.batch_spec import batch_spec, example_row
from jaxtrain.core.program import Program
from jaxtrain.data.dataset import TextDataset
from jaxtrain.io.terminal import plain_console
from jaxtrain.models.model_def import merge_trees
from jaxtrain.models.spec import has_token_rows, is_decoder
from jaxtrain.optim.state_sharding import other_arrays
from jaxtrain.pipeline.schedules.cost import cost_line
from jaxtrain.precision.policy import POLICIES
from jaxtrain.reports.layout_table import layout_report, mesh_line, model_line, parameter_rows

TABLE_WIDTH = 160  # columns of the table in layout.txt


def _state_lines(program: Program) -> list[str]:
    """Returns a line for each array of the optimizer state that has no parameter's shape: where it is."""
    lines = []
    for path, leaf in other_arrays(program.state["opt_state"], program.state["params"]):
        axes = [axis for entry in leaf.sharding.spec for axis in ([entry] if isinstance(entry, str) else entry or ())]
        placed = f"sharded over {', '.join(axes)}" if axes else "replicated"
        lines.append(f"opt_state/{path}  {leaf.dtype}{list(leaf.shape)}  {placed}")
    return lines


def _every(steps: int | None) -> str:
    return "at the end" if steps is None else f"every {steps:,} steps and at the end"


class RunSummary(Callback):
    """Prints the summary, and writes the layout of every parameter to RUN_DIR/layout.txt.

    Args:
        verbose: also print that table, and how FLOPs and the peak rate are counted.
    """

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def on_train_begin(self, trainer: TrainerView, step: int) -> None:
        """Prints the summary on process 0."""
        if jax.process_index() != 0:
            return
        program, console = trainer.program, trainer.console
        sizes, rules = program.layout.sizes, program.sharder.rules or {}
        model_def = program.model_def
        names = merge_trees(model_def.names, model_def.non_trainable_names.frozen)
        rows = parameter_rows(model_def.parameters, names, program.sharder.storage_dims, sizes)
        console.print(f"run       {trainer.dir}", mesh_line(program.layout.name, sizes, self._device_kind(trainer)))
        if program.gradients.pipeline:
            console.print(f"pipeline  {cost_line(program.gradients.pipeline.table)}")
        console.print(model_line(rows), self._precision_line(trainer), self._batch_line(trainer))
        if self._splits_a_mean(trainer):
            console.print("note      the loss returns a mean, weighted by the rows of a microbatch: a mean of means")
        if isinstance(trainer.data, TextDataset):
            console.print(*self._padding_lines(trainer, trainer.data.vocab))
            counts = f"{trainer.data.documents:,} documents, {trainer.data.tokens:,} tokens"
            console.print(f"data      {counts}; unigram entropy {trainer.data.unigram_entropy:.4f} nats per token")
        else:
            console.print(self._arrays_line(trainer))
        others = _state_lines(program)
        if others:
            console.print(
                f"optimizer {len(others)} arrays of its state have no parameter's shape; listed in layout.txt"
            )
        console.print(*self._plan_lines(trainer))
        # In a notebook rich would show the text there, not write it into the file.
        file = plain_console(file=io.StringIO(), width=TABLE_WIDTH, no_color=True, force_jupyter=False)
        file.print(*layout_report(rows, rules, sizes, TABLE_WIDTH), *others, sep="\n")
        (trainer.dir / "layout.txt").write_text(file.file.getvalue(), encoding="utf-8")  # pyright: ignore
        if self._verbose:
            console.print(*layout_report(rows, rules, sizes, console.console.width), *others)
            meter = trainer.meter
            if meter.flops is not None and meter.peak is not None:
                console.print(f"flops     {meter.flops.model:.4g} per token ({meter.flops.convention})")
                console.print(f"peak      {meter.peak}")

    def _splits_a_mean(self, trainer: TrainerView) -> bool:
        """Returns whether a step has several microbatches and the loss of each is a mean."""
        data, parts = trainer.config.data, trainer.config.step.microbatches
        if parts == 1:
            return False
        batch = batch_spec(data, data.global_batch // parts, example_row(data, trainer.data))
        return trainer.program.model_def.returns_mean(batch)

    def _padding_lines(self, trainer: TrainerView, tokens: int) -> list[str]:
        """Returns a line about rows of the decoder's embedding table that no token has."""
        if not is_decoder(trainer.config.model):
            return []
        rows = trainer.program.model_def.parameters["embed"]["table"].shape[0]
        return [f"vocab     {tokens:,} tokens, padded to {rows:,} rows (model.vocab)"] if rows > tokens else []

    def _arrays_line(self, trainer: TrainerView) -> str:
        """Returns the line about data that is no text: the arrays of a row."""
        row = example_row(trainer.config.data, trainer.data) or {}
        arrays = [f"{name} {value.dtype}{list(value.shape[1:])}" for name, value in row.items()]
        return f"data      {trainer.config.data.type}: {', '.join(arrays)} of each row"

    def _plan_lines(self, trainer: TrainerView) -> list[str]:
        """Returns lines about what the run will do by itself, and what its reader may do."""
        config, checks = trainer.config, []
        if trainer.eval_sets:
            checks.append(f"validation {_every(config.eval.every)}")
        checks.append(f"checkpoint {_every(config.checkpoint.every)}")
        return [
            f"plan      {', '.join(checks)}; Ctrl-C saves, too",
            "next      compiles the step, then shows progress; layout.txt in the run's folder lists all tensors",
        ]

    def _device_kind(self, trainer: TrainerView) -> str:
        device = jax.devices()[0]
        if device.platform != "cpu":
            return device.device_kind
        return "simulated cpu" if trainer.config.simulate else "cpu"

    def _precision_line(self, trainer: TrainerView) -> str:
        name = trainer.config.precision
        policy = POLICIES[name]
        return f"precision {name}: {policy.params} parameters, {policy.compute} compute"

    def _batch_line(self, trainer: TrainerView) -> str:
        config = trainer.config
        rows, steps = config.data.global_batch, config.steps
        if not has_token_rows(config.model, config.data):
            return f"batch     {rows:,} rows per step, {steps:,} steps"
        tokens = rows * config.data.sequence
        return f"batch     {rows:,} x {config.data.sequence:,} = {tokens:,} tokens per step, {steps:,} steps"
