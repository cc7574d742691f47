"""Shrinks a config until it compiles on every layout in seconds, and lists the changes."""

from __future__ import annotations

from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.model import ModelConfig, MoeConfig
from jaxtrain.config.sections.sync import SyncConfig
from jaxtrain.config.show import as_dict, flatten
from jaxtrain.models.spec import is_decoder

HEADS, HEAD_DIM, EMBED, MLP, EXPERTS, VOCAB, SEQUENCE = 8, 8, 64, 128, 8, 512, 32
LAYERS = 4  # two for each of two pipeline stages
EVERY = 2  # steps between exchanges
EPSILON = 1e-4  # of the optimizer: below it an update is the sign of a rounding error


def shrink(config: Config, devices: int) -> tuple[Config, list[str]]:
    """Returns the config in float32 with sizes that eight devices can split in many ways; ratios and options stay.

    A user's own model keeps its options; only its batch shrinks.

    Returns:
        The small config, and `key: old -> new` for every change.
    """
    values = as_dict(config)
    if is_decoder(config.model):
        values["model"] |= _model(config.model)
        values["data"]["sequence"] = min(config.data.sequence, SEQUENCE)
    values["data"]["global_batch"] = 2 * devices
    values["step"] |= {"microbatches": 1, "attention": "auto"}  # the fast kernels need their chips
    values |= {"precision": "fp32", "steps": 1000, "simulate": devices, "debug": {}}
    values["sync"] = {}  # replicas that differ equal no single device; see `replicas`
    if not config.optimizer.is_object:  # an object has its own learning rate and epsilon
        values["schedule"] = {"name": "constant"}
        values["optimizer"]["epsilon"] = max(EPSILON, config.optimizer.epsilon)
    values["eval"]["every"] = values["checkpoint"]["every"] = None
    values["checkpoint"]["keep_best"] = 0
    small = Config(**values)
    before, after = flatten(config), flatten(small)
    unlisted = ("eval.", "checkpoint.", "steps", "simulate", "sync.")
    changes = [key for key in after if before.get(key) != after[key] and not key.startswith(unlisted)]
    return small, [f"{key}: {before.get(key)} -> {after[key]}" for key in changes]


def shrink_sync(sync: SyncConfig) -> SyncConfig:
    """Returns section `sync` with few steps in a round and in a first phase: a comparison has several exchanges."""
    rounds: dict[str, Any] = {"every": min(sync.every, EVERY), "bsp_steps": min(sync.bsp_steps, 1)}
    first = {name: min(getattr(sync.compress, name), EVERY) for name in ("freeze", "warmup")}
    rounds["compress"] = sync.compress.model_copy(update=first)
    if sync.strategy == "streaming_diloco":  # of at most two fragments, which travel for one step at most
        fragments = min(sync.streaming.fragments, 2)
        streaming = {"fragments": fragments, "tau": min(sync.streaming.tau, 1)}
        rounds |= {"every": EVERY * fragments, "streaming": sync.streaming.model_copy(update=streaming)}
    return sync.model_copy(update=rounds)


def _model(model: ModelConfig) -> dict[str, Any]:
    """Sizes of the small decoder; it keeps the number of query heads per key/value head if that divides."""
    group = model.heads // (model.kv_heads or model.heads)
    heads = HEADS if model.heads > HEADS else model.heads
    kv_heads = max(1, heads // group)
    if heads % kv_heads:
        kv_heads = 1
    sizes: dict[str, Any] = {
        "heads": heads, "kv_heads": kv_heads, "embed": min(model.embed, EMBED), "mlp": min(model.mlp, MLP),
        "head_dim": min(model.head_dim or model.embed // model.heads, HEAD_DIM), "vocab": VOCAB,
        "layers": min(model.layers, -(-LAYERS // model.sliding_window_pattern) * model.sliding_window_pattern),
    }  # fmt: skip
    if model.sliding_window is not None:
        sizes["sliding_window"] = min(model.sliding_window, SEQUENCE // 3)
    if model.learned_positions is not None:
        sizes["learned_positions"] = min(model.learned_positions, SEQUENCE)
    if model.moe is not None:
        sizes |= {"moe": _moe(model.moe), "mlp": min(model.mlp, MLP // 2)}
    return sizes


def _moe(moe: MoeConfig) -> dict[str, Any]:
    """Options of a small mixture. A token visits at most half of fewer experts, so that some are not selected."""
    experts, capacity = min(moe.num_experts, EXPERTS), moe.capacity_factor
    top_k = moe.top_k if experts == moe.num_experts else min(moe.top_k, experts // 2)
    if capacity is not None:
        capacity = min(capacity, experts / top_k)  # capacity above the tokens of a sequence is refused
    return moe.model_dump() | {"num_experts": experts, "top_k": top_k, "capacity_factor": capacity}
