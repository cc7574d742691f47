"""Learning-rate schedules: a linear warm-up, then a decay. Pure functions of the step, safe under jit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import ScheduleConfig
from jaxtrain.errors import UserError, describe_error
from jaxtrain.optim.functions import call_by_name

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def make_schedule_by_name(cfg: ScheduleConfig) -> Schedule:
    """Returns the schedule of optax or a user's own. Raises UserError if it can not be made, or returns no number."""
    schedule = call_by_name("schedule", cfg.name, cfg.options)
    try:
        value = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except Exception as error:
        raise UserError(f"schedule.name: {cfg.name} fails at a step: {describe_error(error)}") from error
    if getattr(value, "shape", None) != () or not jnp.issubdtype(value.dtype, jnp.number):
        raise UserError(f"schedule.name: {cfg.name} returns {value!r} at a step; expected a number, the learning rate")
    return lambda step: jnp.asarray(schedule(step), jnp.float32)


def make_schedule(peak: float, cfg: ScheduleConfig, steps: int) -> Schedule:
    """Returns a function of the step s = 0, 1, .., steps - 1 to the learning rate, a float32 scalar of at most `peak`.

    With w = min(`warmup_steps`, S), S = `steps`, f = `min_lr_ratio`, d = round(`decay_fraction` * S), lr = `peak`:

        s < w            lr * (s + 1) / (w + 1)        never zero, continuous, the peak is first reached at s = w
        p                clip((s - w) / (S - w), 0, 1)
        cosine           lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)      Loshchilov and Hutter 2017, arXiv 1608.03983
        linear           lr * (1 - (1 - f) * p)
        wsd              lr, then over the last d steps linearly to lr * f     Hu et al. 2024, arXiv 2404.06395
        inverse_sqrt     lr * sqrt((w + 1) / (s + 1))                    Vaswani et al. 2017, arXiv 1706.03762
        constant         lr

    `min_lr_ratio` is reached at s = S, one step after the last, so that no step has a rate of zero. In wsd the decay
    starts after the warm-up, even if that reaches into the last d steps.

    A schedule of optax or a user's own, made by the function that `name` names with `options`, returns the learning
    rate itself; of `lr` it knows only what it takes as `peak_value` or `init_value`.

    Raises:
        UserError: no such function, it does not take these options, or the schedule returns no number.
    """
    if not cfg.is_builtin:
        return make_schedule_by_name(cfg)
    warmup, ratio = min(cfg.warmup_steps, steps), cfg.min_lr_ratio
    decay_start = max(warmup, steps - round(cfg.decay_fraction * steps)) if cfg.name == "wsd" else warmup

    def progress(s: jax.Array) -> jax.Array:
        return jnp.clip((s - decay_start) / max(steps - decay_start, 1), 0.0, 1.0)

    def decay(s: jax.Array) -> jax.Array:
        match cfg.name:
            case "cosine":
                return ratio + (1 - ratio) * 0.5 * (1 + jnp.cos(jnp.pi * progress(s)))
            case "linear" | "wsd":
                return 1 - (1 - ratio) * progress(s)
            case "inverse_sqrt":
                return jnp.sqrt((warmup + 1) / (s + 1))
            case _:  # constant
                return jnp.ones_like(s)

    def lr(step: jax.typing.ArrayLike) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        return jnp.float32(peak) * jnp.where(s < warmup, (s + 1) / (warmup + 1), decay(s))

    return lr
