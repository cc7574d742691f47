"""Models loaded from a run or a Hugging Face folder: validation metrics, completion and streaming of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.config.run_dir import saved_config
from jaxtrain.config.schema import DataConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.core.batch_spec import example_row
from jaxtrain.core.components import NO_COMPONENTS, Components
from jaxtrain.core.evaluation import validate
from jaxtrain.core.program import Program, State, build_program, model_from_config
from jaxtrain.core.resolve import resolve
from jaxtrain.core.state import all_parameters, evaluated_kinds, evaluated_parameters, non_trainable
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError
from jaxtrain.inference.generate import Generator, decoding_sharder, padded_rows
from jaxtrain.interop.config_json import read_model_config
from jaxtrain.interop.hub import model_folder
from jaxtrain.interop.load_weights import load_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.io.terminal import plain_console
from jaxtrain.models.spec import is_decoder, vocabulary_size
from jaxtrain.optim.any_optax import is_schedule_free
from jaxtrain.sync.island_state import ConsensusSynchronizer, StreamingPeerSynchronizer
from jaxtrain.trackers.console import ConsoleTracker
from jaxtrain.trainer.setup import open_data

MAX_BATCH = 32  # prompts of a batch
# What evaluates may have fewer replicas than the strategy needs, and islands of `bsp` have a server.
WITHOUT_ROUNDS = ("sync.strategy=bsp", "islands.servers=1")
REPLACEMENT = "\ufffd"  # decoded from a character whose bytes are incomplete


def evaluate(
    directory: Path, step: int | None, batches: int | None, overrides: Sequence[str],
    components: Components = NO_COMPONENTS,
) -> dict[str, float]:  # fmt: skip
    """Returns the metrics of a checkpoint on all validation sets, with its `step`.

    Raises:
        UserError: not a run, no usable checkpoint, one that does not fit the config, or no validation data.
    """
    config, _ = resolve(saved_config(directory), *overrides, *WITHOUT_ROUNDS)
    count = config.eval.batches if batches is None else batches
    if count < 1:
        raise UserError(f"eval: expected --batches >= 1; found {count}")
    devices = runtime.start(config.simulate)
    data, sets = open_data(config, ConsoleTracker(config.steps, console=plain_console(stderr=True)), components)
    if not sets:
        message = "data.validation_fraction is 0 and eval.sets is empty, so there is nothing to evaluate on"
        raise UserError(f"{directory}: {message}")
    example = example_row(config.data, data)
    vocab = vocabulary_size(config.model, getattr(data, "vocab", None))
    program = build_program(config, vocab, devices, example, components)
    state, done = load_variables(directory, step, program)
    return {"step": done, **validate(program, sets, evaluated_parameters(state), count, non_trainable(state))}


def load_model(
    directory: Path, step: int | None, overrides: Sequence[str], components: Components = NO_COMPONENTS
) -> tuple[Program, Tokenizer, Any]:
    """Loads program, tokenizer and weights of a run's checkpoint or a Hugging Face folder, sharded by the layout.

    Needs the tokenizer, not the data.

    Raises:
        UserError: neither a run nor a Hugging Face folder, or not a language model.
    """
    if not (directory / "config.yaml").is_file():
        folder = directory if directory.exists() else model_folder(directory)
        if (folder / "config.json").is_file():
            return _huggingface(folder, step, overrides)
    config, _ = resolve(saved_config(directory), *overrides, *WITHOUT_ROUNDS, paths=False)
    tokenizer = text_tokenizer(config.model, config.data)
    vocab, devices = vocabulary_size(config.model, tokenizer.vocab), runtime.start(config.simulate)
    program = build_program(config, vocab, devices, components=components)
    return program, tokenizer, load_params(directory, step, program)[0]


def _huggingface(folder: Path, step: int | None, overrides: Sequence[str]) -> tuple[Program, Tokenizer, Any]:
    """Loads a Hugging Face folder; its tensors go directly to their shards."""
    family, section = read_model_config(folder)
    if step is not None:
        raise UserError(f"--step: {folder} is a Hugging Face folder, which has no checkpoints; leave it out")
    file = folder / "tokenizer.json"
    data: dict[str, Any] = {"tokenizer": str(file.absolute())} if file.is_file() else {}
    positions = ModelConfig.model_validate(section).learned_positions
    base = {"model": section, "data": data if positions is None else {**data, "sequence": positions}}
    config, origin = resolve(None, *overrides, base=base, paths=False)
    if origin["data.tokenizer"] == "default":
        raise UserError(f"{folder}: no tokenizer.json; expected one beside config.json, or data.tokenizer=bytes")
    program = build_program(config, section["vocab"], runtime.start(config.simulate))
    tokenizer = text_tokenizer(config.model, config.data)
    return program, tokenizer, load_weights(folder, TENSOR_MAPPINGS[family.name], all_parameters(program.one))


def complete_prompts(
    program: Program, tokenizer: Tokenizer, params: Any, prompts: Sequence[str], tokens: int, seed: int, **sampling: Any
) -> Iterator[str]:
    """Yields every prompt with its continuation, in order; `sampling`: see `jaxtrain.inference.generate.Generator`."""
    batch = min(MAX_BATCH, len(prompts))
    rows = padded_rows(program.sharder, batch)
    generator = _generator(program, tokenizer, rows, **sampling)
    for first in range(0, len(prompts), batch):
        some = prompts[first : first + batch]
        encoded = [tokenizer.encode_prompt(prompt) for prompt in some]
        new: list[list[int]] = [[] for _ in some]
        arrays = [np.asarray(ids, np.int32) for ids in encoded]
        for step in generator.batch(params, arrays, tokens, seed=seed, stops=tokenizer.stops, rows=rows):
            for ids, token in zip(new, step):
                ids += [] if token is None else [token]
        for prompt, before, ids in zip(some, encoded, new):
            yield prompt + "".join(_text(tokenizer, before, iter(ids)))


def _generator(program: Program, tokenizer: Tokenizer, rows: int, **sampling: Any) -> Generator:
    sharder = decoding_sharder(program.sharder, rows)
    vocab = program.model_def.parameters["embed"]["table"].shape[0]
    return Generator(model_from_config(program.config, sharder, vocab), tokenizer.vocab, **sampling)


def text_streamer(
    program: Program, tokenizer: Tokenizer, params: Any, **sampling: Any
) -> Callable[[str, int, int], Iterator[str]]:
    """Returns `stream(prompt, tokens, seed)`, which yields the prompt, then text as it is generated."""
    generator = _generator(program, tokenizer, 1, **sampling)

    def stream(prompt: str, tokens: int, seed: int) -> Iterator[str]:
        ids = tokenizer.encode_prompt(prompt)
        new = generator(params, np.asarray(ids, np.int32), tokens, seed=seed, stops=tokenizer.stops)
        yield prompt
        yield from _text(tokenizer, ids, new)

    return stream


def text_tokenizer(model: ModelConfig, data: DataConfig) -> Tokenizer:
    """Loads the tokenizer of a run. Raises UserError if it is not a language model."""
    if not is_decoder(model) or not data.is_text:
        raise UserError(f"generate: model {model.type} on data {data.type} is not a language model")
    return load_tokenizer(data.tokenizer)


def load_params(directory: Path, step: int | None, program: Program) -> tuple[Any, int]:
    """Loads the weights of a checkpoint, the EMA weights if it has any, with frozen ones, and its step."""
    state, done = load_variables(directory, step, program)
    return evaluated_parameters(state), done


def load_variables(directory: Path, step: int | None, program: Program) -> tuple[State, int]:
    """Loads what evaluation needs of a checkpoint, and its step."""
    one, reader = program.one, CheckpointReader(directory / "checkpoints")
    found, saved = reader.restore(step, {"step": one["step"]}, partial=True)
    wanted = {kind: one[kind] for kind in (*evaluated_kinds(one), "mutable", "step") if kind in one}
    replicas = program.saved_synchronizer(saved)
    if replicas.strategy.parameters_differ or isinstance(replicas, ConsensusSynchronizer | StreamingPeerSynchronizer):
        # what the others hold, or have agreed on, is needed, too
        wanted = replicas.abstract(wanted | {"params": one["params"]})
    done = int(jax.device_get(found["step"]))
    state, saved = reader.restore(done, wanted, partial=True, verify=False)
    if saved.get("schedule_free") and not is_schedule_free(one["opt_state"]):
        message = "its optimizer, which has the weights to evaluate with, was given in Python"
        raise UserError(f"{directory}: {message}; expected it again, as `optimizer=...`")
    return replicas.agreed(state), done


def _text(tokenizer: Tokenizer, prompt: list[int], ids: Iterator[int]) -> Iterator[str]:
    """Yields the text of tokens after a prompt as they come; holds back characters with incomplete bytes."""
    all_ids, shown = list(prompt), tokenizer.decode(prompt)
    for token in ids:
        all_ids.append(token)
        text = tokenizer.decode(all_ids)
        if not text.endswith(REPLACEMENT):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(all_ids)[len(shown) :]
