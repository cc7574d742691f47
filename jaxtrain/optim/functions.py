"""Functions that make optimizers and schedules, by name: those of optax, and a user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxtrain.config.user_class import USER_CLASS, call, load_class
from jaxtrain.errors import UserError, did_you_mean, format_value

RATE = "learning_rate"
OPTAX = "optax."  # begins the names of functions of optax


def call_by_name(section: str, name: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Any:
    """Calls the function of a name with options.

    Args:
        section: section of the config that names it, for messages.
        name: `optax.NAME`, `optax.contrib.NAME`, `package.module:NAME`, or one that an installed package adds.
        options: keyword arguments; those of functions of optax may name objects, as `package.module:NAME`.
        defaults: keyword arguments for a function that takes them, if the options do not have them.

    Raises:
        UserError: no such function, or it fails.
    """
    own = None if name.startswith(OPTAX) else load_class(name, f"{section}.name", "optimizers")
    options = dict(options) if own else {key: _named(section, key, value) for key, value in options.items()}
    try:
        return call(section, own or optax_function(section, name), name, options, defaults)
    except UserError as error:
        if callable((defaults or {}).get(RATE)) and RATE not in options and "TypeError" in str(error):
            hint = f"it gets a schedule as `{RATE}`; if it takes a number only, expected {section}.options.{RATE}"
            raise UserError(f"{error}; {hint}") from error
        raise


def _named(section: str, key: str, value: Any) -> Any:
    """Returns the object that an option names, or the option itself.

    Raises:
        UserError: there is no such object, or a mask is another text: optax takes any text as True for all parameters.
    """
    if isinstance(value, str) and re.fullmatch(USER_CLASS, value):
        return load_class(value, f"{section}.options.{key}")
    if isinstance(value, str) and key.endswith("mask"):
        expected = "expected a function of the parameters as `package.module:function`"
        raise UserError(f"{section}.options.{key}: {expected}; found {format_value(value)}")
    return value


def optax_function(section: str, name: str) -> Callable[..., Any]:
    """Returns the function of optax with a name such as `optax.lamb`. Raises UserError if there is none."""
    found: Any = optax
    for part in name.removeprefix(OPTAX).split("."):
        if not hasattr(found, part):
            raise UserError(f"{section}.name: there is no `{name}`{did_you_mean(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{section}.name: `{name}` is no function; expected one such as optax.lamb")
    return found
