"""Config.json of a Hugging Face model to the `model` section, and back.

What a field means is taken from the architecture's class in transformers. A field that is not known here may change the
mathematics, so it is an error unless it is off (null, false, 0 or empty). Rotary settings are read as transformers 4
(`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) write them, and written as 4 does, which both read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.schema import ModelConfig
from jaxtrain.errors import ModelConfigError, close_matches, format_value, join_words
from jaxtrain.interop.families import FAMILIES, Family

Json = dict[str, Any]
SILENT = frozenset({  # says nothing of the mathematics of a forward pass
    "model_type", "architectures", "_name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "pretraining_tp", "cache_implementation",
    "router_aux_loss_coef", "_attn_implementation_autoset", "id2label", "label2id", "return_dict", "unsloth_version",
})  # fmt: skip
KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "router_aux_loss_coef",
    "reorder_and_upcast_attn",
)  # fmt: skip
NEUTRAL = {"partial_rotary_factor": 1, "decoder_sparse_step": 1, "scale_attn_weights": True}  # the value covered
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_length",
}
USED = {
    "linear": ("factor",),
    "llama3": tuple(LLAMA3.values()),
}  # of rope_scaling
FULL, SLIDING = "full_attention", "sliding_attention"
LEARNED = ("learned",)  # positions of a family without rotary ones
BIASES = ("qkv", "output", "mlp")
LOCAL = "rope_local_base_freq"  # the rotary base of layers with a window
TRAINING = (
    "init_std",
    "moe.capacity_factor",
    "moe.load_balance_loss",
    "moe.router_z_loss",
)  # of the `model` section, but without a meaning for its function


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelConfigError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path.parent}: not a Hugging Face model (no {path.name})") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ModelConfigError(f"{path}: {reason}") from None
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: expected a JSON object; found {format_value(content)}")
    return content


def read_model_config(folder: Path) -> tuple[Family, Json]:
    """The family and the `model` section of a Hugging Face folder. Raises ModelConfigError, as `from_hf_config`."""
    path = folder / "config.json"
    return from_hf_config(read_json(path), str(path))


def from_hf_config(config: Json, where: str) -> tuple[Family, Json]:
    """The family and the `model` section of a config.json.

    Args:
        config: its content.
        where: its path, for messages.

    Raises:
        ModelConfigError: not covered; says which field.
    """
    family = _family(config, where)
    config = {family.aliases.get(name, name): value for name, value in config.items()}
    refused = _unknown(config, family)
    if refused:
        raise ModelConfigError(f"{where}: {family.name} with {refused} is not covered")
    given = {**family.defaults, **config}
    missing = [name for name in family.fields if name not in given]
    if missing:
        raise ModelConfigError(f"{where}: no {join_words(missing, 'and')}, which a {family.name} must have")
    try:
        values = dict(family.fixed)
        for name, keys in family.fields.items():
            values |= dict.fromkeys(keys, given[name])
        values["activation"] = _activation(given, family)
        values |= _rope(given, family) | _window(given, family) | _scale(given) | _width(given, family)
        if family.multiplies_by_sqrt_embed and isinstance(values["embed"], int):
            values["embed_multiplier"] = math.sqrt(values["embed"])
        if "sliding_window" not in values:  # then no layer has the other base
            values.pop("sliding_window_rope_theta", None)
    except ModelConfigError as error:
        raise ModelConfigError(f"{where}: {error}") from None
    return family, _validated(values, family, where)


def to_hf_config(model: ModelConfig, vocab: int, family: Family, before: Json | None = None) -> Json:
    """The config.json of a model as this architecture.

    Args:
        model: the options.
        vocab: rows of the embedding table.
        family: the architecture.
        before: the config.json the model came with; its token ids and the like are kept.

    Raises:
        ModelConfigError: the architecture cannot express the model; names the keys.
    """
    config, lost = _encoded(model, vocab, family, before)
    if lost:
        raise ModelConfigError(
            f"no {family.name} has {join_words((f'model.{key} {value}' for key, value in lost.items()), 'and')}"
        )
    return config


def choose_family(model: ModelConfig, vocab: int, name: str | None, before: Json | None) -> tuple[Family, Json]:
    """The family to write a model as: the one named, else that of `before`, else the first that can express it.

    Raises:
        ModelConfigError: none does; says what the nearest one lacks.
    """
    if name is not None or before is not None:
        named = name or str((before or {}).get("model_type"))
        family = _family({"model_type": named}, "--family")
        same = before is not None and before.get("model_type") == named
        return family, to_hf_config(model, vocab, family, before if same else None)
    tried = [(family, *_encoded(model, vocab, family, None)) for family in FAMILIES.values()]
    family, config, lost = min(tried, key=lambda one: len(one[2]))
    if lost:
        to_hf_config(model, vocab, family)
    return family, config


def _encoded(model: ModelConfig, vocab: int, family: Family, before: Json | None) -> tuple[Json, Json]:
    """A config.json, and the keys of the model, with their values, that are others when it is read again."""
    plain = flatten_options(model, vocab)
    config: Json = {"model_type": family.name, "architectures": [family.architecture], **family.written}
    config |= {name: plain.get(keys[0], family.defaults.get(name)) for name, keys in family.fields.items()}
    config[family.activation] = _activation_field(model, family, before or {})
    kind = _positions(model)
    is_covered = kind in family.rope
    config |= _rope_fields(model) if is_covered else {}
    config |= _window_fields(model, family)
    if LOCAL in family.fields:
        config[LOCAL] = model.sliding_window_rope_theta or model.rope_theta
    if "query_pre_attn_scalar" in family.defaults:
        scalar = plain["attention_scale"] ** -2
        config["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
    config |= {name: before[name] for name in (*KEPT, *family.written) if name in before} if before else {}
    read = flatten_options(ModelConfig.model_validate(from_hf_config(config, family.name)[1]), vocab)
    keys = [key for key in {**plain, **read} if key not in TRAINING and (is_covered or not key.startswith("rope_"))]
    lost = {key: format_value(plain.get(key)) for key in keys if not _same(plain.get(key), read.get(key))}
    return config, lost if is_covered else {"rope_scaling.type": kind, **lost}


def flatten_options(model: ModelConfig, vocab: int) -> Json:
    """Dotted key -> value of all options, defaults that depend on others filled in."""
    head_dim = model.head_dim or model.embed // model.heads
    values: Json = {key: value for key, value in model.model_dump().items() if key not in ("type", "options", "from")}
    moe, scaling, biases = (values.pop(key) for key in ("moe", "rope_scaling", "biases"))
    values |= {f"biases.{name}": name in biases for name in BIASES}
    pattern = model.sliding_window_pattern
    values |= {
        "vocab": vocab, "kv_heads": model.kv_heads or model.heads, "head_dim": head_dim,
        "attention_scale": model.attention_scale or head_dim**-0.5,
        "sliding_window_pattern": pattern if model.sliding_window and pattern <= model.layers else 1,
        "sliding_window_rope_theta": _own_theta(model),
    }  # fmt: skip
    if moe is not None:
        moe["normalize_gates"] = moe["top_k"] > 1 if moe["normalize_gates"] is None else moe["normalize_gates"]
    scaling = scaling or {}
    used = ("type", *USED[scaling["type"]]) if scaling else ()
    values |= {f"moe.{key}": value for key, value in (moe or {}).items()}
    if model.learned_positions is not None:
        del values["rope_theta"]
    return values | {f"rope_scaling.{key}": scaling[key] for key in used}


def _positions(model: ModelConfig) -> str:
    """Returns the kind of positions of a model: learned, or that of its rotary embedding."""
    if model.learned_positions is not None:
        return "learned"
    return "default" if model.rope_scaling is None else model.rope_scaling.type


def _own_theta(model: ModelConfig) -> float | None:
    """The rotary base of layers with a window, where it is another than that of all."""
    is_same = model.rope_scaling is None and model.sliding_window_rope_theta == model.rope_theta
    return None if model.sliding_window is None or is_same else model.sliding_window_rope_theta


def _family(config: Json, where: str) -> Family:
    name, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(name, str):
        raise ModelConfigError(f"{where}: no model_type; expected the config.json of a Hugging Face model")
    family = FAMILIES.get(name)
    if family is None:
        near = close_matches(name, FAMILIES, 0.85) if not any(c.isdigit() for c in name) else []
        hint = f" (did you mean `{near[0]}`?)" if near else ""
        raise ModelConfigError(
            f"{where}: model_type {format_value(name)} is not covered{hint}; covered: {join_words(FAMILIES, 'and')}"
        )
    if classes and family.architecture not in classes:
        raise ModelConfigError(f"{where}: {format_value(classes[0])} is not covered; expected {family.architecture}")
    return family


def _unknown(config: Json, family: Family) -> str:
    """The fields, with their values, of which it is not known that they change nothing."""
    known = SILENT | family.defaults.keys() | family.fields.keys() | set(family.ignored)
    known |= set() if family.rope == LEARNED else ROPE
    found = [name for name, value in config.items() if name in NEUTRAL and value not in (None, NEUTRAL[name])]
    found += [name for name, value in config.items() if name not in known | NEUTRAL.keys() and value]
    return join_words((f"{name} {format_value(config[name])}" for name in found), "and") if found else ""


def _activation(given: Json, family: Family) -> str:
    name = given[family.activation]
    if name not in family.activations:
        raise ModelConfigError(
            f"{family.activation} {format_value(name)} is not covered; expected {join_words(family.activations)}"
        )
    return family.activations[name]


def _activation_field(model: ModelConfig, family: Family, before: Json) -> str:
    """Returns the name of the activation: the one before if it means the same function, because names of one function
    are rounded differently; else the first name for it, or of all.
    """
    same = [name for name, ours in family.activations.items() if ours == model.activation]
    known = before.get(family.activation)
    return known if known in same else (same or list(family.activations))[0]


def _rope(given: Json, family: Family) -> Json:
    """Rotary options from the fields of either generation."""
    if family.rope == LEARNED:
        return {}
    if LOCAL not in family.fields:
        return _turn(given, family)
    options = given.get("rope_parameters") or {}
    if not isinstance(options, dict) or options.keys() - {FULL, SLIDING}:
        raise ModelConfigError(f"rope_parameters: expected {FULL} and {SLIDING}; found {format_value(options)}")
    inner = {kind: {"rope_parameters": options.get(kind)} for kind in (FULL, SLIDING)}
    near = _turn({"rope_theta": given[LOCAL]} | inner[SLIDING], family)
    if near["rope_scaling"] is not None:
        raise ModelConfigError(f"rope_parameters.{SLIDING} of type {near['rope_scaling']['type']} is not covered")
    return _turn({**given, **inner[FULL]}, family) | {"sliding_window_rope_theta": near["rope_theta"]}


def _turn(given: Json, family: Family) -> Json:
    """`rope_theta` and `rope_scaling` of one kind of layer."""
    source = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    options = given.get(source) or {}
    if not isinstance(options, dict):
        raise ModelConfigError(f"{source}: expected a section; found {format_value(options)}")
    options = dict(options)
    kind = options.pop("rope_type", options.pop("type", "default"))
    options.pop("type", None)
    theta = options.pop("rope_theta", given["rope_theta"])
    if kind not in family.rope:
        raise ModelConfigError(
            f"{source} of type {format_value(kind)} is not covered; a {family.name} may have {join_words(family.rope)}"
        )
    if options.pop("partial_rotary_factor", 1) != 1:
        raise ModelConfigError(f"{source}.partial_rotary_factor is not covered; expected 1")
    names = {"default": {}, "linear": {"factor": "factor"}, "llama3": LLAMA3}[kind]
    other = [name for name, value in options.items() if name not in LLAMA3 and value is not None]
    if other:
        raise ModelConfigError(f"{source}.{other[0]} of type {kind} is not covered; it may have {join_words(names)}")
    if kind == "llama3":
        options.setdefault("original_max_position_embeddings", given.get("max_position_embeddings"))
    missing = [name for name in names if options.get(name) is None]
    if missing:
        raise ModelConfigError(f"{source}.{missing[0]} is missing, which {kind} needs")
    scaling = {"type": kind} | {ours: options[theirs] for theirs, ours in names.items()}
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else scaling}


def _rope_fields(model: ModelConfig) -> Json:
    scaling = model.rope_scaling
    if model.learned_positions is not None:
        return {}
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    names = {"factor": "factor"} if scaling.type == "linear" else LLAMA3
    values = {theirs: getattr(scaling, ours) for theirs, ours in names.items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": scaling.type, **values}}


def _window(given: Json, family: Family) -> Json:
    """Returns `sliding_window` and `sliding_window_pattern`."""
    size = given.get("sliding_window")
    if family.window == "none" or size is None:
        return {}
    layers = given["num_hidden_layers"]
    if family.window == "used" or (family.window == "layers" and not given.get("layer_types")):
        size = size if given["use_sliding_window"] else None
    if family.window in ("all", "used") or size is None:
        return {} if size is None else {"sliding_window": size}
    types = given.get("layer_types")
    if types is None and family.window == "layers":
        types = [FULL if layer < given["max_window_layers"] else SLIDING for layer in range(layers)]
    elif types is None:
        types = _types(layers, given.get("sliding_window_pattern", 2))
    if not isinstance(types, list) or SLIDING not in types:
        return {}
    every = types.index(FULL) + 1 if FULL in types else 1
    if types != _types(layers, every):
        raise ModelConfigError(
            "layer_types (or max_window_layers) is not covered: expected a window in every layer, in none, or in all "
            f"but every n-th; found {format_value(','.join(str(kind).split('_')[0] for kind in types))}"
        )
    return {"sliding_window": size, "sliding_window_pattern": every}


def _window_fields(model: ModelConfig, family: Family) -> Json:
    if family.window == "none":
        return {}
    size, every = model.sliding_window, model.sliding_window_pattern
    if family.window == "all":
        return {"sliding_window": size}
    if family.window == "used":
        return {"sliding_window": size, "use_sliding_window": size is not None}
    types = [FULL] * model.layers if size is None else _types(model.layers, every)
    if family.window == "period":
        return {"sliding_window": size, "layer_types": types}
    first = types.index(SLIDING) if SLIDING in types else model.layers
    whole = {"use_sliding_window": size is not None, "max_window_layers": first}
    return {"sliding_window": size, "layer_types": types, **whole}


def _types(layers: int, every: int) -> list[str]:
    """Types of layers of which every n-th attends globally; for 1, none."""
    return [FULL if every > 1 and layer % every == every - 1 else SLIDING for layer in range(layers)]


def _scale(given: Json) -> Json:
    scalar = given.get("query_pre_attn_scalar")
    if scalar is None or scalar == given["head_dim"]:
        return {}
    if not isinstance(scalar, (int, float)) or scalar <= 0:
        raise ModelConfigError(f"query_pre_attn_scalar: expected a number above 0; found {format_value(scalar)}")
    return {"attention_scale": float(scalar) ** -0.5}


def _width(given: Json, family: Family) -> Json:
    """The width of GPT-2's feed-forward layer where it does not say."""
    if "n_inner" not in family.fields or given["n_inner"] is not None or not isinstance(given["n_embd"], int):
        return {}
    return {"mlp": 4 * given["n_embd"]}


def _validated(values: Json, family: Family, where: str) -> Json:
    """A nested `model` section, checked by the schema."""
    section: Json = {}
    for key, value in values.items():
        outer, _, inner = key.partition(".")
        if inner:
            section.setdefault(outer, {})[inner] = value
        else:
            section[key] = value
    biases = section.pop("biases", {})
    section["biases"] = [name for name in BIASES if biases.get(name)]
    if section["vocab"] is None:
        raise ModelConfigError(f"{where}: vocab_size: expected a number; found nothing (null)")
    try:
        model = ModelConfig.model_validate(section)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"]))
        message = f"{detail['msg'][0].lower()}{detail['msg'][1:]}; found {format_value(detail['input'])}"
        raise ModelConfigError(f"{where}: {family.name_of(key)}: {message}") from None
    if model.head_dim is None and model.embed % model.heads:
        embed, heads = (f"{family.name_of(key)} {getattr(model, key)}" for key in ("embed", "heads"))
        raise ModelConfigError(f"{where}: {embed} does not split into {heads}, and no head_dim")
    return section


def _same(a: Any, b: Any) -> bool:
    is_number = isinstance(a, float) and isinstance(b, (int, float)) and not isinstance(b, bool)
    return math.isclose(a, b, rel_tol=1e-12) if is_number else a == b
