"""The optimizers, as optax transformations on plain pytrees of stacked parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.optim.adafactor import scale_by_adafactor
from jaxtrain.optim.param_dims import contraction, is_matrix, is_selection, map_names
from jaxtrain.optim.schedules import Schedule
from jaxtrain.optim.selection_bias import apart, without_biases

MUON_RMS = 0.2  # RMS of a Muon update, about Adam's (Liu et al. 2025, arXiv 2502.16982)


def optimizer(
    cfg: OptimizerConfig, schedule: Schedule, names: Any, params: Any, bias_rate: float | None = None
) -> optax.GradientTransformation:
    """The config's optimizer: direction, then decoupled weight decay, then the learning rate.

        p <- p - lr(step) * (direction + weight_decay * p)

    Moments have the dtype of the parameters, arithmetic is float32 (`in_float32`); updates are float32. Clipping is
    not in here: see `clip`. Directions:

        adamw      m_hat / (sqrt(v_hat) + epsilon)                        Loshchilov and Hutter 2019, arXiv 1711.05101
        lion       sign(beta1 * m + (1 - beta1) * g), m by beta2          Chen et al. 2023, arXiv 2302.06675
        sgd        m <- beta1 * m + g                                     heavy ball
        adafactor  factored second moment, no first; betas unused         Shazeer and Stern 2018, arXiv 1804.04235
        muon       Newton-Schulz of Nesterov momentum per matrix of each layer, RMS as Adam's; adamw for the rest
                   (tables, heads, norms, biases)                         Jordan 2024; Liu et al. 2025, arXiv 2502.16982

    Args:
        cfg: the `optimizer` section.
        schedule: learning rate of a step.
        names: tree of logical-name tuples of the parameters.
        params: the same tree of arrays or ShapeDtypeStructs.
        bias_rate: step of the selection biases of experts, which take no part in any of this (`optim.balance`).

    Raises:
        ValueError: a parameter whose number of names is not its number of dims.
    """
    check_names(names, params)
    if bias_rate is not None:
        is_bias = map_names(is_selection, names)
        others = optimizer(cfg, schedule, without_biases(names, is_bias), without_biases(params, is_bias))
        return apart(others, is_bias, bias_rate)
    mask = None if cfg.decay_all_parameters else decayed(names)
    return in_float32(
        optax.chain(
            _direction(cfg, names),
            optax.add_decayed_weights(cfg.weight_decay, mask),
            optax.scale_by_learning_rate(schedule),
        )
    )


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
        case "muon":
            labels = map_names(lambda n: "muon" if is_orthogonal(n) else "adam", names)
            return optax.partition({"muon": _muon(cfg, names), "adam": adam}, labels)


def is_orthogonal(names: tuple[str | None, ...]) -> bool:
    """Returns whether Muon orthogonalises this parameter: a matrix that is neither an embedding table nor a head."""
    return is_matrix(names) and "vocab" not in names


def _muon(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
    def numbers(n: tuple) -> Any:
        return contrib.MuonDimensionNumbers(*contraction(n)) if is_orthogonal(n) else optax.MaskedNode()

    numbers_tree = map_names(numbers, names)

    def same_rms(u: jax.Array, dims: contrib.MuonDimensionNumbers) -> jax.Array:
        # An orthogonal [n, m] matrix has RMS 1 / sqrt(max(n, m)).
        fan_in, fan_out = (_size(u, axes) for axes in dims)
        return u * (MUON_RMS * max(fan_in, fan_out) ** 0.5)

    def scale(updates: Any, params: Any = None) -> Any:
        return jax.tree.map(same_rms, updates, numbers_tree)

    orthogonal = contrib.scale_by_muon(beta=cfg.betas[0], eps=cfg.epsilon, weight_dimension_numbers=numbers_tree)
    return optax.chain(orthogonal, optax.stateless(scale))


def _size(x: jax.Array, dims: Any) -> int:
    size = 1
    for dim in dims:
        size *= x.shape[dim]
    return size


def decayed(names: Any) -> Any:
    """Tree of bools: matrices are decayed (a head too); norms, biases and embedding tables are not."""
    return map_names(is_matrix, names)


def check_names(names: Any, params: Any) -> None:
    """Raises ValueError unless every parameter has one name per dim."""

    def check(path: Any, n: tuple, p: Any) -> None:
        if len(n) != len(p.shape):
            where = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(f"parameter {where}: {len(n)} logical names {n} for shape {tuple(p.shape)}")

    jax.tree_util.tree_map_with_path(check, names, params, is_leaf=lambda x: isinstance(x, tuple))


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """`tx` with float32 arithmetic and state stored in the dtypes of its own `init`.

    Gradients, parameters and floating state are cast up, the new state is rounded back; updates stay float32, so
    that a bfloat16 parameter is rounded once, after the sum (`optax.apply_updates`). Nothing changes when all is
    float32 already. A bfloat16 second moment stops following changes below 2^-9 of itself: with beta2 above about
    0.995 keep float32 masters.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(_up(updates), _up(state), _up(params))
        return updates, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)

    return optax.GradientTransformation(tx.init, update)


def _up(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def clip(grads: Any, max_norm: float | None, names: Any = None) -> tuple[Any, jax.Array]:
    """Gradients scaled to a global norm of at most `max_norm`, and the norm before (float32 scalar).

    With `names`, selection biases of experts are not in the norm: their gradients are counts (only the sign matters).
    The norm is summed in float32 over all tensors; dtypes are kept. A norm that is not finite stays visible: the
    gradients become NaN rather than silently zero. Pascanu et al. 2013, arXiv 1211.5063.
    """
    counted = grads if names is None else map_names(lambda n, g: None if is_selection(n) else g, names, grads)
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(counted)]
    norm = jnp.sqrt(sum(squares, jnp.float32(0)))
    if max_norm is None:
        return grads, norm
    factor = jnp.where(jnp.isfinite(norm), max_norm / jnp.maximum(norm, max_norm), jnp.nan)
    return jax.tree.map(lambda g: (g.astype(jnp.float32) * factor).astype(g.dtype), grads), norm


def ema_init(params: Any) -> Any:
    """A float32 copy of the parameters: a bfloat16 average would not move at decays near one."""
    return jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params)


def ema_update(ema: Any, params: Any, decay: float) -> Any:
    """Decay * ema + (1 - decay) * params in float32, stored in the dtype of `ema`."""

    def one(e: jax.Array, p: jax.Array) -> jax.Array:
        old = e.astype(jnp.float32)
        return (old + (1 - decay) * (p.astype(jnp.float32) - old)).astype(e.dtype)

    return jax.tree.map(one, ema, params)
