"""Typed config: the schema, loading with layouts and overrides, and errors that say what would be right."""

from jaxtrain.config.compare import diff_lines
from jaxtrain.config.errors import ConfigError, Problem, UserError, locate
from jaxtrain.config.load import load, resolve
from jaxtrain.config.output import diff, dump_yaml, flatten, show
from jaxtrain.config.schema import Config
from jaxtrain.config.shipped import configs_dir, layout_names
from jaxtrain.config.validate import json_schema

__all__ = [
    "Config",
    "ConfigError",
    "Problem",
    "UserError",
    "configs_dir",
    "diff",
    "diff_lines",
    "dump_yaml",
    "flatten",
    "json_schema",
    "layout_names",
    "load",
    "locate",
    "resolve",
    "show",
]
