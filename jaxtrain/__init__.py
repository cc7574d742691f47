"""jaxtrain: train Flax models on any device mesh from a typed config.

    import jaxtrain
    trainer = jaxtrain.Trainer("quickstart", layout="fsdp")
    result = trainer.fit()

Nothing is imported before it is used, so that flags can be set before JAX starts.
"""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from jaxtrain.api.checkpoints import checkpoints
    from jaxtrain.api.config_text import config_schema, diff, show_config
    from jaxtrain.api.data_preparation import build_data, train_tokenizer
    from jaxtrain.api.data_view import show_data
    from jaxtrain.api.functions import data_shard, evaluate, generate, initialize, resume, stream, train, verify
    from jaxtrain.api.hf_conversion import export, import_model
    from jaxtrain.api.planning import plan, search
    from jaxtrain.api.report import islands_report, report
    from jaxtrain.api.schedule import compare_schedules, schedule
    from jaxtrain.api.trainer import Step, Trainer
    from jaxtrain.callbacks.base import Callback
    from jaxtrain.callbacks.best_checkpoints import BestCheckpoints
    from jaxtrain.callbacks.early_stopping import EarlyStopping
    from jaxtrain.callbacks.histograms import Histograms
    from jaxtrain.callbacks.learning_rate import LearningRateMonitor
    from jaxtrain.callbacks.profiler import Profiler
    from jaxtrain.callbacks.samples import LossPlot, Samples
    from jaxtrain.config import Config, ConfigError
    from jaxtrain.core.resolve import ConfigSource
    from jaxtrain.errors import UserError
    from jaxtrain.sync.strategy import Strategy
    from jaxtrain.trackers.base import Tracker

__all__ = [
    "BestCheckpoints", "Callback", "Config", "ConfigError", "EarlyStopping", "Histograms", "LearningRateMonitor",
    "LossPlot", "Profiler", "Samples", "Step", "Strategy", "Tracker", "Trainer", "UserError", "build_data",
    "checkpoints", "compare_schedules", "config_schema", "data_shard", "diff", "evaluate", "export", "generate",
    "import_model", "initialize", "islands_report", "load", "plan", "report", "resume", "schedule", "search",
    "show_config", "show_data", "stream", "train", "train_tokenizer", "verify",
]  # fmt: skip
_FUNCTIONS, _TRAINER, _CONFIG = "jaxtrain.api.functions", "jaxtrain.api.trainer", "jaxtrain.config"
_MODULES = {
    **dict.fromkeys(("data_shard", "evaluate", "generate", "initialize"), _FUNCTIONS),
    **dict.fromkeys(("resume", "stream", "train", "verify"), _FUNCTIONS),
    **dict.fromkeys(("config_schema", "diff", "show_config"), "jaxtrain.api.config_text"),
    **dict.fromkeys(("build_data", "train_tokenizer"), "jaxtrain.api.data_preparation"),
    "show_data": "jaxtrain.api.data_view",
    **dict.fromkeys(("compare_schedules", "schedule"), "jaxtrain.api.schedule"),
    "checkpoints": "jaxtrain.api.checkpoints",
    **dict.fromkeys(("plan", "search"), "jaxtrain.api.planning"),
    **dict.fromkeys(("islands_report", "report"), "jaxtrain.api.report"),
    **dict.fromkeys(("export", "import_model"), "jaxtrain.api.hf_conversion"),
    **dict.fromkeys(("Step", "Trainer"), _TRAINER), **dict.fromkeys(("Config", "ConfigError"), _CONFIG),
    "BestCheckpoints": "jaxtrain.callbacks.best_checkpoints", "Callback": "jaxtrain.callbacks.base",
    "EarlyStopping": "jaxtrain.callbacks.early_stopping", "Histograms": "jaxtrain.callbacks.histograms",
    "LearningRateMonitor": "jaxtrain.callbacks.learning_rate", "LossPlot": "jaxtrain.callbacks.samples",
    "Profiler": "jaxtrain.callbacks.profiler", "Samples": "jaxtrain.callbacks.samples",
    "Strategy": "jaxtrain.sync.strategy", "Tracker": "jaxtrain.trackers.base", "UserError": "jaxtrain.errors",
}  # fmt: skip


def load(source: ConfigSource = None, *overrides: str, base: dict[str, Any] | None = None, **keys: Any) -> Config:
    """Loads a config, and checks values, mesh, rules and the model's dims.

    Args:
        source: YAML file, name of a shipped config, dict of sections, `Config`, or None for the defaults.
        overrides: `key=value` texts.
        base: values under the file, above the defaults.
        keys: sections or keys of the config, such as `layout="fsdp"`.

    Returns:
        the config, frozen and complete.

    Raises:
        ConfigError: has every problem, one line each.
    """
    from jaxtrain.core.resolve import load_config, resolve

    if base is not None and not keys and (source is None or isinstance(source, (str, os.PathLike))):
        return resolve(source, *overrides, base=base)[0]
    return load_config(base if source is None else source, *overrides, **keys)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("jaxtrain.io.packages").installed_version("jaxtrain") or "0+unknown"  # no installation
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'jaxtrain' has no attribute {name!r}")
