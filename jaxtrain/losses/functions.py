"""Ready-made losses by name, and the call of a model's own loss or of a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config.schema import OBJECT, LossConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.errors import UserError, did_you_mean

# (model, batch, key, is_training=True) -> what the loss returns
LossFunction = Callable[..., Any]
TRAINING = ("train", "training", "is_training")  # arguments by which modules and losses learn of the mode
EVALUATING = ("deterministic", "use_running_average")


def loss_function(loss: LossConfig, component: Callable[..., Any] | None = None) -> LossFunction:
    """Returns (model, batch, key, is_training) -> what the loss returns; see `losses.terms.split_loss_output`.

    It is `component`, `loss.function`, or else the model's method `loss`. Users' functions and methods may leave out
    the key, and may take the mode: one of `train`, `training`, `is_training`, `deterministic`, `use_running_average`.

    Raises:
        UserError: no such function.
    """
    name = loss.function
    if name is None:
        return _call_method
    if name == OBJECT and component is None:
        raise UserError("loss: the run has one that was given in Python; expected it again, as `loss=...`")
    if name == OBJECT or ":" in name:
        function = component or load_class(name, "loss.function")
        return lambda model, batch, key, is_training=True: _call(function, (model, batch), key, is_training)
    if name not in READY:
        hint = did_you_mean(name, READY) or f"; expected `package.module:function` or one of {', '.join(READY)}"
        raise UserError(f"loss.function: no loss is called `{name}`{hint}")
    ready = READY[name]

    def call(model: Any, batch: Mapping[str, jax.Array], key: jax.Array, is_training: bool = True) -> Any:
        del key
        for role, field in (("inputs", loss.inputs), ("targets", loss.targets)):
            if field not in batch:
                found = ", ".join(sorted(batch))
                raise UserError(f"loss.{role}: the batch has no `{field}`; it has {found}")
        mode = _mode(inspect.signature(model), is_training)
        outputs = model(batch[loss.inputs], **mode).astype(jnp.float32)
        return ready(loss, outputs, batch[loss.targets], batch.get("weights"))

    return call


def _call_method(model: Any, batch: Mapping[str, jax.Array], key: jax.Array, is_training: bool = True) -> Any:
    method = getattr(model, "loss", None)
    if not callable(method):
        raise UserError(
            f"model.type: {type(model).__name__} has no method `loss(batch, key)`; expected one, or loss.function"
        )
    return _call(method, (batch,), key, is_training)


def _call(function: Callable, arguments: tuple, key: jax.Array, is_training: bool) -> Any:
    """Calls a user's function with those of key and mode that it takes."""
    signature = inspect.signature(function)
    mode = _mode(signature, is_training)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [name for name, p in signature.parameters.items() if p.kind in positional and name not in mode]
    arguments = (*arguments, key) if len(names) > len(arguments) else arguments
    by_name = {"key": key} if "key" in signature.parameters and "key" not in names else {}
    try:
        signature.bind(*arguments, **by_name, **mode)
    except TypeError as error:
        taken = f"{getattr(function, '__qualname__', 'loss')}{signature}"
        raise UserError(f"loss: {taken}: {error}; expected (batch), (batch, key), or with the model first") from error
    return function(*arguments, **by_name, **mode)


def _mode(signature: inspect.Signature, is_training: bool) -> dict[str, bool]:
    """Returns the arguments of a function that tell the mode."""
    values = dict.fromkeys(TRAINING, is_training) | dict.fromkeys(EVALUATING, not is_training)
    return {name: value for name, value in values.items() if name in signature.parameters}


def cross_entropy(loss: LossConfig, logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> Any:
    """Returns the cross-entropy of integer targets, with `label_smoothing` and `z_loss`.

    Args:
        loss: the `loss` section.
        logits: float32 [..., classes].
        targets: integers [...].
        weights: [...], or one for each row; default: ones.
    """
    _check_shape("cross_entropy", logits.shape[:-1], targets.shape)
    log_z = jax.nn.logsumexp(logits, -1)
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    uniform = logits.mean(-1)
    values = log_z - (1 - loss.label_smoothing) * chosen - loss.label_smoothing * uniform
    terms = {"cross_entropy": _weighted(values, weights)}
    if loss.z_loss:
        total, weight = _weighted(log_z**2, weights)
        terms["z_loss"] = loss.z_loss * total, weight
    return terms


def mean_squared_error(loss: LossConfig, outputs: jax.Array, targets: jax.Array, weights: jax.Array | None) -> Any:
    """Returns the squared error, over all elements. Shapes of outputs and targets are equal; see `cross_entropy`."""
    del loss
    _check_shape("mse", outputs.shape, targets.shape)
    return {"mse": _weighted((outputs - targets.astype(jnp.float32)) ** 2, weights)}


def binary_cross_entropy(loss: LossConfig, logits: jax.Array, targets: jax.Array, weights: jax.Array | None) -> Any:
    """Returns the cross-entropy of sigmoid(logits) with targets in 0 to 1. Shapes are equal; see `cross_entropy`."""
    _check_shape("bce", logits.shape, targets.shape)
    smooth = targets.astype(jnp.float32) * (1 - loss.label_smoothing) + 0.5 * loss.label_smoothing
    return {"bce": _weighted(optax.sigmoid_binary_cross_entropy(logits, smooth), weights)}


def _weighted(values: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of values and the sum of their weights."""
    weights = jnp.ones(values.shape[:1]) if weights is None else weights.astype(jnp.float32)
    weights = jnp.broadcast_to(weights.reshape(*weights.shape, *(1,) * (values.ndim - weights.ndim)), values.shape)
    return jnp.sum(values * weights), jnp.sum(weights)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise UserError(f"loss.function: {name} of outputs {found} and targets {expected}; expected equal shapes")


READY = {"cross_entropy": cross_entropy, "mse": mean_squared_error, "bce": binary_cross_entropy}
