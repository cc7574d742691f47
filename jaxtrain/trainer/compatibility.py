"""Resume compatibility: the guarantee of a resumed run, and the config changes that it accepts.

Measured: a resumed run repeats the uninterrupted one bit for bit with the same mesh, process count, XLA flags and
versions; another mesh or process count changes float32 losses by about 1e-7. Does not import JAX at import.
"""

from __future__ import annotations

import functools
import os
import re
from typing import Any, Literal

from jaxtrain.config.schema import Config
from jaxtrain.config.sections.sync import exchange_axis
from jaxtrain.io.packages import installed_version

Guarantee = Literal["bitwise", "fp32-tight", "changed"]

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "jaxtrain")

# Config keys that do not affect the numbers of a step. The resolved mesh is compared, not its config.
_NO_EFFECT = (
    "name", "dir", "simulate", "layout", "mesh", "checkpoint", "eval", "log",
    "data.cache_dir", "data.workers", "debug",
)  # fmt: skip

# Keys that a resumed run cannot change, with the reason.
_FIXED = {
    "model": "the saved weights belong to this model",
    "data.type": "it changes the order of the data",
    "data.options": "it changes the order of the data",
    "data.sources": "it changes the order of the data",
    "data.tokenizer": "the saved weights belong to this vocabulary",
    "data.sequence": "it changes the order of the data",
    "data.global_batch": "it changes the order of the data",
    "data.validation_fraction": "training would see validation documents",
    "seed": "it changes the order of the data",
    "optimizer.name": "the saved optimizer state belongs to it",
}
# Keys that change the mathematics of later steps: then the guarantee is "changed".
_MATHEMATICS = (
    "optimizer", "schedule", "loss", "precision", "steps", "epochs", "model", "data", "seed", "guard", "sync",
)  # fmt: skip
_SAME_DATA = re.compile(r"data\.(tokenizer|sources\.\d+\.(path|format|field|include(\.\d+)?))")

# Keys of a fixed section that do not decide its weights.
_FREE = ("model.init_std", "model.from", "model.weights", "model.moe.load_balance_loss", "model.moe.router_z_loss")

_WEIGHT = re.compile(r"(data\.sources\.\d+\.weight)(?:\.(\d+))?")

_XLA_NOISE = ("--xla_force_host_platform_device_count", "--xla_dump", "--xla_cpu_collective_timeout")


def environment(config: dict[str, Any], mesh: Any = None, **extra: Any) -> dict[str, Any]:
    """Builds the manifest of a checkpoint: everything that decides whether a resumed run is bitwise equal.

    Args:
      config: the resolved config (`Config.model_dump(mode="json")`).
      mesh: jax.sharding.Mesh of the run.
      extra: other JSON values to keep, e.g. the data position.
    """
    import jax

    devices = list(mesh.devices.flat) if mesh is not None else jax.devices()
    platform = devices[0].platform
    return {
        "config": config,
        "mesh": {axis: int(size) for axis, size in mesh.shape.items() if size > 1} if mesh is not None else {},
        "devices": len(devices),
        "device_kind": devices[0].device_kind if platform != "cpu" else f"cpu {_processor()}".strip(),
        "processes": jax.process_count(),
        "flags": {name: _flags(os.environ.get(name, "")) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "jax": {
            name: str(getattr(jax.config, name))
            for name in ("jax_default_matmul_precision", "jax_enable_x64", "jax_default_prng_impl")
        },
        "versions": {name: installed_version(name) for name in PACKAGES},
        **extra,
    }


def resume_guarantee(saved: dict[str, Any], now: dict[str, Any]) -> tuple[Guarantee, list[str]]:
    """Returns the guarantee of a run with manifest `now` that resumes from manifest `saved`, and the reasons.

    Returns: ("bitwise", []) if mesh, devices, processes, flags, versions and every config value with an effect are
      equal; ("changed", differences) if the config now asks for other mathematics, such as another learning rate;
      else ("fp32-tight", differences), one line each.
    """
    reasons, changed = [], []
    for part in ("mesh", "devices", "device_kind", "processes", "flags", "jax", "versions"):
        reasons += _differences(part, saved.get(part), now.get(part))
    before, after = _keys(saved.get("config") or {}), _keys(now.get("config") or {})
    same_data = saved.get("data") == now.get("data")
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key) or _under(key, _NO_EFFECT) or (same_data and _SAME_DATA.fullmatch(key)):
            continue
        line = f"config {key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        (changed if _changes_mathematics(key, after) else reasons).append(line)
    is_loose = any(keys.get("sync.strategy", "bsp") != "bsp" for keys in (before, after))
    replicas = [_replica_count(manifest.get("mesh") or {}, is_loose) for manifest in (saved, now)]
    has_residuals = any(before.get(f"sync.compress.{part}", "none") != "none" for part in ("deltas", "gradients"))
    if (is_loose or has_residuals) and replicas[0] != replicas[1]:
        lost = ", without what compression had left to send" if has_residuals else ""
        changed.append(f"replicas: {replicas[0]} -> {replicas[1]}, which start from what those before agreed on{lost}")
    if changed:
        return "changed", [*changed, *reasons]
    return ("fp32-tight", reasons) if reasons else ("bitwise", [])


def _replica_count(sizes: dict[str, int], is_loose: bool) -> int:
    """Returns the number of replicas that keep something of their own: those of `data` if they compress gradients."""
    return sizes.get("replica" if is_loose else exchange_axis(sizes), 1)


def _changes_mathematics(key: str, after: dict[str, Any]) -> bool:
    """Returns whether a key changes the mathematics. The steps do, unless the schedule does not depend on them."""
    if key in ("steps", "epochs") and after.get("schedule.name") in ("constant", "inverse_sqrt"):
        return False
    return _under(key, _MATHEMATICS)


def compare_configs(
    saved: dict[str, Any], new: dict[str, Any], step: int = 0, same_data: bool = False
) -> tuple[list[str], list[str]]:
    """Compares the config of a checkpoint with the one that resumes it.

    Args:
      saved: config of the checkpoint (`Config.model_dump(mode="json")`).
      new: config of the resumed run.
      step: step of the checkpoint: mixture weights from this step on may change, earlier ones may not.
      same_data: documents and tokenizer are the same, even if their paths differ.

    Returns: (changes, refused): lines `key: old -> new`. `changes` has all of them; a run with any in `refused` (with
      the reason) cannot resume and needs a new name. Layout, mesh, rules, precision between fp32 and bf16,
      accumulation, kernels, learning rate, steps, logging and checkpoints may change.
    """
    before, after = _keys(saved), _keys(new)
    changes, refused = [], []
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) == after.get(key):
            continue
        change = f"{key}: {_show(before.get(key))} -> {_show(after.get(key))}"
        changes.append(change)
        moved = same_data and _SAME_DATA.fullmatch(key)
        reason = None if moved else _refusal(key, before.get(key), after.get(key), step)
        if reason:
            refused.append(f"{change} cannot be resumed: {reason}")
    return changes, refused


def _refusal(key: str, before: Any, after: Any, step: int) -> str | None:
    """Returns why a run cannot resume with this change, or None."""
    weight = _WEIGHT.fullmatch(key)  # mixture weight from a step on: may change until the run reaches it
    if _under(key, _FREE) or (weight and int(weight[2]) >= step):
        return None
    for fixed, reason in _FIXED.items():
        if _under(key, (fixed,)):
            return reason
    if key == "optimizer.ema_decay" and (before is None) != (after is None):
        return "the checkpoint holds " + ("no average" if before is None else "an average") + " of the weights"
    if key == "precision" and "bf16_pure" in (before, after):
        return "the saved parameters have another dtype"
    if key == "precision" and "fp16" in (before, after):
        return "the checkpoint holds " + ("a" if before == "fp16" else "no") + " loss scale"
    return None


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    """Flattens a config, with source weights keyed by the step from which they hold, and defaults for absent keys."""
    flat = dict(_defaults())
    for key, value in _flat(config).items():
        weight = _WEIGHT.fullmatch(key)
        if weight:
            flat.setdefault(f"{weight[1]}.0", 1.0)
        flat[key if weight is None else f"{weight[1]}.{weight[2] or 0}"] = value
    return flat


@functools.cache
def _defaults() -> dict[str, Any]:
    return {key: value for key, value in _flat(Config().model_dump(mode="json")).items() if value is not None}


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flattens to {"data.sources.0.path": ...}; drops empty containers, so that absent and empty compare equal."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, child in items:
        flat.update(_flat(child, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(prefix + ".") for prefix in prefixes)


def _differences(part: str, before: Any, after: Any) -> list[str]:
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        keys = sorted(before.keys() | after.keys())
        return [line for key in keys for line in _differences(f"{part} {key}", before.get(key), after.get(key))]
    return [f"{part}: {_show(before)} -> {_show(after)}"]


def _show(value: Any) -> str:
    return "none" if value is None or value == "" else str(value)


def _flags(text: str) -> str:
    return " ".join(sorted(flag for flag in text.split() if not flag.startswith(_XLA_NOISE)))


def _processor() -> str:
    """Returns the CPU model name (Linux), because XLA compiles for its vector units; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        return ""
