"""Converts the config.json of a Hugging Face model to the `model` section and back.

The meaning of a field is that of the architecture's class in transformers. A field that is not listed here may change
the function, so it is an error unless it is off (null, false, 0 or empty). Rotary options are read as transformers 4
(`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`) write them; they are written as in 4, which both versions read.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.errors import ModelConfigError, close_matches, format_name, format_value, join_words
from jaxtrain.interop.families import FAMILIES, Family

Json = dict[str, Any]
MAX_SIZE = 1_000_000  # of a field that is computed with
IGNORED_FIELDS = frozenset({  # without effect on a forward pass
    "model_type", "architectures", "_name_or_path", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "pretraining_tp", "cache_implementation",
    "router_aux_loss_coef", "_attn_implementation_autoset", "id2label", "label2id", "return_dict", "unsloth_version",
})  # fmt: skip
COPIED_FIELDS = (  # from the original config.json when a model is exported
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings", "router_aux_loss_coef",
    "reorder_and_upcast_attn",
)  # fmt: skip
SUPPORTED_VALUES = {"partial_rotary_factor": 1, "decoder_sparse_step": 1, "scale_attn_weights": True}
ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}
ROPE_SCALING_FIELDS = {  # by type: Hugging Face field -> option of `model.rope_scaling`
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_length",
    },
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
LEARNED = ("learned",)  # `Family.rope` of learned position embeddings
BIASES = ("qkv", "output", "mlp")
LOCAL_THETA = "rope_local_base_freq"  # rotary base of layers with a sliding window
TRAINING_KEYS = ("init_std", "moe.capacity_factor", "moe.load_balance_loss", "moe.router_z_loss")  # not in the function


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object. Raises ModelConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelConfigError(f"{path.parent}: not a Hugging Face model (no {path.name})") from None
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ModelConfigError(f"{path}: {reason}") from None
    if not isinstance(content, dict):
        raise ModelConfigError(f"{path}: expected a JSON object; found {format_value(content)}")
    return content


def read_model_config(folder: Path) -> tuple[Family, Json]:
    """Reads the family and the `model` section of a Hugging Face folder. Raises ModelConfigError."""
    path = folder / "config.json"
    return from_hf_config(read_json(path), str(path))


def from_hf_config(config: Json, where: str) -> tuple[Family, Json]:
    """Converts the content of a config.json to its family and a `model` section.

    Args:
        config: content of the file.
        where: its path, for messages.

    Raises:
        ModelConfigError: not supported; names the field.
    """
    family = _find_family(config, where)
    config = {family.aliases.get(name, name): value for name, value in config.items()}
    unsupported = _unsupported_fields(config, family)
    if unsupported:
        raise ModelConfigError(f"{where}: {family.name} with {unsupported} is not supported")
    fields = {**family.defaults, **config}
    missing = [name for name in family.fields if name not in fields]
    if missing:
        raise ModelConfigError(f"{where}: no {join_words(missing, 'and')}, which a {family.name} must have")
    try:
        options = dict(family.fixed)
        for name, keys in family.fields.items():
            options |= dict.fromkeys(keys, fields[name])
        options["activation"] = _activation(fields, family)
        options |= _rope_options(fields, family) | _window_options(fields, family) | _attention_scale(fields)
        if family.name == "gpt2" and fields["n_inner"] is None:
            options["mlp"] = 4 * _whole_number(fields, "n_embd")
        if family.multiplies_by_sqrt_embed:
            options["embed_multiplier"] = math.sqrt(_whole_number(fields, family.field_of("embed")))
        if "sliding_window" not in options:
            options.pop("sliding_window_rope_theta", None)
    except ModelConfigError as error:
        raise ModelConfigError(f"{where}: {error}") from None
    return family, _model_section(options, family, where)


def to_hf_config(model: ModelConfig, vocab: int, family: Family, original: Json | None = None) -> Json:
    """Converts model options to the content of a config.json.

    Args:
        model: the options.
        vocab: rows of the embedding table.
        family: the architecture.
        original: the config.json that the model was imported from; its token ids and the like are kept.

    Raises:
        ModelConfigError: the architecture does not support the options; names the keys.
    """
    config, unsupported = _to_fields(model, vocab, family, original)
    if unsupported:
        options = join_words((f"model.{key} {value}" for key, value in unsupported.items()), "and")
        raise ModelConfigError(f"no {family.name} has {options}")
    return config


def choose_export_family(
    model: ModelConfig, vocab: int, name: str | None, original: Json | None
) -> tuple[Family, Json]:
    """Chooses the family to export a model as: `name`, else that of `original`, else the first that supports it.

    Returns:
        The family and the content of config.json.

    Raises:
        ModelConfigError: no family supports the model; names the options that the nearest family does not support.
    """
    if name is not None or original is not None:
        model_type = name or str((original or {}).get("model_type"))
        family = _find_family({"model_type": model_type}, "--family")
        is_same = original is not None and original.get("model_type") == model_type
        return family, to_hf_config(model, vocab, family, original if is_same else None)
    candidates = [(family, *_to_fields(model, vocab, family, None)) for family in FAMILIES.values()]
    family, config, unsupported = min(candidates, key=lambda candidate: len(candidate[2]))
    if unsupported:
        to_hf_config(model, vocab, family)  # raises
    return family, config


def _to_fields(model: ModelConfig, vocab: int, family: Family, original: Json | None) -> tuple[Json, Json]:
    """Returns a config.json, and the options (key -> value) that are lost when it is read again."""
    original = original or {}
    options = flatten_options(model, vocab)
    config: Json = {"model_type": family.name, "architectures": [family.architecture], **family.written}
    config |= {name: options.get(keys[0], family.defaults.get(name)) for name, keys in family.fields.items()}
    config[family.activation] = _activation_field(model, family, original)
    position_type = _position_type(model)
    has_positions = position_type in family.rope
    config |= _rope_fields(model) if has_positions else {}
    config |= _window_fields(model, family)
    if LOCAL_THETA in family.fields:
        config[LOCAL_THETA] = model.sliding_window_rope_theta or model.rope_theta
    if "query_pre_attn_scalar" in family.defaults:
        scalar = options["attention_scale"] ** -2
        config["query_pre_attn_scalar"] = round(scalar) if math.isclose(scalar, round(scalar)) else scalar
    config |= {name: original[name] for name in (*COPIED_FIELDS, *family.written) if name in original}
    again = flatten_options(ModelConfig.model_validate(from_hf_config(config, family.name)[1]), vocab)
    keys = [k for k in {**options, **again} if k not in TRAINING_KEYS and (has_positions or not k.startswith("rope_"))]
    lost = {key: format_value(options.get(key)) for key in keys if not _equal(options.get(key), again.get(key))}
    return config, lost if has_positions else {"rope_scaling.type": position_type, **lost}


def flatten_options(model: ModelConfig, vocab: int) -> Json:
    """Returns dotted key -> value of all options, with the defaults that depend on other options filled in."""
    head_dim = model.head_dim or model.embed // model.heads
    options: Json = {key: value for key, value in model.model_dump().items() if key not in ("type", "options", "from")}
    moe, scaling, biases = (options.pop(key) or {} for key in ("moe", "rope_scaling", "biases"))
    options |= {f"biases.{name}": name in biases for name in BIASES}
    pattern, theta = model.sliding_window_pattern, model.sliding_window_rope_theta
    has_local_theta = model.sliding_window is not None and (model.rope_scaling is not None or theta != model.rope_theta)
    options |= {
        "vocab": vocab, "kv_heads": model.kv_heads or model.heads, "head_dim": head_dim,
        "attention_scale": model.attention_scale or head_dim**-0.5,
        "sliding_window_pattern": pattern if model.sliding_window and pattern <= model.layers else 1,
        "sliding_window_rope_theta": theta if has_local_theta else None,
    }  # fmt: skip
    if moe and moe["normalize_gates"] is None:
        moe["normalize_gates"] = moe["top_k"] > 1
    options |= {f"moe.{key}": value for key, value in moe.items()}
    if model.learned_positions is not None:
        del options["rope_theta"]
    if scaling:
        options |= {f"rope_scaling.{k}": scaling[k] for k in ("type", *ROPE_SCALING_FIELDS[scaling["type"]].values())}
    return options


def _position_type(model: ModelConfig) -> str:
    """Returns `learned`, or the type of the rotary embedding."""
    if model.learned_positions is not None:
        return "learned"
    return "default" if model.rope_scaling is None else model.rope_scaling.type


def _find_family(config: Json, where: str) -> Family:
    name, classes = config.get("model_type"), config.get("architectures") or []
    if not isinstance(name, str):
        raise ModelConfigError(f"{where}: no model_type; expected the config.json of a Hugging Face model")
    family = FAMILIES.get(name)
    if family is None:
        matches = close_matches(name, FAMILIES, 0.85) if not any(c.isdigit() for c in name) else []
        hint = f" (did you mean `{matches[0]}`?)" if matches else ""
        message = f"model_type {format_value(name)} is not supported{hint}; supported: {join_words(FAMILIES, 'and')}"
        raise ModelConfigError(f"{where}: {message}")
    if not isinstance(classes, list):
        raise ModelConfigError(f"{where}: architectures: expected a list of names; found {format_value(classes)}")
    if classes and family.architecture not in classes:
        message = f"{format_value(classes[0])} is not supported; expected {family.architecture}"
        raise ModelConfigError(f"{where}: {message}")
    return family


def _unsupported_fields(config: Json, family: Family) -> str:
    """Returns the fields that may change the function of the model, with their values; empty if there are none."""
    supported = IGNORED_FIELDS | family.defaults.keys() | family.fields.keys() | set(family.ignored)
    supported |= SUPPORTED_VALUES.keys() | (set() if family.rope == LEARNED else ROPE_FIELDS)
    names = [name for name, only in SUPPORTED_VALUES.items() if config.get(name) not in (None, only)]
    names += [name for name, value in config.items() if name not in supported and value]
    return join_words((f"{format_name(name)} {format_value(config[name])}" for name in names), "and") if names else ""


def _whole_number(fields: Json, name: str, least: int = 1) -> int:
    """Returns a field that is computed with before the schema sees it."""
    value = fields[name]
    if type(value) is not int or not least <= value <= MAX_SIZE:
        raise ModelConfigError(
            f"{name}: expected a whole number from {least} to {MAX_SIZE}; found {format_value(value)}"
        )
    return value


def _activation(fields: Json, family: Family) -> str:
    name = fields[family.activation]
    if not isinstance(name, str) or name not in family.activations:
        expected = join_words(family.activations)
        raise ModelConfigError(f"{family.activation} {format_value(name)} is not supported; expected {expected}")
    return family.activations[name]


def _activation_field(model: ModelConfig, family: Family, original: Json) -> str:
    """Returns the Hugging Face name of the activation.

    Names of the same function differ in rounding, so the original name is kept if it means this function.
    """
    names = [name for name, activation in family.activations.items() if activation == model.activation]
    name = original.get(family.activation)
    return name if name in names else (names or list(family.activations))[0]


def _rope_options(fields: Json, family: Family) -> Json:
    """Returns the rotary options of all layers, from the fields of transformers 4 or 5."""
    if family.rope == LEARNED:
        return {}
    if LOCAL_THETA not in family.fields:
        return _rope_of_layers(fields, family)
    parameters = fields.get("rope_parameters") or {}
    if not isinstance(parameters, dict) or parameters.keys() - {FULL, SLIDING}:
        raise ModelConfigError(f"rope_parameters: expected {FULL} and {SLIDING}; found {format_value(parameters)}")
    full, sliding = ({"rope_parameters": parameters.get(layer_type)} for layer_type in (FULL, SLIDING))
    local = _rope_of_layers({"rope_theta": fields[LOCAL_THETA], **sliding}, family)
    if local["rope_scaling"] is not None:
        raise ModelConfigError(f"rope_parameters.{SLIDING} of type {local['rope_scaling']['type']} is not supported")
    return _rope_of_layers({**fields, **full}, family) | {"sliding_window_rope_theta": local["rope_theta"]}


def _rope_of_layers(fields: Json, family: Family) -> Json:
    """Returns `rope_theta` and `rope_scaling` of one type of layers."""
    source = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    parameters = fields.get(source) or {}
    if not isinstance(parameters, dict):
        raise ModelConfigError(f"{source}: expected a section; found {format_value(parameters)}")
    parameters = dict(parameters)
    rope_type = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    theta = parameters.pop("rope_theta", fields["rope_theta"])
    if rope_type not in family.rope:
        message = f"is not supported; a {family.name} may have {join_words(family.rope)}"
        raise ModelConfigError(f"{source} of type {format_value(rope_type)} {message}")
    if parameters.pop("partial_rotary_factor", 1) != 1:
        raise ModelConfigError(f"{source}.partial_rotary_factor is not supported; expected 1")
    names = ROPE_SCALING_FIELDS[rope_type]
    others = [n for n, value in parameters.items() if n not in ROPE_SCALING_FIELDS["llama3"] and value is not None]
    if others:
        message = f"is not supported; it may have {join_words(names)}"
        raise ModelConfigError(f"{source}.{format_name(others[0])} of type {rope_type} {message}")
    if rope_type == "llama3":
        parameters.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
    missing = [name for name in names if parameters.get(name) is None]
    if missing:
        raise ModelConfigError(f"{source}.{missing[0]} is missing, which {rope_type} needs")
    scaling = {"type": rope_type} | {option: parameters[name] for name, option in names.items()}
    return {"rope_theta": theta, "rope_scaling": None if rope_type == "default" else scaling}


def _rope_fields(model: ModelConfig) -> Json:
    scaling = model.rope_scaling
    if model.learned_positions is not None:
        return {}
    if scaling is None:
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    values = {name: getattr(scaling, option) for name, option in ROPE_SCALING_FIELDS[scaling.type].items()}
    return {"rope_theta": model.rope_theta, "rope_scaling": {"rope_type": scaling.type, **values}}


def _window_options(fields: Json, family: Family) -> Json:
    """Returns `sliding_window` and `sliding_window_pattern`."""
    size = fields.get("sliding_window")
    if family.window == "none" or size is None:
        return {}
    layers, types = _whole_number(fields, "num_hidden_layers"), fields.get("layer_types")
    if family.window == "used" or (family.window == "layers" and not types):
        size = size if fields["use_sliding_window"] else None
    if family.window in ("all", "used") or size is None:
        return {} if size is None else {"sliding_window": size}
    if types is None and family.window == "layers":
        full = _whole_number(fields, "max_window_layers", least=0)
        types = [FULL if layer < full else SLIDING for layer in range(layers)]
    elif types is None:
        types = _layer_types(layers, _whole_number({"sliding_window_pattern": 2, **fields}, "sliding_window_pattern"))
    if not isinstance(types, list) or SLIDING not in types:
        return {}
    pattern = types.index(FULL) + 1 if FULL in types else 1
    if types != _layer_types(layers, pattern):
        raise ModelConfigError(
            "layer_types (or max_window_layers) is not supported: expected a window in every layer, in none, or in all "
            f"but every n-th; found {format_value(','.join(str(kind).split('_')[0] for kind in types))}"
        )
    return {"sliding_window": size, "sliding_window_pattern": pattern}


def _window_fields(model: ModelConfig, family: Family) -> Json:
    if family.window == "none":
        return {}
    size, layers = model.sliding_window, model.layers
    types = [FULL] * layers if size is None else _layer_types(layers, model.sliding_window_pattern)
    fields: Json = {"sliding_window": size}
    if family.window in ("layers", "period"):
        fields["layer_types"] = types
    if family.window in ("layers", "used"):
        fields["use_sliding_window"] = size is not None
    if family.window == "layers":
        fields["max_window_layers"] = types.index(SLIDING) if SLIDING in types else layers
    return fields


def _layer_types(layers: int, pattern: int) -> list[str]:
    """Returns the attention type of each layer if every `pattern`-th attends globally; 1: none does."""
    return [FULL if pattern > 1 and layer % pattern == pattern - 1 else SLIDING for layer in range(layers)]


def _attention_scale(fields: Json) -> Json:
    scalar = fields.get("query_pre_attn_scalar")
    if scalar is None or scalar == fields["head_dim"]:
        return {}
    if not isinstance(scalar, (int, float)) or not 0 < scalar <= MAX_SIZE:
        message = f"expected a number above 0, of at most {MAX_SIZE}; found {format_value(scalar)}"
        raise ModelConfigError(f"query_pre_attn_scalar: {message}")
    return {"attention_scale": float(scalar) ** -0.5}


def _model_section(options: Json, family: Family, where: str) -> Json:
    """Returns flat options as a nested `model` section, validated by the schema."""
    section: Json = {}
    for key, value in options.items():
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
        field = family.field_of(".".join(map(str, detail["loc"])))
        message = f"{detail['msg'][0].lower()}{detail['msg'][1:]}; found {format_value(detail['input'])}"
        raise ModelConfigError(f"{where}: {field}: {message}") from None
    if model.head_dim is None and model.embed % model.heads:
        embed, heads = (f"{family.field_of(key)} {getattr(model, key)}" for key in ("embed", "heads"))
        raise ModelConfigError(f"{where}: {embed} is not divisible by {heads}, and there is no head_dim")
    return section


def _equal(a: Any, b: Any) -> bool:
    is_number = isinstance(a, float) and isinstance(b, (int, float)) and not isinstance(b, bool)
    return math.isclose(a, b, rel_tol=1e-12) if is_number else a == b
