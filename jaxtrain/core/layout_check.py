"""Layout checks of a whole config, before JAX starts."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from jaxtrain.config.schema import Config, DataConfig, StepConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.errors import Problem, join_words
from jaxtrain.models.decoder_params import Table
from jaxtrain.models.spec import has_token_rows, is_decoder, model_spec
from jaxtrain.pipeline.check import check_pipeline
from jaxtrain.sharding import context_parallel
from jaxtrain.sharding.check import Names, axis_sizes, check
from jaxtrain.sharding.rules import BATCH, DATA_AXIS, EXPERT, KV_SHARED, TABLE, Rules, axes_of, with_implied_rules


def check_config(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """Returns the problems of the config's mesh and rules for its model.

    The parameters of a user's own model are unknown before JAX starts; then only checks that need none are made.

    Args:
        config: a loaded config.
        devices: number of devices; default: those of `simulate`, else unknown.
        vocab: size of the vocabulary if `model.vocab` leaves it to the tokenizer; None: its dim is not checked.

    Returns:
        Problems with dotted keys, without places.
    """
    model, devices = config.model, devices or config.simulate
    problems = _unread_keys(model)
    if problems:
        return problems
    rules, sizes = with_implied_rules(config.axis_rules, config.zero), axis_sizes(config.mesh, devices)[0]
    kv_shards = context_parallel.shards(rules, sizes, "kv_heads") or 1
    # Only known axes count: with more of them the table would be split further, not less.
    table_shards = prod(sizes.get(axis) or 1 for axis in axes_of(TABLE, rules))
    # Any number of shards splits a vocabulary of 0: an unknown size is not refused.
    tensors = model_spec(model).tensors(model, model.vocab or vocab or 0, kv_shards, table_shards)
    return check_tensors(config, tensors, devices)


def check_layout(config: Config, devices: int | None = None, vocab: int | None = None) -> list[Problem]:
    """Returns the problems of `check_config` and of `check_schedule`."""
    return [*check_config(config, devices, vocab), *check_schedule(config, devices)]


def check_schedule(config: Config, devices: int | None = None) -> list[Problem]:
    """Returns the problems of the config's pipeline schedule."""
    layers = model_spec(config.model).layers(config.model)
    return check_pipeline(
        config.pipeline, config.mesh, config.axis_rules, config.step.microbatches, layers,
        devices or config.simulate, uses_ring=config.context_parallel == "ring",
    )  # fmt: skip


def check_tensors(config: Config, tensors: Table | None, devices: int | None) -> list[Problem]:
    """Returns the problems of a config's mesh and rules for tensors given as path -> (shape, logical names)."""
    model, rules = config.model, with_implied_rules(config.axis_rules, config.zero)
    sizes = axis_sizes(config.mesh, devices)[0]
    heads = model_spec(model).heads(model)
    if tensors is not None and heads is not None and _kv_heads_follow(config.axis_rules, sizes, heads[0]):
        tensors = {path: (shape, _with_shared_kv(names)) for path, (shape, names) in tensors.items()}
    has_tokens = has_token_rows(model, config.data)
    problems = check(config.mesh, rules, tensors, activations(config.data, config.step, has_tokens), devices)
    problems += _zero(config.zero, config.axis_rules) + _compression(config, sizes)
    problems += context_parallel.check(
        config.context_parallel, config.step.attention, config.axis_rules, sizes, heads,
        config.data.sequence if has_tokens else None,
    )  # fmt: skip
    if is_decoder(model):
        problems += _no_experts(config) if model.moe is None else _experts(config)
    return problems


def activations(data: DataConfig, step: StepConfig, has_tokens: bool) -> dict[str, int]:
    """Returns logical name -> size of the activation dims of a microbatch."""
    sizes = {"batch": data.global_batch // step.microbatches}
    return sizes | {"sequence": data.sequence, "context": data.sequence} if has_tokens else sizes


def _unread_keys(model: ModelConfig) -> list[Problem]:
    """Returns a problem if a user's model that is no decoder is given the decoder's keys."""
    if model.is_builtin or not model.decoder_keys or is_decoder(model):
        return []
    keys = join_words((f"model.{key}" for key in model.decoder_keys), "and")
    message = f"only the decoder and its subclasses read {keys}; expected `model.options` for {model.type}"
    return [Problem("", f"model.{model.decoder_keys[0]}", message)]


def _kv_heads_follow(rules: Rules, sizes: Mapping[str, int | None], heads: int) -> bool:
    """Returns whether query heads and key/value heads have the same axes, which do not split the query heads.

    Then key/value heads are not checked: which numbers of them work depends on the shards of the query heads, because
    fewer key/value heads than shards are repeated.
    """
    axes, kv_axes = ({a for a in axes_of(n, rules) if sizes.get(a, 1) != 1} for n in ("heads", "kv_heads"))
    return axes == kv_axes and heads % prod(sizes.get(axis) or 1 for axis in axes) != 0


def _with_shared_kv(names: Names) -> Names:
    return tuple(KV_SHARED if name == "kv_heads" else name for name in names)


def _zero(stage: int, rules: Rules) -> list[Problem]:
    """Checks that there are replicas for a ZeRO stage."""
    if stage == 0 or DATA_AXIS in axes_of(BATCH, rules):
        return []
    message = f"stage {stage} shards state over the axis `{DATA_AXIS}`, which rules.batch does not have"
    return [Problem("", "zero", f"{message}; expected 0, or `{DATA_AXIS}` in rules.batch")]


def _compression(config: Config, sizes: Mapping[str, int | None]) -> list[Problem]:
    """Checks that ZeRO shards nothing over the axis along which gradients travel compressed."""
    if config.zero < 2 or config.sync.replica_axis(sizes) != DATA_AXIS:
        return []
    kind = config.sync.compress.gradients
    message = f"zero={config.zero} shards over `{DATA_AXIS}` what {kind} needs whole on each of its devices"
    return [Problem("", "zero", f"{message}; expected at most 1, or shards over mesh.fsdp")]


def _no_experts(config: Config) -> list[Problem]:
    """Checks that a dense model has no expert axis."""
    if config.mesh.expert == 1:
        return []
    return [Problem("", "mesh.expert", "the model has no experts; expected 1, another layout, or model.moe")]


def _experts(config: Config) -> list[Problem]:
    """Checks that the axes of the experts split the batch, because tokens are sent to experts from their devices."""
    batch, experts = axes_of(BATCH, config.axis_rules), axes_of(EXPERT, config.axis_rules)
    idle = [axis for axis in experts if axis not in batch and getattr(config.mesh, axis, 1) != 1]
    if not idle:
        return []
    message = f"needs `{idle[0]}` of rules.{EXPERT}: without it, devices along that axis would send the same tokens"
    return [Problem("", f"rules.{BATCH}", f"{message}; expected [{', '.join((*batch, *idle))}]")]
