"""Optimizers as optax transformations on pytrees of stacked parameters; gradient clipping; EMA of the parameters."""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.optim.adafactor import scale_by_adafactor
from jaxtrain.optim.any_optax import make_by_name, on_stacked_layers
from jaxtrain.optim.frozen_adam import scale_by_frozen_adam
from jaxtrain.optim.param_dims import is_matrix, is_selection_bias, map_names, matrix_dims
from jaxtrain.optim.parameter_groups import assign_groups, scale_groups, weight_decay
from jaxtrain.optim.schedules import Schedule
from jaxtrain.optim.selection_bias import with_selection_biases, without_biases

MUON_RMS = 0.2  # RMS of a Muon update, similar to Adam's (Liu et al. 2025, arXiv 2502.16982)


def make_optimizer(
    cfg: OptimizerConfig, schedule: Schedule | None, names: Any, params: Any, bias_rate: float | None = None,
    component: optax.GradientTransformation | None = None, is_frozen: bool = False,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    """Returns the optimizer of a config. Its updates are to be added to the parameters.

    Those of optax and a user's own are applied to the parameters of single layers (`layer_stack`), and get the loss as
    `value` and the gradients as `grad`. Ours are a direction, then decoupled weight decay, then the learning rate:

        p <- p - lr(step) * (direction + weight_decay * p)

    Moments have the dtype of the parameters; arithmetic and updates are float32 (`with_float32_arithmetic`). Clipping
    is separate, see `clip_by_global_norm`. Directions:

        adamw      m_hat / (sqrt(v_hat) + epsilon)                        Loshchilov and Hutter 2019, arXiv 1711.05101
        lion       sign(beta1 * m + (1 - beta1) * g), m by beta2          Chen et al. 2023, arXiv 2302.06675
        sgd        m <- beta1 * m + g                                     heavy ball
        adafactor  factored second moment, no first; betas unused         Shazeer and Stern 2018, arXiv 1804.04235
        muon       Newton-Schulz of Nesterov momentum per matrix of each layer, RMS as Adam's; adamw for the rest
                   (tables, heads, norms, biases)                         Jordan 2024; Liu et al. 2025, arXiv 2502.16982

    Args:
        cfg: the `optimizer` section.
        schedule: learning rate by step; None with a component, which has its own.
        names: tree of tuples of logical names, like the parameters.
        params: the same tree of arrays or ShapeDtypeStructs.
        bias_rate: step size of the selection biases of experts, which are updated separately (`optim.selection_bias`).
        component: an optimizer in place of the one that `cfg` names.
        is_frozen: adamw gets first moments in place of gradients, and its second ones stay (`frozen_adam`).

    Raises:
        ValueError: a parameter has not as many names as dims.
        UserError: an optimizer of optax or a user's own that can not be made, or fails.
    """
    check_names(names, params)
    if bias_rate is not None:
        is_bias = map_names(is_selection_bias, names)
        rest = without_biases(names, is_bias), without_biases(params, is_bias)
        others = make_optimizer(cfg, schedule, *rest, component=component, is_frozen=is_frozen)
        return with_selection_biases(others, is_bias, bias_rate)
    assigned = assign_groups(cfg.groups, names)
    if component is not None or not cfg.is_builtin:
        tx = on_stacked_layers(component or make_by_name(cfg, schedule), names, params)
    else:
        decay = weight_decay(cfg, assigned, names)
        direction = scale_by_frozen_adam(*cfg.betas, cfg.epsilon) if is_frozen else _direction(cfg, names)
        tx = optax.chain(direction, decay, optax.scale_by_learning_rate(schedule))
    return scale_groups(with_float32_arithmetic(tx), cfg.groups, assigned)


def _direction(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
    adam = optax.scale_by_adam(*cfg.betas, cfg.epsilon)
    match cfg.name:
        case "adamw":
            return adam
        case "lion":
            return optax.scale_by_lion(*cfg.betas)
        case "sgd":
            return optax.trace(cfg.betas[0])
        case "adafactor":
            return scale_by_adafactor(names)
        case _:  # muon
            labels = map_names(lambda n: "muon" if uses_muon(n) else "adam", names)
            return optax.partition({"muon": _muon(cfg, names), "adam": adam}, labels)


def uses_muon(names: tuple[str | None, ...]) -> bool:
    """Returns whether Muon orthogonalises this parameter: a matrix that is neither an embedding table nor a head."""
    return is_matrix(names) and "vocab" not in names


def _muon(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
    def numbers(n: tuple) -> Any:
        return contrib.MuonDimensionNumbers(*matrix_dims(n)) if uses_muon(n) else optax.MaskedNode()

    numbers_tree = map_names(numbers, names)

    def scale_rms(u: jax.Array, dims: Any) -> jax.Array:
        # An orthogonal [n, m] matrix has RMS 1 / sqrt(max(n, m)).
        fan_in, fan_out = (prod(u.shape[axis] for axis in axes) for axes in dims)
        return u * (MUON_RMS * max(fan_in, fan_out) ** 0.5)

    def scale(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(scale_rms, updates, numbers_tree)

    orthogonal = contrib.scale_by_muon(beta=cfg.betas[0], eps=cfg.epsilon, weight_dimension_numbers=numbers_tree)
    return optax.chain(orthogonal, optax.stateless(scale))


def check_names(names: Any, params: Any) -> None:
    """Raises ValueError unless every parameter has as many names as dims."""

    def check(path: Any, n: tuple, p: Any) -> None:
        if len(n) != len(p.shape):
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"parameter {where}: {len(n)} logical names {n} for shape {tuple(p.shape)}")

    jax.tree_util.tree_map_with_path(check, names, params, is_leaf=lambda x: isinstance(x, tuple))


def with_float32_arithmetic(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns `tx` with float32 arithmetic; the state is stored in the dtypes of `tx.init`.

    Gradients, parameters and floating-point state are cast to float32, and the new state is cast back. Updates stay
    float32, so that a bfloat16 parameter is rounded once, after the sum (`optax.apply_updates`). A bfloat16 second
    moment does not follow changes below 2^-9 of itself: with beta2 above about 0.995 use float32 parameters.
    """
    extended = optax.with_extra_args_support(tx)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        extra = {name: _to_float32(value) for name, value in extra.items()}
        updates, new = extended.update(_to_float32(updates), _to_float32(state), _to_float32(params), **extra)
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def clip_by_global_norm(grads: Any, max_norm: float | None, names: Any = None) -> tuple[Any, jax.Array]:
    """Returns gradients scaled to a global norm of at most `max_norm`, and the norm before (float32 scalar).

    With `names`, the norm leaves out selection biases of experts, whose gradients are counts (only the sign matters).
    The norm is summed in float32; the gradients keep their dtypes. If the norm is not finite, the gradients become NaN
    rather than silently zero. Pascanu et al. 2013, arXiv 1211.5063.
    """
    counted = grads if names is None else map_names(lambda n, g: None if is_selection_bias(n) else g, names, grads)
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(counted)]
    norm = jnp.sqrt(sum(squares, jnp.float32(0)))
    if max_norm is None:
        return grads, norm
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), grads), norm


def ema_init(params: Any) -> Any:
    """Returns a float32 copy of the parameters: a bfloat16 average would not change at decays near one."""
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def ema_update(ema: Any, params: Any, decay: float) -> Any:
    """Returns decay * ema + (1 - decay) * params, computed in float32, in the dtype of `ema`."""

    def update(e: jax.Array, p: jax.Array) -> jax.Array:
        old = e.astype(jnp.float32)
        return (old + (1 - decay) * (p.astype(jnp.float32) - old)).astype(e.dtype)

    return jax.tree.map(update, ema, params)
