"""Config of a plan, checked against the devices of its target."""

from __future__ import annotations

from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.island_config import program_config
from jaxtrain.core.layout_check import check_layout
from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.data.dataset import open_dataset
from jaxtrain.data.epochs import with_steps
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.errors import Problem
from jaxtrain.models.spec import is_decoder, vocabulary_size
from jaxtrain.planning import compile
from jaxtrain.planning.hardware.targets import Target


def config_for_target(source: ConfigSource, *overrides: str, target: Target, **keys: Any) -> tuple[Config, int | None]:
    """Returns the config, checked against the devices of the target, and the vocabulary size of its decoder.

    Needs the data only for the steps of `epochs`, and the tokenizer only if `model.vocab` is not set.

    Args:
        source: see `core.resolve.load_config`.
        overrides: `key=value` texts.
        target: the devices.
        keys: sections or keys of the config.

    Raises:
        ConfigError: with every problem, one line each.
        UserError: the islands do not divide the batch.
    """

    def check(config: Config) -> list[Problem]:
        # The target decides which devices there are: those of one island.
        on_target = program_config(config).model_copy(update={"simulate": None})
        problems = check_layout(on_target, target.devices, decoder_vocabulary(config))
        if not problems and (problem := compile.dcn_problem(config.mesh.dcn, target)):
            problems.append(Problem("", "mesh.dcn", problem.removeprefix("mesh.dcn: ")))
        return problems

    config = load_config(source, *overrides, paths=False, checks=[check], **keys)
    if config.epochs is not None:
        config = with_steps(config, open_dataset(config.data, config.seed))
    return config, decoder_vocabulary(config)


def decoder_vocabulary(config: Config) -> int | None:
    """Returns the vocabulary size of the decoder: `model.vocab`, else the tokenizer's."""
    if config.model.vocab is not None or not is_decoder(config.model) or not config.data.is_text:
        return config.model.vocab
    return vocabulary_size(config.model, load_tokenizer(config.data.tokenizer).vocab)
