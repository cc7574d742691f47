"""Token caches and tokenizers from Python. Does not import JAX."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.data import prepare
from jaxtrain.data.prepare import BuildResult, TokenizerResult
from jaxtrain.data.sources import Progress


def build_data(
    config: ConfigSource, *overrides: str, progress: Progress | None = None, **keys: Any
) -> list[BuildResult]:
    """Builds the token caches of a config's sources and validation sets, or checks and repairs them.

    Args:
        config: see `Trainer`.
        overrides: `key=value` texts.
        progress: called with (bytes done, bytes in all).
        keys: sections or keys of the config.

    Returns:
        path, documents, tokens, entropy and seconds of each cache.

    Raises:
        ConfigError: a bad config.
        DataError: bad input, or data of a user's own class.
    """
    loaded = load_config(config, *overrides, checks=(), **keys)
    return prepare.build_caches(loaded.data, progress, loaded.eval.sets.values())


def train_tokenizer(
    config: ConfigSource, *overrides: str, vocab: int = 8192, out: str | Path = "tokenizer.json",
    progress: Progress | None = None, **keys: Any,
) -> TokenizerResult:  # fmt: skip
    """Trains a byte-level BPE tokenizer on the training documents of a config's sources.

    Args:
        config: see `Trainer`; the tokenizer that it names need not exist.
        overrides: `key=value` texts.
        vocab: size of the vocabulary, including the 256 bytes and the token of the end of a text.
        out: file to write, or a folder for it.
        progress: called with (bytes read, bytes in all); merges are computed after the last call.
        keys: sections or keys of the config.

    Returns:
        path, vocabulary, documents, bytes and seconds.

    Raises:
        ConfigError: a bad config.
        DataError: bad input, no documents, or a vocabulary that is too small.
    """
    data = load_config(config, *overrides, paths=False, checks=(), **keys).data
    sources = prepare.text_sources(data)
    return prepare.train_tokenizer(sources, vocab, out, progress, data.validation_fraction, data.cache_dir)
