"""Checks between the keys of a config that need no devices; `jaxtrain.sharding.check` has those that do."""

from __future__ import annotations

import glob
import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxtrain.config.field_types import LARGEST
from jaxtrain.config.schema import (
    OBJECT,
    OPTIMIZER_KEYS,
    OPTIMIZERS,
    SCHEDULE_KEYS,
    SCHEDULES,
    TEXT_KEYS,
    Config,
    DataConfig,
    DocumentsConfig,
    OptimizerConfig,
    PluginConfig,
    ScheduleConfig,
)
from jaxtrain.config.sections.compression_checks import compresses_over_data, compression_notes, compression_problems
from jaxtrain.config.sections.islands_checks import island_problems
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.config.sections.sync import AT_OUTER, STRATEGY_KEYS, SyncConfig
from jaxtrain.config.sections.sync_checks import optimizer_problems, streaming_problems
from jaxtrain.config.user_class import USER_CLASS, Kind, is_reference, names_hint
from jaxtrain.errors import did_you_mean, format_value, join_words

SET_NAME = r"[A-Za-z][\w\-]*"
# Values that the decoder names, for `step.remat_save`. A layer's input is always saved, on the device by default.
SAVED_NAMES = ("input", "q", "k", "v", "attention", "up", "gate", "residual")
HUB = "hf://"
FAULT_MOMENTS: dict[str, tuple[str, ...]] = {  # by kind; the first is the default
    **dict.fromkeys(("kill", "stop", "hang"), ("step", "save", "commit", "committed", "logged", "data", "eval")),
    **dict.fromkeys(("slow_disk", "full_disk"), ("save",)), "corrupt": ("committed",),
    **dict.fromkeys(("nan", "flip"), ("step",)),
}  # fmt: skip
COLUMNS = (".parquet", ".arrow", ".feather")  # what pyarrow reads


class Conflict(NamedTuple):
    """A problem between keys.

    Attributes:
        keys: the key that the message is about, then the others that take part.
        message: what is wrong and what would be right.
    """

    keys: tuple[str, ...]
    message: str


def cross_problems(config: Config) -> Iterator[Conflict]:
    """Yields the problems between keys of a config whose single values are valid."""
    yield from _types(config)
    if config.model.uses_decoder_keys:
        yield from _heads(config.model)
        yield from _decoder(config.model)
        yield from _positions(config)
        yield from _experts(config.model)
    if config.data.is_text:
        yield from _sources(config.data)
    for check in (_steps, _sync, _remat, _evaluation, _checkpoints, _faults):
        yield from check(config)


def path_problems(config: Config) -> Iterator[Conflict]:
    """Yields the files that the config reads and the packages it needs that do not exist here."""
    yield from _packages(config)
    if not config.data.is_text:
        return
    tokenizer = config.data.tokenizer
    if tokenizer != "bytes" and not os.path.isfile(os.path.expanduser(tokenizer)):
        hint = did_you_mean(tokenizer, ["bytes"]) or "; expected `bytes` or the path of a tokenizer.json"
        yield Conflict(("data.tokenizer",), f"no such file: {format_value(tokenizer)}{hint}")
    for key, source in _documents(config):
        path = root = os.path.expanduser(source.path)
        while glob.has_magic(root):
            root = os.path.dirname(root)
        is_folder_of_glob = root != path and os.path.isdir(root or ".")
        is_elsewhere = source.path == "stdlib" or "://" in source.path
        if not (is_elsewhere or is_folder_of_glob or os.path.exists(path) or os.path.exists(f"{path}.idx")):
            hint = did_you_mean(source.path, ["stdlib"])
            yield Conflict((key,), f"no such file or folder: {format_value(root or path)}{hint}")


def _documents(config: Config) -> Iterator[tuple[str, DocumentsConfig]]:
    """Yields the documents of a config with the key of their path."""
    for index, source in enumerate(config.data.sources):
        yield f"data.sources.{index}.path", source
    for name, one in config.eval.sets.items():
        yield f"eval.sets.{name}.path", one


def _packages(config: Config) -> Iterator[Conflict]:
    """Yields the packages of extras that the config needs and that are not installed."""
    log, durable = config.log, config.checkpoint.durable or ""
    needed = [
        ("log.wandb", "wandb", "wandb", log.wandb),
        ("log.mlflow", "mlflow", "mlflow", log.mlflow),
        ("checkpoint.durable", "fsspec", "remote", "://" in durable and not durable.startswith("file://")),
    ]
    if config.data.is_text:
        needed.append(("data.tokenizer", "tokenizers", "data", config.data.tokenizer != "bytes"))
        for path, source in _documents(config):
            is_columns = source.format in ("parquet", "arrow") or source.path.endswith(COLUMNS)
            is_records = source.format == "arrayrecord" or source.path.endswith((".arrayrecord", ".array_record"))
            is_hub = source.path.startswith(HUB)
            needed += [
                (path, "pyarrow", "data", is_columns),
                (path, "datasets", "hf", is_hub),
                (path, "fsspec", "remote", "://" in source.path and not is_hub),
                (path, "array_record", "arrayrecord", is_records),
                (path, "zstandard", "data", source.path.endswith(".zst")),
            ]
    for key, package, extra, is_needed in needed:
        if is_needed and importlib.util.find_spec(package) is None:
            yield Conflict((key,), f"needs the package {package}: pip install 'jaxtrain[{extra}]'")


def _types(config: Config) -> Iterator[Conflict]:
    """Checks that built-in types have keys and a user's own class has options."""
    types: tuple[tuple[str, Kind, ModelConfig | DataConfig, str, bool], ...] = (
        ("model", "models", config.model, "decoder", config.model.is_builtin),
        ("data", "data", config.data, "text", config.data.is_text),
    )
    for name, kind, part, builtin, is_builtin in types:
        if is_builtin and part.options:
            message = f"options are for a user's own class; `{builtin}` takes its keys directly"
            yield Conflict((f"{name}.options", f"{name}.type"), message)
        elif not is_builtin and part.type != OBJECT and not is_reference(part.type, kind):
            hint = names_hint(part.type, kind, [builtin])
            message = f"expected `{builtin}` or a class as `package.module:Class`; found {format_value(part.type)}"
            yield Conflict((f"{name}.type",), message + hint)
    plugins: tuple[tuple[str, Kind, Sequence[PluginConfig]], ...] = (
        ("callbacks", "callbacks", config.callbacks), ("log.trackers", "trackers", config.log.trackers),
    )  # fmt: skip
    for name, kind, members in plugins:
        for index, member in enumerate(members):
            if not is_reference(member.type, kind):
                message = f"expected a class as `package.module:Class`; found {format_value(member.type)}"
                yield Conflict((f"{name}.{index}.type",), message + names_hint(member.type, kind, []))
    for name, reference in config.eval.metrics.items():
        if not re.fullmatch(USER_CLASS, reference):
            message = f"expected a function as `package.module:function`; found {format_value(reference)}"
            yield Conflict((f"eval.metrics.{name}",), message)
    for index, group in enumerate(config.optimizer.groups):
        if group.weight_decay is not None and not config.optimizer.is_builtin:
            message = f"`{config.optimizer.name}` has its own decay; expected its options, or one of {OPTIMIZERS}"
            yield Conflict((f"optimizer.groups.{index}.weight_decay", "optimizer.name"), message)
    yield from _functions("optimizer", config.optimizer, OPTIMIZERS, OPTIMIZER_KEYS)
    yield from _functions("schedule", config.schedule, SCHEDULES, SCHEDULE_KEYS)
    keys = [f"data.{key}" for key in TEXT_KEYS if key in config.data.model_fields_set]
    if keys and not config.data.is_text:
        message = f"only the built-in `text` reads {join_words(keys, 'and')}; expected `data.options`"
        yield Conflict((*keys, "data.type"), message)


def _functions(
    name: str, part: OptimizerConfig | ScheduleConfig, builtin: tuple[str, ...], keys: tuple[str, ...]
) -> Iterator[Conflict]:
    """Checks that built-in optimizers and schedules have keys, and functions of optax or a user's own have options."""
    if part.is_builtin:
        if part.options:
            message = f"options are for those of optax or a user's own; `{part.name}` takes its keys directly"
            yield Conflict((f"{name}.options", f"{name}.name"), message)
    elif part.name != OBJECT and not part.name.startswith("optax.") and not is_reference(part.name, "optimizers"):
        message = f"expected {join_words(builtin, 'or')}, `optax.NAME`, or a function as `package.module:name`"
        hint = names_hint(part.name, "optimizers", list(builtin))
        yield Conflict((f"{name}.name",), f"{message}; found {format_value(part.name)}{hint}")
    else:
        given = [key for key in keys if getattr(part, key) != type(part).model_fields[key].default]
        if given:
            message = f"`{part.name}` does not read {join_words(given, 'and')}; expected `{name}.options`"
            yield Conflict((*(f"{name}.{key}" for key in given), f"{name}.name"), message)


def divisors(number: int, near: int, count: int = 3) -> list[int]:
    """Returns the divisors of `number` nearest to `near`, ascending."""
    number = min(number, 2**31)
    all_divisors = {d for low in range(1, math.isqrt(number) + 1) if number % low == 0 for d in (low, number // low)}
    return sorted(sorted(all_divisors, key=lambda d: (abs(d - near), d))[:count])


def _heads(model: ModelConfig) -> Iterator[Conflict]:
    """Checks heads, key/value heads and the size of a head."""
    heads, kv = model.heads, model.kv_heads
    if kv is not None and heads % kv:
        sizes = join_words(divisors(heads, kv))
        message = f"{heads} query heads cannot be shared by {kv} key/value heads; expected a divisor, e.g. {sizes}"
        yield Conflict(("model.kv_heads", "model.heads"), message)
    if model.head_dim is None and model.embed % heads:
        sizes = join_words(divisors(model.embed, heads))
        message = f"embed {model.embed} does not split into {heads} heads; expected e.g. {sizes}, or set model.head_dim"
        yield Conflict(("model.heads", "model.embed", "model.head_dim"), message)
        return
    size = model.head_dim or model.embed // heads
    if size % 2 and model.learned_positions is None:
        keys = ("model.head_dim",) if model.head_dim else ("model.heads", "model.embed", "model.head_dim")
        near = join_words(n for n in (size - 1, size + 1) if n)
        yield Conflict(keys, f"rotary embeddings need an even head size, not {size}; expected e.g. {near}")


def _decoder(model: ModelConfig) -> Iterator[Conflict]:
    """Checks the sliding window and the scaling of rotary embeddings."""
    for name, is_set in (
        ("sliding_window_pattern", model.sliding_window_pattern > 1),
        ("sliding_window_rope_theta", model.sliding_window_rope_theta is not None),
    ):
        if is_set and model.sliding_window is None:
            message = "applies to layers with a sliding window; set model.sliding_window too"
            yield Conflict((f"model.{name}", "model.sliding_window"), message)
    scaling = model.rope_scaling
    if scaling and scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = "model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"
        message = f"expected less than {high} {scaling.high_freq_factor:g}; found {scaling.low_freq_factor:g}"
        yield Conflict((low, high), message)


def _positions(config: Config) -> Iterator[Conflict]:
    """Checks that no sequence is longer than the table of learned positions."""
    positions, key = config.model.learned_positions, "model.learned_positions"
    if positions is None:
        return
    for name in ("rope_scaling", "sliding_window_rope_theta"):
        if getattr(config.model, name) is not None:
            yield Conflict((f"model.{name}", key), "learned positions are not rotary; expected null")
    for name, tokens, limit in (
        ("data.sequence", config.data.sequence, positions),
        ("log.sample_tokens", config.log.sample_tokens, max(0, positions - 2)),  # with the prompt and a BOS
    ):
        if tokens > limit:
            yield Conflict(
                (name, key), f"expected at most {limit} tokens for {positions} positions ({key}); found {tokens}"
            )


def _experts(model: ModelConfig) -> Iterator[Conflict]:
    """Checks the sizes of a mixture of experts."""
    moe = model.moe
    if moe is None:
        return
    count, top_k = moe.num_experts, moe.top_k
    if top_k > count:
        message = f"a token cannot choose {top_k} of {count} experts; expected at most {count}"
        yield Conflict(("model.moe.top_k", "model.moe.num_experts"), message)
        return
    if top_k == 1 and moe.normalize_gates:
        message = "gates of a single choice are always 1, so the router gets no gradient; expected false, or top_k > 1"
        yield Conflict(("model.moe.normalize_gates", "model.moe.top_k"), message)
    if moe.capacity_factor is not None and moe.capacity_factor * top_k > count:
        message = (
            f"capacity {moe.capacity_factor:g} x {top_k} / {count} gives an expert more slots than tokens; "
            f"expected at most {count / top_k:g}, or null to drop none"
        )
        yield Conflict(("model.moe.capacity_factor", "model.moe.top_k", "model.moe.num_experts"), message)
    if moe.bias_update_rate is not None and top_k == count:
        message = f"every token goes to all {count} experts; expected null, or a lower top_k"
        yield Conflict(("model.moe.bias_update_rate", "model.moe.top_k"), message)
    if "mlp" in model.biases:
        yield Conflict(("model.biases", "model.moe"), "experts have no biases; expected it without mlp")


def _sync(config: Config) -> Iterator[Conflict]:
    """Checks the strategy by which replicas agree, and that it has replicas, steps and rules that fit it."""
    sync, key = config.sync, "sync.strategy"
    if not sync.is_builtin and not is_reference(sync.strategy, "strategies"):
        names = list(STRATEGY_KEYS)
        message = f"expected {join_words(names)}, or a class as `package.module:Class`"
        hint = names_hint(sync.strategy, "strategies", names)
        yield Conflict((key,), f"{message}; found {format_value(sync.strategy)}{hint}")
        return
    if sync.strategy in ("local_sgd", "post_local") and config.mesh.replica == 1 and not config.islands.has_islands:
        message = f"{sync.strategy} averages several replicas; expected mesh.replica > 1, or diloco, which works with 1"
        yield Conflict((key, "mesh.replica"), message)
    if sync.strategy == "post_local" and sync.bsp_steps == 0:
        yield Conflict(("sync.bsp_steps", key), "post_local begins with bsp; expected at least 1, or local_sgd")
    found = [*streaming_problems(sync, divisors), *optimizer_problems(sync, config.optimizer.name)]
    yield from (Conflict(*each) for each in (*found, *island_problems(config), *compression_problems(config)))
    if config.epochs is None:
        yield from round_problems(config)
    if sync.is_loose or (sync.is_compressed and not config.islands.has_islands):
        yield from _replica_rules(config)


def round_problems(config: Config) -> Iterator[Conflict]:
    """Checks that an exchange follows the last step where outer parameters, which are those of an exchange, count."""
    steps, every = config.steps, config.sync.every
    if config.sync.strategy not in AT_OUTER or steps % every == 0:
        return
    near = join_words(f"steps={n}" for n in (steps // every * every, (steps // every + 1) * every) if n)
    lost = f"the last {steps % every} of {steps} steps would be in no exchange"
    expected = f"expected {near}, or sync.every={divisors(steps, every, count=1)[0]}"
    yield Conflict(("sync.every", "steps"), f"{lost}, one every {every}; {expected}")


def _replica_rules(config: Config) -> Iterator[Conflict]:
    """Checks that replicas, which hold parameters or gradients of their own, split the batch and nothing else."""
    axis = "data" if compresses_over_data(config) else "replica"
    for name, axes in config.axis_rules.items():
        if axis in axes and (name != "batch" or axes[0] != axis):
            expected = "as the first axis of `batch`" if name == "batch" else "only in `batch`, or in no rule"
            own = "parameters" if config.sync.is_loose else "gradients"
            message = f"replicas of sync.strategy {config.sync.strategy} hold {own} of their own"
            yield Conflict((f"rules.{name}", "sync.strategy"), f"{message}; expected `{axis}` {expected}")


def _remat(config: Config) -> Iterator[Conflict]:
    """Checks the names of saved values. A user's own model has its own names."""
    remat, saved = config.step.remat, config.step.remat_save
    if saved and remat != "full":
        message = f"remat={remat} saves no named values; expected remat=full with remat_save"
        yield Conflict(("step.remat_save", "step.remat"), message)
    if config.step.remat_modules and config.model.uses_decoder_keys:
        message = "the decoder rematerialises its layers itself; expected this of a user's model alone"
        yield Conflict(("step.remat_modules", "model.type"), message)
    elif config.step.remat_modules and remat == "none":
        yield Conflict(("step.remat_modules", "step.remat"), "remat=none recomputes nothing; expected full or dots")
    for name in saved if config.model.uses_decoder_keys else ():
        if name not in SAVED_NAMES:
            hint = did_you_mean(name, SAVED_NAMES) or f"; expected {join_words(SAVED_NAMES)}"
            yield Conflict(("step.remat_save",), f"the decoder has no value {format_value(name)} to save{hint}")


def _evaluation(config: Config) -> Iterator[Conflict]:
    """Checks samples, the metric that ranks checkpoints, and the names of validation sets."""
    if config.log.sample_tokens and not (config.model.uses_decoder_keys and config.data.is_text):
        yield Conflict(("log.sample_tokens", "model.type"), "only the built-in decoder on text generates; expected 0")
    best, names = config.checkpoint.best_metric, _eval_metrics(config)
    if config.checkpoint.keep_best and config.model.uses_decoder_keys and names and best not in names:
        message = f"validation has no metric {format_value(best)}; expected {join_words(names)}"
        yield Conflict(("checkpoint.best_metric",), message + did_you_mean(best, names))
    for name in config.eval.sets:
        if not re.fullmatch(SET_NAME, name):
            message = "not a name of a validation set; expected letters, digits, `_` and `-`, a letter first"
            yield Conflict((f"eval.sets.{name}",), message)
    if config.eval.sets and not config.data.is_text:
        message = f"data.type {config.data.type} has no tokenizer for them; expected none, or data.type `text`"
        yield Conflict(("eval.sets", "data.type"), message)


def _eval_metrics(config: Config) -> list[str]:
    """Returns the names of a decoder's validation metrics; empty if a run does not validate."""
    is_text = config.data.is_text
    prefixes = [f"eval/{name}/" for name in config.eval.sets]
    if not is_text or config.data.validation_fraction > 0:
        prefixes.insert(0, "eval/")
    kinds = ("loss", "cross_entropy", "perplexity", *(["bits_per_byte"] if is_text else []), *config.eval.metrics)
    return [prefix + kind for prefix in prefixes for kind in kinds]


def _checkpoints(config: Config) -> Iterator[Conflict]:
    """Checks the copies of checkpoints, and that a rollback has checkpoints."""
    durable, every, copy_every = config.checkpoint.durable, config.checkpoint.every, config.checkpoint.durable_every
    if durable == "":
        yield Conflict(("checkpoint.durable",), "is empty; expected a folder, a URL, or null")
    if copy_every is not None and durable is None:
        message = "copies need a destination; set checkpoint.durable too"
        yield Conflict(("checkpoint.durable_every", "checkpoint.durable"), message)
    elif copy_every is not None and (every is None or copy_every % every):
        message = f"expected a multiple of checkpoint.every ({every or 'null'}); found {copy_every}"
        yield Conflict(("checkpoint.durable_every", "checkpoint.every"), message)
    if config.guard.spike.action == "rollback" and every is None:
        message = "rollback restores a checkpoint; expected checkpoint.every to be set, or skip"
        yield Conflict(("guard.spike.action", "checkpoint.every"), message)


def _faults(config: Config) -> Iterator[Conflict]:
    """Checks that each fault can happen at its moment of a step."""
    for index, fault in enumerate(config.debug.faults):
        moments = FAULT_MOMENTS[fault.kind]
        if fault.at is not None and fault.at not in moments:
            message = f"{fault.kind} cannot happen at {fault.at}; expected {join_words(moments)}"
            yield Conflict((f"debug.faults.{index}.at",), message)


def _steps(config: Config) -> Iterator[Conflict]:
    """Checks the microbatches of a step, that steps or epochs are given, and the schedule over all steps."""
    batch, microbatches, steps = config.data.global_batch, config.step.microbatches, config.steps
    if batch % microbatches:
        sizes = join_words(divisors(batch, microbatches))
        message = f"{microbatches} microbatches do not divide data.global_batch {batch}; expected e.g. {sizes}"
        yield Conflict(("step.microbatches", "data.global_batch"), message)
    if config.epochs is not None:
        if "steps" in config.model_fields_set:
            message = f"{config.epochs} epochs and {steps} steps are both given; expected one of them"
            yield Conflict(("epochs", "steps"), message)
        return  # the data tells the steps
    yield from schedule_problems(config)


def schedule_problems(config: Config) -> Iterator[Conflict]:
    """Checks the learning-rate schedule over all steps."""
    steps, schedule = config.steps, config.schedule
    warmup = min(schedule.warmup_steps, steps)
    if schedule.name == "wsd" and warmup < steps < warmup + schedule.decay_fraction * steps:
        message = f"a decay over {schedule.decay_fraction:g} of {steps} steps does not fit after {warmup} of warm-up"
        yield Conflict(("schedule.decay_fraction", "schedule.warmup_steps", "schedule.name", "steps"), message)


def config_notes(config: Config) -> list[str]:
    """Returns a line for each value that has less effect than it seems."""
    steps, warmup, notes = config.steps, config.schedule.warmup_steps, []
    if warmup > steps and config.epochs is None:
        notes.append(f"schedule.warmup_steps: {warmup} is cut to the {steps} steps of the run")
    best = config.checkpoint.best_metric
    is_ranked_by_eval = config.checkpoint.keep_best > 0 and best.startswith("eval/")
    default = SyncConfig()
    unread = [name for name in config.sync.unread() if getattr(config.sync, name) != getattr(default, name)]
    notes += [f"sync.{name}: sync.strategy {config.sync.strategy} does not read it" for name in unread]
    notes += compression_notes(config)
    if not _eval_metrics(config):
        if config.eval.every is not None:
            notes.append("eval.every: no data is held out for validation (data.validation_fraction 0, no eval.sets)")
        if is_ranked_by_eval:
            notes.append(f"checkpoint.keep_best: no checkpoint is ranked, because no validation gives {best}")
    elif is_ranked_by_eval and config.eval.every is None:
        notes.append(f"checkpoint.keep_best: only the last checkpoint is ranked by {best}; set eval.every to rank more")
    return notes


def _sources(data: DataConfig) -> Iterator[Conflict]:
    """Checks that at every step at least one source has a weight above 0."""
    if not data.sources:
        yield Conflict(("data.sources",), "is empty; expected at least one source, e.g. [stdlib]")
        return
    weights = [source.weight for source in data.sources]
    for index, steps in enumerate(weights):
        for step in steps:
            if not 0 <= step <= LARGEST:
                yield Conflict(
                    (f"data.sources.{index}.weight",), f"expected steps from 0 on; found {format_value(step)}"
                )
    for step in sorted({step for steps in weights for step in steps if step >= 0})[:200]:
        if not any(weight_at(steps, step) for steps in weights):
            message = f"expected a weight above 0 from step {step} on; every source has weight 0"
            yield Conflict(("data.sources",), message)
            return


def weight_at(weights: dict[int, float], step: int) -> float:
    """Returns the weight of a source at a step."""
    return weights[max(start for start in weights if 0 <= start <= step)]
