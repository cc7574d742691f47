"""Commands on a run's folder: evaluate a checkpoint, generate from it, close a training run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxtrain.checkpoint import Reader
from jaxtrain.config import Config, resolve
from jaxtrain.config.errors import UserError
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.generate import Generator, decoding
from jaxtrain.models.check import check_config
from jaxtrain.models.define import define, make_env
from jaxtrain.models.tensors import vocabulary
from jaxtrain.observe.plot import loss_plot
from jaxtrain.observe.progress import Screen
from jaxtrain.pipeline.fit import check_pipeline
from jaxtrain.train import platform
from jaxtrain.train.batches import Placer, placer
from jaxtrain.train.loop import Result, validate
from jaxtrain.train.program import Program, build
from jaxtrain.train.run import open_data, saved_config

REPLACEMENT = "\ufffd"  # what decoding gives for a character whose bytes are not all there yet


@dataclass(frozen=True)
class Saved:
    """A program with the validation data that a checkpoint is scored on."""

    program: Program
    validation: Any

    def place(self, split: Any) -> Placer:
        """Device batches of a split."""
        return placer(split, self.program)


def evaluate(directory: Path, step: int | None, batches: int | None, overrides: Sequence[str]) -> dict[str, float]:
    """Validation means of a checkpoint, with its `step`.

    Raises:
        UserError: not a run, no usable checkpoint, one that does not fit the config, or nothing to evaluate on.
    """
    config, _ = resolve(saved_config(directory), *overrides, checks=[check_config, check_pipeline])
    count = config.eval.batches if batches is None else batches
    if count < 1:
        raise UserError(f"eval: expected --batches >= 1; found {count}")
    devices = platform.start(config)
    data, validation = open_data(config, Screen(config.steps, console=Console(stderr=True)))
    if validation is None:
        raise UserError(f"{directory}: data.validation is 0, so there is nothing to evaluate on")
    program = build(config, vocabulary(config, getattr(data, "vocab", None)), devices)
    params, done = weights(directory, step, program)
    return {"step": done, **validate(Saved(program, validation), params, count)}


def open_generator(
    directory: Path, step: int | None, overrides: Sequence[str], **sampling: Any
) -> Callable[[str, int, int], Iterator[str]]:
    """`stream(prompt, tokens, seed)` of a checkpoint; see `jaxtrain.generate.Generator` for the sampling.

    Needs the tokenizer, not the data.
    """
    config, _ = resolve(saved_config(directory), *overrides, paths=False, checks=[check_config, check_pipeline])
    tokenizer = _tokenizer(config)
    program = build(config, vocabulary(config, tokenizer.vocab), platform.start(config))
    return streamer(program, tokenizer, weights(directory, step, program)[0], **sampling)


def streamer(
    program: Program, tokenizer: Tokenizer, params: Any, **sampling: Any
) -> Callable[[str, int, int], Iterator[str]]:
    """`stream(prompt, tokens, seed)`: the prompt, then text as it is generated."""
    sharder = decoding(program.sharder)
    vocab = program.definition.params["embed"]["table"].shape[0]
    definition = define(program.config, make_env(program.config, sharder), vocab)
    generator = Generator(definition, tokenizer.vocab, **sampling)

    def stream(prompt: str, tokens: int, seed: int) -> Iterator[str]:
        ids = np.asarray(tokenizer.encode_batch([prompt])[0], np.int32)
        yield prompt
        yield from _text(tokenizer, ids.tolist(), generator(params, ids, tokens, seed=seed, eos=tokenizer.eos))

    return stream


def finish(config: Config, result: Result, screen: Screen) -> None:
    """The end of a training run: the loss plot, a sample, the command that goes on."""
    if jax.process_index() != 0:
        return
    if "loss" in result.metrics:
        screen.print(f"plot  {loss_plot(result.run_dir)}")
    if config.log.sample and not result.stopped_by and jax.process_count() == 1:
        params = result.state.get("ema", result.state["params"])
        stream = streamer(result.program, _tokenizer(config), params)
        text = "".join(stream(config.log.prompt, config.log.sample, config.seed))
        screen.print("sample", *("  | " + line for line in text.splitlines()))
    screen.print(f"next  {result.resume}")


def _tokenizer(config: Config) -> Tokenizer:
    if config.model.type != "decoder" or config.data.type != "text":
        raise UserError(f"generate: model {config.model.type} on data {config.data.type} is not a language model")
    return load_tokenizer(config.data.tokenizer)


def weights(directory: Path, step: int | None, program: Program) -> tuple[Any, int]:
    """A checkpoint's weights, the averaged ones where the run keeps them, and its step."""
    kind = "ema" if "ema" in program.state else "params"
    wanted = {kind: program.state[kind], "step": program.state["step"]}
    state, _ = Reader(directory / "checkpoints").restore(step, wanted, partial=True)
    return state[kind], int(jax.device_get(state["step"]))


def _text(tokenizer: Tokenizer, prompt: list[int], ids: Iterator[int]) -> Iterator[str]:
    """Text of tokens as they come after a prompt; a character whose bytes are not all there yet waits."""
    known, shown = list(prompt), tokenizer.decode(prompt)
    for token in ids:
        known.append(token)
        text = tokenizer.decode(known)
        if not text.endswith(REPLACEMENT):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(known)[len(shown) :]
