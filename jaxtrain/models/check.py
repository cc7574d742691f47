"""The mesh doctor on a whole config, before JAX starts. No JAX."""

from __future__ import annotations

from jaxtrain.config.errors import Problem
from jaxtrain.config.schema import Config
from jaxtrain.mesh import context
from jaxtrain.mesh.check import Names, Shape, axis_sizes, check
from jaxtrain.mesh.rules import BATCH, REPLICAS, axes_of, zero_rules
from jaxtrain.models.tensors import decoder_tensors


def check_config(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """All problems of the config's mesh and rules for its model.

    The parameters of a user's own model are not known before JAX starts; then only what does not need them is checked.

    Args:
        config: a loaded config.
        devices: number of devices; default: those of `simulate`, else not known.
        vocab: size of the vocabulary where `model.vocab` leaves it to the tokenizer; its dim is not checked for None.

    Returns:
        Problems with dotted keys and no places; `jaxtrain.config.locate` fills these in.
    """
    model = config.model
    tensors = None
    if model.type == "decoder":
        # A vocabulary of 0 is split by any number of shards: what is not known is not refused.
        tensors = decoder_tensors(model, model.vocab or vocab or 0)
    return check_placed(config, tensors, devices or config.simulate)


def check_placed(config: Config, tensors: dict[str, tuple[Shape, Names]] | None, devices: int | None) -> list[Problem]:
    """All problems of a config's mesh, rules and context for tensors given as path -> (shape, logical names)."""
    rules = zero_rules(config.rules, config.zero)
    problems = check(config.mesh, rules, tensors, activations(config), devices)
    return problems + _zero(config) + context.check(config, axis_sizes(config.mesh, devices)[0])


def _zero(config: Config) -> list[Problem]:
    """A ZeRO stage needs replicas to share the state out to."""
    if config.zero == 0 or REPLICAS in axes_of(BATCH, config.rules):
        return []
    message = f"stage {config.zero} shares the state out over the replicas of `{REPLICAS}`, and rules.batch has none"
    return [Problem("", "zero", f"{message}; expected 0, or `{REPLICAS}` in rules.batch")]


def activations(config: Config) -> dict[str, int]:
    """Logical name -> size of the activation dims of a microbatch."""
    sizes = {"batch": config.data.global_batch // config.step.accumulate}
    if config.model.type == "decoder" or config.data.type == "text":
        sizes |= {"sequence": config.data.sequence, "context": config.data.sequence}
    return sizes
