"""Typed config: the schema, loading with layouts and overrides, and errors that say what would be right."""

from jaxtrain.config.key_names import json_schema
from jaxtrain.config.schema import Config
from jaxtrain.config.shipped import configs_dir, layout_names
from jaxtrain.config.show import diff, dump_yaml, flatten, show
from jaxtrain.errors import ConfigError, Problem, UserError, add_locations

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "UserError",
    "add_locations",
    "configs_dir",
    "diff",
    "dump_yaml",
    "flatten",
    "json_schema",
    "layout_names",
    "show",
]
