"""What keys must be to each other. No JAX, and nothing that needs the devices: see the mesh doctor for that."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtrain.config import guards
from jaxtrain.config.schema import LARGEST, USER_CLASS, Config, Data, Documents, Model, Moe
from jaxtrain.errors import did_you_mean, join, shown

# Keys that only the built-in decoder and the built-in text pipeline read; a user's own class takes `options`.
DECODER_KEYS = tuple(
    field.alias or name for name, field in Model.model_fields.items() if name not in ("type", "options")
)
SET_NAME = r"[A-Za-z][\w\-]*"
# What the decoder marks for `step.remat` and `step.offload`. A layer's input is kept anyway, unless it is offloaded.
SAVED_NAMES = ("input", "q", "k", "v", "attention", "up", "gate", "residual")
TEXT_KEYS = ("sources", "tokenizer", "validation", "cache", "workers")
HUB = "hf://"
COLUMNS = (".parquet", ".arrow", ".feather")  # what pyarrow reads


@dataclass(frozen=True)
class Found:
    """A problem between keys: the key to blame first, then the others that take part."""

    keys: tuple[str, ...]
    message: str


def cross_problems(config: Config) -> Iterator[Found]:
    """All problems between keys of one config; its single values are valid."""
    yield from _kinds(config)
    if config.model.type == "decoder":
        yield from _heads(config.model)
        yield from _decoder(config.model)
        yield from _positions(config)
        yield from _dense(config) if config.model.moe is None else _experts(config.model, config.model.moe)
    yield from _batch(config)
    yield from _schedule(config)
    yield from _sets(config)
    if config.data.type == "text":
        yield from _sources(config.data)
    yield from _remat(config)
    yield from _watching(config)
    yield from _durable(config)
    yield from _guards(config)


def path_problems(config: Config) -> Iterator[Found]:
    """Files the config reads and packages it needs that are not there."""
    yield from _packages(config)
    data = config.data
    if data.type != "text":
        return
    if data.tokenizer != "bytes" and not os.path.isfile(os.path.expanduser(data.tokenizer)):
        hint = did_you_mean(data.tokenizer, ["bytes"]) or "; give `bytes` or the path of a tokenizer.json"
        yield Found(("data.tokenizer",), f"no such file: {shown(data.tokenizer)}{hint}")
    for key, source in _documents(config):
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
        yield Found((key,), f"no such file or folder: {shown(root or path)}{hint}")


def _documents(config: Config) -> Iterator[tuple[str, Documents]]:
    """What is read, and the key of its path."""
    for index, source in enumerate(config.data.sources):
        yield f"data.sources.{index}.path", source
    for name, one in config.eval.sets.items():
        yield f"eval.sets.{name}.path", one


def _packages(config: Config) -> Iterator[Found]:
    """Packages of the extras that the config asks for."""
    log, durable = config.log, config.checkpoint.durable or ""
    needed = [("log.wandb", "wandb", "wandb", bool(log.wandb)), ("log.mlflow", "mlflow", "mlflow", bool(log.mlflow))]
    needed.append(("checkpoint.durable", "fsspec", "remote", "://" in durable and not durable.startswith("file://")))
    if config.data.type == "text":
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
            yield Found((key,), f"needs the package {package}: pip install 'jaxtrain[{extra}]'")


def _kinds(config: Config) -> Iterator[Found]:
    """Built-in types take keys, a user's own class takes options."""
    sections: tuple[tuple[str, Model | Data, str, tuple[str, ...]], ...] = (
        ("model", config.model, "decoder", DECODER_KEYS),
        ("data", config.data, "text", TEXT_KEYS),
    )
    for name, part, builtin, keys in sections:
        if part.type == builtin:
            if part.options:
                message = f"options are for a user's own class; `{builtin}` takes its keys directly"
                yield Found((f"{name}.options", f"{name}.type"), message)
        elif not re.fullmatch(USER_CLASS, part.type):
            hint = did_you_mean(part.type, [builtin])
            message = f"expected `{builtin}` or a class as `package.module:Class`; found {shown(part.type)}{hint}"
            yield Found((f"{name}.type",), message)
        else:
            given = [key for key in keys if key in part.model_dump(exclude_unset=True)]
            if given:
                full = tuple(f"{name}.{key}" for key in given)
                message = f"only the built-in `{builtin}` reads {join(full, 'and')}; give {part.type} `{name}.options`"
                yield Found((*full, f"{name}.type"), message)


def divisors(number: int, near: int, count: int = 3) -> list[int]:
    """The divisors of `number` nearest to `near`, ascending."""
    number = min(number, 2**31)
    found = {d for low in range(1, int(number**0.5) + 1) if number % low == 0 for d in (low, number // low)}
    return sorted(sorted(found, key=lambda d: (abs(d - near), d))[:count])


def _heads(model: Model) -> Iterator[Found]:
    """Heads, key/value heads and the size of a head."""
    heads, kv = model.heads, model.kv_heads
    if kv is not None and heads % kv:
        sizes = join(divisors(heads, kv))
        message = f"{heads} query heads cannot be shared by {kv} key/value heads; expected a divisor, e.g. {sizes}"
        yield Found(("model.kv_heads", "model.heads"), message)
    if model.head_dim is None and model.embed % heads:
        sizes = join(divisors(model.embed, heads))
        message = f"embed {model.embed} does not split into {heads} heads; expected e.g. {sizes}, or set model.head_dim"
        yield Found(("model.heads", "model.embed", "model.head_dim"), message)
        return
    size = model.head_dim or model.embed // heads
    if size % 2 and model.positions is None:
        keys = ("model.head_dim",) if model.head_dim else ("model.heads", "model.embed", "model.head_dim")
        near = join(n for n in (size - 1, size + 1) if n)
        yield Found(keys, f"rotary embeddings turn pairs, and a head of {size} is odd; expected e.g. {near}")


def _decoder(model: Model) -> Iterator[Found]:
    if model.window is None and model.window_every > 1:
        yield Found(("model.window_every", "model.window"), "says which layers have the window; set model.window too")
    if model.window is None and model.window_theta is not None:
        yield Found(("model.window_theta", "model.window"), "is of layers with the window; set model.window too")
    scaling = model.rope_scaling
    if scaling and scaling.type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        low, high = "model.rope_scaling.low_freq_factor", "model.rope_scaling.high_freq_factor"
        yield Found((low, high), f"{scaling.low_freq_factor:g} must be below {high} {scaling.high_freq_factor:g}")


def _positions(config: Config) -> Iterator[Found]:
    """Learned positions are no more than there are."""
    positions, key, log = config.model.positions, "model.rope_scaling.original_length", config.log
    if positions is None:
        return
    if config.model.window_theta is not None:
        yield Found(("model.window_theta", "model.rope_scaling.type"), "learned positions do not turn; expected null")
    if config.data.sequence > positions:
        message = f"{config.data.sequence} tokens, and the model has learned positions for {positions} ({key})"
        yield Found(("data.sequence", key), f"{message}; expected at most {positions}")
    room = positions - len(log.prompt.encode()) - 1  # no tokenizer makes more of it, but for a BOS
    if log.sample > max(0, room):
        message = f"{log.sample} tokens after the prompt are more than the model's {positions} positions ({key})"
        yield Found(("log.sample", key), f"{message}; expected at most {max(0, room)}")


def _dense(config: Config) -> Iterator[Found]:
    """Keys that only a mixture of experts reads."""
    for name in ("balance", "router_z"):
        if getattr(config.loss, name):
            yield Found((f"loss.{name}", "model.moe"), "the model has no experts; expected 0, or set model.moe")


def _experts(model: Model, moe: Moe) -> Iterator[Found]:
    """Sizes of a mixture of experts."""
    count, top_k = moe.experts, moe.top_k
    if top_k > count:
        message = f"a token cannot choose {top_k} of {count} experts; expected at most {count}"
        yield Found(("model.moe.top_k", "model.moe.experts"), message)
        return
    if top_k == 1 and moe.normalize:
        message = (
            "with one choice every gate would be 1 and the router could not learn; expected false, or top_k above 1"
        )
        yield Found(("model.moe.normalize", "model.moe.top_k"), message)
    if moe.capacity is not None and moe.capacity * top_k > count:
        message = (
            f"{moe.capacity:g} even shares of {top_k} in {count} are more places than a sequence has tokens; "
            f"expected at most {count / top_k:g}, or null to drop none"
        )
        yield Found(("model.moe.capacity", "model.moe.top_k", "model.moe.experts"), message)
    if moe.bias_rate is not None and top_k == count:
        message = f"every token visits all {count} experts, there is nothing to select; expected null, or a lower top_k"
        yield Found(("model.moe.bias_rate", "model.moe.top_k"), message)
    if model.mlp_bias:
        yield Found(("model.mlp_bias", "model.moe"), "experts have no biases; expected false")


def _remat(config: Config) -> Iterator[Found]:
    """Names of values that the decoder marks; a user's own model marks what it likes."""
    remat, offload = config.step.remat, config.step.offload
    if offload and remat in ("none", "dots"):
        message = f"{remat} saves more than what has names; expected full or a list of names beside step.offload"
        yield Found(("step.remat", "step.offload"), message)
    saved = () if isinstance(remat, str) else remat
    for name in offload:
        if name in saved:
            yield Found(
                ("step.offload", "step.remat"), f"{shown(name)} is saved on the device too; expected one of both"
            )
    if config.model.type != "decoder":
        return
    for key, name in [*(("step.remat", name) for name in saved), *(("step.offload", name) for name in offload)]:
        if name not in SAVED_NAMES:
            hint = did_you_mean(name, SAVED_NAMES) or f"; expected {join(SAVED_NAMES)}"
            yield Found((key,), f"the decoder has no value {shown(name)} to save{hint}")


def _watching(config: Config) -> Iterator[Found]:
    """Samples and the ranking of checkpoints need what they are made from."""
    if config.log.sample and (config.model.type != "decoder" or config.data.type != "text"):
        yield Found(("log.sample", "model.type"), "only the built-in decoder on text generates; expected 0")
    best, every, saves = config.checkpoint.best, config.eval.every, config.checkpoint.every
    if not config.checkpoint.keep_best:
        return
    names = _metrics(config)
    if config.model.type == "decoder" and best not in names:
        message = f"validation gives no {shown(best)}; expected {join(names)}{did_you_mean(best, names)}"
        yield Found(("checkpoint.best",), message)
    if saves is not None and (every is None or saves % every):
        message = f"checkpoints are ranked by their validation: expected a multiple of eval.every; found {saves}"
        yield Found(("checkpoint.every", "checkpoint.keep_best"), f"{message} with eval.every {every or 'null'}")


def _durable(config: Config) -> Iterator[Found]:
    """Copies are made of checkpoints, somewhere."""
    durable, every, often = config.checkpoint.durable, config.checkpoint.every, config.checkpoint.durable_every
    if durable == "":
        yield Found(("checkpoint.durable",), "is empty; expected a folder, a URL, or null")
    if often is None:
        return
    if durable is None:
        yield Found(("checkpoint.durable_every", "checkpoint.durable"), "copies where to? set checkpoint.durable too")
    elif every is None or often % every:
        message = f"expected a multiple of checkpoint.every ({every or 'null'}); found {often}"
        yield Found(("checkpoint.durable_every", "checkpoint.every"), message)


def _guards(config: Config) -> Iterator[Found]:
    """The short strings of `guard` and `faults`."""
    try:
        spikes = guards.guard(config.guard).spikes
    except ValueError as error:
        yield Found(("guard",), str(error))
        spikes = None
    if spikes and not spikes.skips and config.checkpoint.every is None:
        message = f"{spikes.action} goes back to a checkpoint; expected checkpoint.every to be set, or skip@Z"
        yield Found(("guard", "checkpoint.every"), message)
    for text in config.faults:
        try:
            guards.fault(text)
        except ValueError as error:
            yield Found(("faults",), str(error))


def _metrics(config: Config) -> list[str]:
    """Metrics of a decoder's validation."""
    is_text = config.data.type == "text"
    sets = [*([] if is_text and config.data.validation == 0 else ["eval/"]), *(f"eval/{n}/" for n in config.eval.sets)]
    kinds = ("loss", "cross_entropy", "perplexity", *(["bits_per_byte"] if is_text else []))
    return [f"{prefix}{kind}" for prefix in sets for kind in kinds]


def _sets(config: Config) -> Iterator[Found]:
    """Validation sets have names that metrics can be called by, and a tokenizer."""
    for name in config.eval.sets:
        if not re.fullmatch(SET_NAME, name):
            message = "is no name of a validation set; expected letters, digits, `_` and `-`, a letter first"
            yield Found((f"eval.sets.{name}",), message)
    if config.eval.sets and config.data.type != "text":
        message = f"data.type {config.data.type} has no tokenizer for them; expected none, or data.type `text`"
        yield Found(("eval.sets", "data.type"), message)


def _batch(config: Config) -> Iterator[Found]:
    batch, parts = config.data.global_batch, config.step.accumulate
    if batch % parts:
        sizes = join(divisors(batch, parts))
        message = f"{parts} microbatches do not divide data.global_batch {batch}; expected e.g. {sizes}"
        yield Found(("step.accumulate", "data.global_batch"), message)


def _schedule(config: Config) -> Iterator[Found]:
    """Steps of the learning-rate schedule and of what hangs on validation."""
    steps, optimizer = config.steps, config.optimizer
    if optimizer.warmup > steps:
        message = f"{optimizer.warmup} steps of warm-up are more than the {steps} steps of the run"
        yield Found(("optimizer.warmup", "steps"), message)
    elif optimizer.schedule == "wsd" and optimizer.warmup + optimizer.decay * steps > steps:
        message = f"warm-up {optimizer.warmup} and a decay over {optimizer.decay:g} of {steps} steps do not fit the run"
        yield Found(("optimizer.decay", "optimizer.warmup", "optimizer.schedule", "steps"), message)
    if config.checkpoint.keep_best and config.checkpoint.best.startswith("eval/") and config.eval.every is None:
        message = f"checkpoints are ranked by {shown(config.checkpoint.best)}, so eval.every must be set"
        yield Found(("checkpoint.keep_best", "checkpoint.best", "eval.every"), message)
    has_none = config.data.validation == 0 and not config.eval.sets
    if config.data.type == "text" and config.eval.every is not None and has_none:
        message = "nothing is kept for validation; set data.validation above 0, or eval.every to null"
        yield Found(("data.validation", "eval.every"), message)


def _sources(data: Data) -> Iterator[Found]:
    """The mixture: at least one source, and at every step one of them with a weight."""
    if not data.sources:
        yield Found(("data.sources",), "is empty; expected at least one source, e.g. [{path: stdlib}]")
        return
    for index, source in enumerate(data.sources):
        for step in source.shares:
            if not 0 <= step <= LARGEST:
                yield Found((f"data.sources.{index}.weight",), f"{shown(step)} is no step; expected 0 or more")
    shares = [source.shares for source in data.sources]
    for step in sorted({step for one in shares for step in one if step >= 0})[:200]:
        if not any(_share(one, step) for one in shares):
            yield Found(("data.sources",), f"from step {step} on every source has weight 0; one must be above 0")
            return


def _share(shares: dict[int, float], step: int) -> float:
    """That of a source at a step."""
    return shares[max(start for start in shares if 0 <= start <= step)]
