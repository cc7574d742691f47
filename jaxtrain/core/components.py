"""Python objects of a run, in place of what its config names."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.schema import Config


@dataclass(frozen=True, eq=False)
class Components:
    """Objects that a program is built of; None: what the config names.

    Attributes:
        model: a class of Flax modules, a function that returns one, a Linen module, or an NNX module, whose values are
            the initial ones.
        weights: a pytree of arrays, or a module: initial values of the variables of the same path.
    """

    model: Any = None
    weights: Any = None


NO_COMPONENTS = Components()


def with_model_type(config: Config, model: Any) -> Config:
    """Returns the config with the name of a class, a function or the class of a module as `model.type`."""
    named = model if hasattr(model, "__name__") else type(model)
    name = re.sub(r"\W", "", named.__name__) or "model"
    section = config.model.model_copy(update={"type": f"{named.__module__}:{name}"})
    return config.model_copy(update={"model": section})
