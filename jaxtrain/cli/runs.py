"""Commands on a run's folder: evaluate a checkpoint, generate from it, close a training run."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import Reader
from jaxtrain.config import Config, resolve
from jaxtrain.data.dataset import TextDataset
from jaxtrain.generate import Generator, decoding
from jaxtrain.models.check import check_config
from jaxtrain.models.define import define, make_env
from jaxtrain.observe.plot import loss_plot
from jaxtrain.observe.progress import Screen
from jaxtrain.train.batches import Placer
from jaxtrain.train.loop import Result, validate
from jaxtrain.train.program import Program
from jaxtrain.train.run import prepare, saved_config


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint's weights (the averaged ones where the run keeps them) with program and data."""

    program: Program
    data: Any
    validation: Any
    params: Any
    step: int

    def place(self, split: Any) -> Placer:
        """Device batches of a split."""
        data = self.program.config.data
        return Placer(split.batch, self.program.sharder, data.global_batch, isinstance(split, TextDataset))


def open_saved(directory: Path, step: int | None, overrides: Sequence[str]) -> Saved:
    """Reads a checkpoint's weights onto this machine's devices.

    Raises:
        ValueError: not a run, no usable checkpoint, or one that does not fit the config.
    """
    config, _ = resolve(saved_config(directory), *overrides, checks=[check_config])
    program, data, validation = prepare(config, Screen(config.steps))
    kind = "ema" if "ema" in program.state else "params"
    wanted = {kind: program.state[kind], "step": program.state["step"]}
    state, _ = Reader(directory / "checkpoints").restore(step, wanted, partial=True)
    return Saved(program, data, validation, state[kind], int(jax.device_get(state["step"])))


def evaluate(directory: Path, step: int | None, batches: int | None, overrides: Sequence[str]) -> dict[str, float]:
    """Validation means of a checkpoint, with its `step`."""
    saved = open_saved(directory, step, overrides)
    if saved.validation is None:
        raise ValueError(f"{directory}: data.validation is 0, so there is nothing to evaluate on")
    count = saved.program.config.eval.batches if batches is None else batches
    if count < 1:
        raise ValueError(f"eval: expected --batches >= 1; found {count}")
    return {"step": saved.step, **validate(saved, saved.params, count)}


def open_generator(
    directory: Path, step: int | None, overrides: Sequence[str], **sampling: Any
) -> Callable[[str, int, int], Iterator[str]]:
    """`stream(prompt, tokens, seed)` of a checkpoint; see `jaxtrain.generate.Generator` for the sampling."""
    saved = open_saved(directory, step, overrides)
    return streamer(saved.program, saved.data, saved.params, **sampling)


def streamer(program: Program, data: Any, params: Any, **sampling: Any) -> Callable[[str, int, int], Iterator[str]]:
    """`stream(prompt, tokens, seed)`: the prompt, then text as it is generated.

    Raises:
        ValueError: the model is not a language model.
    """
    config = program.config
    if config.model.type != "decoder" or not isinstance(data, TextDataset):
        raise ValueError(f"generate: model {config.model.type} on data {config.data.type} is not a language model")
    sharder = decoding(program.sharder)
    vocab = program.definition.params["embed"]["table"].shape[0]
    definition = define(config, make_env(config, sharder), vocab)
    generator = Generator(definition, data.vocab, **sampling)

    def stream(prompt: str, tokens: int, seed: int) -> Iterator[str]:
        ids = data.tokenizer.encode_batch([prompt])[0]
        ids = np.asarray(ids if len(ids) else [data.eos], np.int32)  # a document begins after an end
        yield prompt
        yield from _text(data.tokenizer, generator(params, ids, tokens, seed=seed, eos=data.eos))

    return stream


def finish(config: Config, result: Result, screen: Screen) -> None:
    """The end of a training run: the loss plot, a sample, the command that goes on."""
    if jax.process_index() != 0:
        return
    if result.metrics:
        screen.print(f"plot  {loss_plot(result.run_dir)}")
    if config.log.sample and not result.stopped_by and jax.process_count() == 1:
        stream = streamer(result.program, result.data, result.state.get("ema", result.state["params"]))
        text = "".join(stream(config.log.prompt, config.log.sample, config.seed))
        screen.print("sample", *("  | " + line for line in text.splitlines()))
    screen.print(f"next  {result.resume}")


def _text(tokenizer: Any, ids: Iterator[int]) -> Iterator[str]:
    """Text of tokens as they come; a character whose bytes are not all there yet waits."""
    known: list[int] = []
    shown = ""
    for token in ids:
        known.append(token)
        text = tokenizer.decode(known)
        if not text.endswith(codecs.decode(b"\xff", "utf-8", "replace")):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(known)[len(shown) :]
