"""Specs: facts about a model that its config gives before JAX starts."""

from __future__ import annotations

from jaxtrain.config.schema import DataConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.errors import ConfigError, Problem, UserError
from jaxtrain.models.decoder_params import VOCAB_MULTIPLE, Table, decoder_tensors


class ModelSpec:
    """Facts about a model. This base class knows none.

    A model class has its spec as the class attribute `spec`; subclasses inherit it.
    """

    reads_tokens = False  # a batch has rows of tokens: tokens, targets, positions, segments, weights

    def tensors(self, model: ModelConfig, vocab: int, kv_shards: int = 1, table_shards: int = 1) -> Table | None:
        """Returns path -> (shape, logical names) of every parameter; None if unknown. See `decoder_tensors`."""
        del model, vocab, kv_shards, table_shards
        return None

    def heads(self, model: ModelConfig) -> tuple[int, int] | None:
        """Returns the numbers of query heads and of key/value heads; None if unknown."""
        del model
        return None

    def layers(self, model: ModelConfig) -> tuple[int, int] | None:
        """Returns the number of layers, and of those that must be in one pipeline stage; None if unknown."""
        del model
        return None

    def vocabulary(self, model: ModelConfig, tokenizer_size: int | None) -> int | None:
        """Returns the size of the vocabulary; None if the model has none, or it is unknown."""
        del model, tokenizer_size
        return None


class DecoderSpec(ModelSpec):
    """Facts about the decoder and its subclasses: the `model` section has all sizes.

    Plans estimate such a model by formulas, and the FLOPs, generation and Hugging Face formats of the decoder apply.
    """

    reads_tokens = True

    def tensors(self, model: ModelConfig, vocab: int, kv_shards: int = 1, table_shards: int = 1) -> Table | None:
        """Returns the decoder's parameters."""
        return decoder_tensors(model, vocab, kv_shards, table_shards)

    def heads(self, model: ModelConfig) -> tuple[int, int] | None:
        """Returns the numbers of query heads and of key/value heads."""
        return model.heads, model.kv_heads or model.heads

    def layers(self, model: ModelConfig) -> tuple[int, int] | None:
        """Returns the number of layers, and of those that must be in one pipeline stage."""
        return model.layers, model.sliding_window_pattern

    def vocabulary(self, model: ModelConfig, tokenizer_size: int | None) -> int | None:
        """Returns `model.vocab`, or else the tokenizer's size rounded up to `VOCAB_MULTIPLE`.

        Raises:
            ConfigError: `model.vocab` is smaller than the tokenizer.
        """
        if model.vocab is None:
            return None if tokenizer_size is None else -(-tokenizer_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        if tokenizer_size is not None and model.vocab < tokenizer_size:
            message = (
                f"{model.vocab} is less than the {tokenizer_size} of the tokenizer; expected at least that, or null"
            )
            raise ConfigError([Problem("", "model.vocab", message)])
        return model.vocab


DECODER_SPEC = DecoderSpec()


def model_spec(model: ModelConfig) -> ModelSpec:
    """Returns the spec of a config's model.

    A user's class is imported only if the config gives keys of the decoder, so a subclass of it.

    Raises:
        ConfigError: no such class.
    """
    if model.is_builtin:
        return DECODER_SPEC
    if not model.decoder_keys:
        return ModelSpec()
    try:
        return getattr(load_class(model.type, "model.type", "models"), "spec", None) or ModelSpec()
    except UserError as error:
        raise ConfigError([Problem("", "model.type", str(error).removeprefix("model.type: "))]) from error


def vocabulary_size(model: ModelConfig, tokenizer_size: int | None) -> int | None:
    """Returns the size of the model's vocabulary, given that of its tokenizer; None if unknown, or without one."""
    return model_spec(model).vocabulary(model, tokenizer_size)


def is_decoder(model: ModelConfig) -> bool:
    """Returns whether the model is the decoder or a subclass of it."""
    return isinstance(model_spec(model), DecoderSpec)


def has_token_rows(model: ModelConfig, data: DataConfig) -> bool:
    """Returns whether the second dim of a batch is of tokens: for text, and for models that read tokens."""
    return data.is_text or model_spec(model).reads_tokens
