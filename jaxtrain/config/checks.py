"""Checks between the keys of one config that need no devices; `jaxtrain.sharding.check` holds those that do."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtrain.config.field_types import LARGEST
from jaxtrain.config.schema import TEXT_KEYS, USER_CLASS, Config, DataConfig, DocumentsConfig, ModelConfig
from jaxtrain.errors import did_you_mean, format_value, join_words

SET_NAME = r"[A-Za-z][\w\-]*"
# Values that the decoder names, for `step.remat_save`. A layer's input is kept anyway, on the device if not on the
# host.
SAVED_NAMES = ("input", "q", "k", "v", "attention", "up", "gate", "residual")
HUB = "hf://"
FAULT_MOMENTS: dict[str, tuple[str, ...]] = {  # by kind; the first is the default
    **dict.fromkeys(("kill", "stop", "hang"), ("step", "save", "commit", "committed", "logged", "data", "eval")),
    **dict.fromkeys(("slow_disk", "full_disk"), ("save",)), "corrupt": ("committed",),
    **dict.fromkeys(("nan", "flip"), ("step",)),
}  # fmt: skip
COLUMNS = (".parquet", ".arrow", ".feather")  # what pyarrow reads


@dataclass(frozen=True)
class Conflict:
    """A problem between keys.

    Attributes:
        keys: the key to blame, then the others that take part.
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
    yield from _batch(config)
    yield from _schedule(config)
    yield from _sets(config)
    if config.data.is_text:
        yield from _sources(config.data)
    yield from _remat(config)
    yield from _watching(config)
    yield from _durable(config)
    yield from _guard(config)


def path_problems(config: Config) -> Iterator[Conflict]:
    """Files the config reads and packages it needs that are not there."""
    yield from _packages(config)
    data = config.data
    if not data.is_text:
        return
    if data.tokenizer != "bytes" and not os.path.isfile(os.path.expanduser(data.tokenizer)):
        hint = did_you_mean(data.tokenizer, ["bytes"]) or "; give `bytes` or the path of a tokenizer.json"
        yield Conflict(("data.tokenizer",), f"no such file: {format_value(data.tokenizer)}{hint}")
    for key, source in _documents(config):
        if "\0" in source.path:
            yield Conflict((key,), "a file name can not hold a NUL character")
            continue
        path = os.path.expanduser(source.path)
        is_elsewhere = source.path == "stdlib" or "://" in source.path
        if is_elsewhere or os.path.exists(path) or os.path.exists(f"{path}.idx"):
            continue
        root = path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        if root != path and os.path.isdir(root or "."):
            continue
        hint = did_you_mean(source.path, ["stdlib"])
        yield Conflict((key,), f"no such file or folder: {format_value(root or path)}{hint}")


def _documents(config: Config) -> Iterator[tuple[str, DocumentsConfig]]:
    """Yields the documents of a config with the key of their path."""
    for index, source in enumerate(config.data.sources):
        yield f"data.sources.{index}.path", source
    for name, one in config.eval.sets.items():
        yield f"eval.sets.{name}.path", one


def _packages(config: Config) -> Iterator[Conflict]:
    """Packages of the extras that the config asks for."""
    log, durable = config.log, config.checkpoint.durable or ""
    needed = [("log.wandb", "wandb", "wandb", log.wandb), ("log.mlflow", "mlflow", "mlflow", log.mlflow)]
    needed.append(("checkpoint.durable", "fsspec", "remote", "://" in durable and not durable.startswith("file://")))
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
    for key, package, extra, is_asked in needed:
        if is_asked and importlib.util.find_spec(package) is None:
            yield Conflict((key,), f"needs the package {package}: pip install 'jaxtrain[{extra}]'")


def _types(config: Config) -> Iterator[Conflict]:
    """Checks that built-in types get keys, and a user's own class gets options."""
    for name, part, builtin, is_builtin in (
        ("model", config.model, "decoder", config.model.is_builtin),
        ("data", config.data, "text", config.data.is_text),
    ):
        if is_builtin and part.options:
            message = f"options are for a user's own class; `{builtin}` takes its keys directly"
            yield Conflict((f"{name}.options", f"{name}.type"), message)
        elif not is_builtin and not re.fullmatch(USER_CLASS, part.type):
            hint = did_you_mean(part.type, [builtin])
            message = (
                f"expected `{builtin}` or a class as `package.module:Class`; found {format_value(part.type)}{hint}"
            )
            yield Conflict((f"{name}.type",), message)
    given = [key for key in TEXT_KEYS if key in config.data.model_fields_set]
    if given and not config.data.is_text:
        keys = tuple(f"data.{key}" for key in given)
        message = f"only the built-in `text` reads {join_words(keys, 'and')}; give {config.data.type} `data.options`"
        yield Conflict((*keys, "data.type"), message)


def divisors(number: int, near: int, count: int = 3) -> list[int]:
    """The divisors of `number` nearest to `near`, ascending."""
    number = min(number, 2**31)
    found = {d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)}
    return sorted(sorted(found, key=lambda d: (abs(d - near), d))[:count])


def _heads(model: ModelConfig) -> Iterator[Conflict]:
    """Heads, key/value heads and the size of a head."""
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
        yield Conflict(keys, f"rotary embeddings turn pairs, and a head of {size} is odd; expected e.g. {near}")


def _decoder(model: ModelConfig) -> Iterator[Conflict]:
    if model.sliding_window is None and model.sliding_window_pattern > 1:
        yield Conflict(
            ("model.sliding_window_pattern", "model.sliding_window"),
            "says which layers have the window; set model.sliding_window too",
        )
    if model.sliding_window is None and model.sliding_window_rope_theta is not None:
        yield Conflict(
            ("model.sliding_window_rope_theta", "model.sliding_window"),
            "is of layers with the window; set model.sliding_window too",
        )
    scaling = model.rope_scaling
    if scaling and scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = "model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"
        yield Conflict((low, high), f"{scaling.low_freq_factor:g} must be below {high} {scaling.high_freq_factor:g}")


def _positions(config: Config) -> Iterator[Conflict]:
    """Learned positions: no sequence is longer than their table."""
    positions, key, log = config.model.learned_positions, "model.learned_positions", config.log
    if positions is None:
        return
    for name in ("rope_scaling", "sliding_window_rope_theta"):
        if getattr(config.model, name) is not None:
            yield Conflict((f"model.{name}", key), "learned positions are not rotary; expected null")
    if config.data.sequence > positions:
        message = f"{config.data.sequence} tokens, and the model has learned positions for {positions} ({key})"
        yield Conflict(("data.sequence", key), f"{message}; expected at most {positions}")
    longest = max(0, positions - 2)  # beside the prompt and a BOS
    if log.sample_tokens > longest:
        message = f"{log.sample_tokens} tokens after the prompt are more than the model's {positions} positions ({key})"
        yield Conflict(("log.sample_tokens", key), f"{message}; expected at most {longest}")


def _experts(model: ModelConfig) -> Iterator[Conflict]:
    """Sizes of a mixture of experts."""
    moe = model.moe
    if moe is None:
        return
    count, top_k = moe.num_experts, moe.top_k
    if top_k > count:
        message = f"a token cannot choose {top_k} of {count} experts; expected at most {count}"
        yield Conflict(("model.moe.top_k", "model.moe.num_experts"), message)
        return
    if top_k == 1 and moe.normalize_gates:
        message = (
            "with one choice every gate would be 1 and the router could not learn; expected false, or top_k above 1"
        )
        yield Conflict(("model.moe.normalize_gates", "model.moe.top_k"), message)
    if moe.capacity_factor is not None and moe.capacity_factor * top_k > count:
        message = (
            f"{moe.capacity_factor:g} even shares of {top_k} in {count} are more slots than a sequence has tokens; "
            f"expected at most {count / top_k:g}, or null to drop none"
        )
        yield Conflict(("model.moe.capacity_factor", "model.moe.top_k", "model.moe.num_experts"), message)
    if moe.bias_update_rate is not None and top_k == count:
        message = f"every token visits all {count} experts, there is nothing to select; expected null, or a lower top_k"
        yield Conflict(("model.moe.bias_update_rate", "model.moe.top_k"), message)
    if "mlp" in model.biases:
        yield Conflict(("model.biases", "model.moe"), "experts have no biases; expected it without mlp")


def _remat(config: Config) -> Iterator[Conflict]:
    """Names of values that the decoder marks; a user's own model has its own names."""
    remat, saved = config.step.remat, config.step.remat_save
    if saved and remat != "full":
        message = f"remat={remat} recomputes no named values; expected remat=full beside remat_save"
        yield Conflict(("step.remat_save", "step.remat"), message)
    if not config.model.uses_decoder_keys:
        return
    for name in saved:
        if name not in SAVED_NAMES:
            hint = did_you_mean(name, SAVED_NAMES) or f"; expected {join_words(SAVED_NAMES)}"
            yield Conflict(("step.remat_save",), f"the decoder has no value {format_value(name)} to save{hint}")


def _watching(config: Config) -> Iterator[Conflict]:
    """Samples and the ranking of checkpoints need what they are made from."""
    if config.log.sample_tokens and not (config.model.uses_decoder_keys and config.data.is_text):
        yield Conflict(("log.sample_tokens", "model.type"), "only the built-in decoder on text generates; expected 0")
    best = config.checkpoint.best_metric
    if not config.checkpoint.keep_best:
        return
    names = _metrics(config)
    if config.model.uses_decoder_keys and best not in names:
        message = f"validation gives no {format_value(best)}; expected {join_words(names)}{did_you_mean(best, names)}"
        yield Conflict(("checkpoint.best_metric",), message)


def _durable(config: Config) -> Iterator[Conflict]:
    """Copies are made of checkpoints, somewhere."""
    durable, every, often = config.checkpoint.durable, config.checkpoint.every, config.checkpoint.durable_every
    if durable == "":
        yield Conflict(("checkpoint.durable",), "is empty; expected a folder, a URL, or null")
    if often is None:
        return
    if durable is None:
        yield Conflict(
            ("checkpoint.durable_every", "checkpoint.durable"), "copies where to? set checkpoint.durable too"
        )
    elif every is None or often % every:
        message = f"expected a multiple of checkpoint.every ({every or 'null'}); found {often}"
        yield Conflict(("checkpoint.durable_every", "checkpoint.every"), message)


def _guard(config: Config) -> Iterator[Conflict]:
    """Rollbacks need checkpoints; each kind of fault happens at some moments of a step only."""
    if config.guard.spike.action == "rollback" and config.checkpoint.every is None:
        message = "rollback restores a checkpoint; expected checkpoint.every to be set, or skip"
        yield Conflict(("guard.spike.action", "checkpoint.every"), message)
    for index, fault in enumerate(config.debug.faults):
        if fault.at is not None and fault.at not in FAULT_MOMENTS[fault.kind]:
            message = f"{fault.kind} can not happen at {fault.at}; expected {join_words(FAULT_MOMENTS[fault.kind])}"
            yield Conflict((f"debug.faults.{index}.at",), message)


def _metrics(config: Config) -> list[str]:
    """Metrics of a decoder's validation."""
    is_text = config.data.is_text
    sets = [
        *([] if is_text and config.data.validation_fraction == 0 else ["eval/"]),
        *(f"eval/{n}/" for n in config.eval.sets),
    ]
    kinds = ("loss", "cross_entropy", "perplexity", *(["bits_per_byte"] if is_text else []))
    return [f"{prefix}{kind}" for prefix in sets for kind in kinds]


def _sets(config: Config) -> Iterator[Conflict]:
    """Validation sets have names that metrics can be called by, and a tokenizer."""
    for name in config.eval.sets:
        if not re.fullmatch(SET_NAME, name):
            message = "is no name of a validation set; expected letters, digits, `_` and `-`, a letter first"
            yield Conflict((f"eval.sets.{name}",), message)
    if config.eval.sets and not config.data.is_text:
        message = f"data.type {config.data.type} has no tokenizer for them; expected none, or data.type `text`"
        yield Conflict(("eval.sets", "data.type"), message)


def _batch(config: Config) -> Iterator[Conflict]:
    batch, parts = config.data.global_batch, config.step.microbatches
    if batch % parts:
        sizes = join_words(divisors(batch, parts))
        message = f"{parts} microbatches do not divide data.global_batch {batch}; expected e.g. {sizes}"
        yield Conflict(("step.microbatches", "data.global_batch"), message)


def _schedule(config: Config) -> Iterator[Conflict]:
    """Steps of the learning-rate schedule and of what depends on validation."""
    steps, schedule = config.steps, config.schedule
    warmup = min(schedule.warmup_steps, steps)
    if schedule.name == "wsd" and warmup < steps < warmup + schedule.decay_fraction * steps:
        message = f"a decay over {schedule.decay_fraction:g} of {steps} steps does not fit after {warmup} of warm-up"
        yield Conflict(("schedule.decay_fraction", "schedule.warmup_steps", "schedule.name", "steps"), message)
    best = config.checkpoint.best_metric
    if config.checkpoint.keep_best and best.startswith("eval/") and config.eval.every is None:
        message = f"checkpoints are ranked by {format_value(best)}, so eval.every must be set"
        yield Conflict(("checkpoint.keep_best", "checkpoint.best_metric", "eval.every"), message)
    has_none = config.data.validation_fraction == 0 and not config.eval.sets
    if config.data.is_text and config.eval.every is not None and has_none:
        message = "nothing is kept for validation; set data.validation_fraction above 0, or eval.every to null"
        yield Conflict(("data.validation_fraction", "eval.every"), message)


def config_notes(config: Config) -> list[str]:
    """Returns a line for each value that is not used as it is written."""
    steps, warmup = config.steps, config.schedule.warmup_steps
    return [f"schedule.warmup_steps: {warmup} is cut to the {steps} steps of the run"] if warmup > steps else []


def _sources(data: DataConfig) -> Iterator[Conflict]:
    """The mixture: at least one source, and at every step one of them with a weight."""
    if not data.sources:
        yield Conflict(("data.sources",), "is empty; expected at least one source, e.g. [{path: stdlib}]")
        return
    for index, source in enumerate(data.sources):
        for step in source.weight:
            if not 0 <= step <= LARGEST:
                yield Conflict(
                    (f"data.sources.{index}.weight",), f"{format_value(step)} is no step; expected 0 or more"
                )
    weights = [source.weight for source in data.sources]
    for step in sorted({step for one in weights for step in one if step >= 0})[:200]:
        if not any(weight_at(one, step) for one in weights):
            yield Conflict(("data.sources",), f"from step {step} on every source has weight 0; one must be above 0")
            return


def weight_at(weights: dict[int, float], step: int) -> float:
    """Returns the weight of a source at a step."""
    return weights[max(start for start in weights if 0 <= start <= step)]
