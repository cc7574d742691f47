"""The mesh doctor on a whole config, before JAX starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from jaxtrain.config.schema import Config
from jaxtrain.errors import Problem
from jaxtrain.models.decoder_params import decoder_tensors
from jaxtrain.sharding import context_parallel
from jaxtrain.sharding.check import Names, Shape, axis_sizes, check
from jaxtrain.sharding.rules import BATCH, EXPERT, KV_SHARED, REPLICAS, TABLE, axes_of, full_rules


def check_config(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """Returns the problems of the config's mesh and rules for its model.

    The parameters of a user's own model are not known before JAX starts; then only what does not need them is checked.

    Args:
        config: a loaded config.
        devices: number of devices; default: those of `simulate`, else not known.
        vocab: size of the vocabulary where `model.vocab` leaves it to the tokenizer; its dim is not checked for None.

    Returns:
        Problems with dotted keys and no places; `jaxtrain.config.locate` fills these in.
    """
    model, devices = config.model, devices or config.simulate
    tensors = None
    if model.type == "decoder":
        rules, sizes = full_rules(config.rules, config.zero), axis_sizes(config.mesh, devices)[0]
        kv_shards = context_parallel.shards(rules, sizes, "kv_heads") or 1
        # What the known axes do not split, more of them do not either.
        table_shards = prod(sizes.get(axis) or 1 for axis in axes_of(TABLE, rules))
        # A vocabulary of 0 is split by any number of shards: what is not known is not refused.
        tensors = decoder_tensors(model, model.vocab or vocab or 0, kv_shards, table_shards)
    return check_placed(config, tensors, devices)


def check_placed(config: Config, tensors: dict[str, tuple[Shape, Names]] | None, devices: int | None) -> list[Problem]:
    """Returns the problems of a config's mesh and rules for tensors given as path -> (shape, logical names)."""
    rules, sizes = full_rules(config.rules, config.zero), axis_sizes(config.mesh, devices)[0]
    if tensors is not None and _follows_heads(config, sizes):
        tensors = {path: (shape, _unsplit(names)) for path, (shape, names) in tensors.items()}
    problems = check(config.mesh, rules, tensors, activations(config), devices)
    problems += _zero(config) + context_parallel.check(config, sizes)
    if config.model.type == "decoder":
        problems += _dense(config) if config.model.moe is None else _experts(config)
    return problems


def _follows_heads(config: Config, sizes: Mapping[str, int | None]) -> bool:
    """Returns whether the same axes fail to split the query heads.

    Then key/value heads are not judged: which of them work is known once the query heads are split, because fewer than
    the shards are repeated.
    """
    heads, kv_heads = ({a for a in axes_of(n, config.rules) if sizes.get(a, 1) != 1} for n in ("heads", "kv_heads"))
    shards = prod(sizes.get(axis) or 1 for axis in heads)
    return config.model.type == "decoder" and heads == kv_heads and config.model.heads % shards != 0


def _unsplit(names: Names) -> Names:
    return tuple(KV_SHARED if name == "kv_heads" else name for name in names)


def _zero(config: Config) -> list[Problem]:
    """A ZeRO stage needs replicas to share the state out to."""
    if config.zero == 0 or REPLICAS in axes_of(BATCH, config.rules):
        return []
    message = f"stage {config.zero} shares the state out over the replicas of `{REPLICAS}`, and rules.batch has none"
    return [Problem("", "zero", f"{message}; expected 0, or `{REPLICAS}` in rules.batch")]


def _dense(config: Config) -> list[Problem]:
    if config.mesh.expert == 1:
        return []
    message = "the model has no experts to share out; expected 1, another layout, or model.moe"
    return [Problem("", "mesh.expert", message)]


def _experts(config: Config) -> list[Problem]:
    """Tokens travel to the experts from where they are, so the axes of the experts split the batch."""
    batch, experts = axes_of(BATCH, config.rules), axes_of(EXPERT, config.rules)
    idle = [axis for axis in experts if axis not in batch and getattr(config.mesh, axis, 1) != 1]
    if not idle:
        return []
    message = (
        f"does not have `{idle[0]}`, over which rules.{EXPERT} shares out the experts: devices along it would all send "
        f"the same tokens; expected [{', '.join((*batch, *idle))}]"
    )
    return [Problem("", f"rules.{BATCH}", message)]


def activations(config: Config) -> dict[str, int]:
    """Logical name -> size of the activation dims of a microbatch."""
    sizes = {"batch": config.data.global_batch // config.step.microbatches}
    if context_parallel.has_tokens(config):
        sizes |= {"sequence": config.data.sequence, "context": config.data.sequence}
    return sizes
