"""Python objects of a run, in place of what its config names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import optax

from jaxtrain.config.schema import OBJECT, Config, OptimizerConfig, ScheduleConfig
from jaxtrain.data.objects.iterables import IterableData
from jaxtrain.data.objects.open import RowsOf
from jaxtrain.errors import UserError, did_you_mean


@dataclass(frozen=True, eq=False)
class Components:
    """Objects that a program is built of; None: what the config names.

    Attributes:
        model: a class of Flax modules, a function that returns one, a Linen module, or an NNX module, whose values are
            the initial ones.
        weights: a pytree of arrays, or a module: initial values of the variables of the same path.
        optimizer: an optax transformation with its own learning rate; those of the config have no effect.
        loss: function (model, batch) -> loss, as `loss.function` names one.
        data: training data, see `data.objects.open.as_dataset`.
        eval_data: validation data; {name: data} for several sets.
        rows: of the batches of iterables: "global", or "local", those of this process.
        metrics: name -> function of (model, batch), of validation, beside those of `eval.metrics`.
    """

    model: Any = None
    weights: Any = None
    optimizer: optax.GradientTransformation | None = None
    loss: Callable[..., Any] | None = None
    data: Any = None
    eval_data: Any = None
    rows: RowsOf = "global"
    metrics: Mapping[str, Callable[..., Any]] | None = None


NO_COMPONENTS = Components()


def components_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Components:
    """Returns the objects that a function got as keyword arguments besides those that it names.

    Raises:
        UserError: an argument is none of them.
    """
    known = {field.name for field in fields(Components)}
    for name in arguments:
        if name in Config.model_fields and name not in known:
            raise UserError(f'{function.__name__}: no argument `{name}`; a key of the config is a text: "{name}=..."')
        if name not in known:
            named = [*inspect.signature(function).parameters, *known]
            raise UserError(f"{function.__name__}: no argument `{name}`{did_you_mean(name, named)}")
    return Components(**arguments)


def object_names(components: Components) -> dict[str, str]:
    """Returns the qualified names of the classes and functions that objects are, or are instances of."""
    given = {name: getattr(components, name) for name in ("model", "optimizer", "loss", "data", "eval_data")}
    return {name: _qualified_name(value) for name, value in given.items() if value is not None}


def _qualified_name(value: Any) -> str:
    value = value.source if isinstance(value, IterableData) else value
    named: Any = value.init if isinstance(value, optax.GradientTransformation) else value
    named = named if hasattr(named, "__qualname__") else type(named)
    return f"{getattr(named, '__module__', None) or type(value).__module__}:{named.__qualname__}"


def with_objects(config: Config, components: Components) -> Config:
    """Returns the config of a run with Python objects, which says `object` in their places.

    Raises:
        UserError: the optimizer is no optax transformation.
    """
    if components.rows not in ("global", "local"):
        raise UserError(f'rows: found {components.rows!r}; expected "global" or "local"')
    if components.model is not None:
        config = with_model_type(config, components.model)
    if components.optimizer is not None:
        config = with_optimizer_object(config, components.optimizer)
    if components.loss is not None:
        config = config.model_copy(update={"loss": config.loss.model_copy(update={"function": OBJECT})})
    if components.data is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"type": OBJECT, "options": {}})})
    return config


def with_optimizer_object(config: Config, optimizer: Any) -> Config:
    """Returns the config of a run with an optimizer object, whose learning rate, decay and clipping are its own.

    Raises:
        UserError: it is no optax transformation.
    """
    if not isinstance(optimizer, optax.GradientTransformation):
        expected = "expected an optax.GradientTransformation, such as optax.lamb(1e-3)"
        raise UserError(f"optimizer: found {type(optimizer).__name__}; {expected}")
    old = config.optimizer
    section = OptimizerConfig(name=OBJECT, grad_clip_norm=None, ema_decay=old.ema_decay, groups=old.groups)
    return config.model_copy(update={"optimizer": section, "schedule": ScheduleConfig(name=OBJECT)})


def with_model_type(config: Config, model: Any) -> Config:
    """Returns the config with the name of a class, a function or the class of a module as `model.type`."""
    named = model if hasattr(model, "__name__") else type(model)
    name = re.sub(r"\W", "", named.__name__) or "model"
    section = config.model.model_copy(update={"type": f"{named.__module__}:{name}"})
    return config.model_copy(update={"model": section})
