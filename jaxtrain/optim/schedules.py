"""Learning-rate schedules: a linear warm-up, then a shape. Pure functions of the step, safe under jit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import ScheduleConfig

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def schedule(peak: float, cfg: ScheduleConfig, steps: int) -> Schedule:
    """Returns the learning rate of step s = 0, 1, .., steps - 1 as a float32 scalar; `peak` is its largest value.

    With w = min(`warmup_steps`, S), S = `steps`, f = `min_lr_ratio`, d = round(`decay_fraction` * S), lr = `peak`:

        s < w            lr * (s + 1) / (w + 1)        never zero, continuous, the peak is first reached at s = w
        p                clip((s - w) / (S - w), 0, 1)
        cosine           lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)      Loshchilov and Hutter 2017, arXiv 1608.03983
        linear           lr * (1 - (1 - f) * p)
        wsd              lr, then over the last d steps linearly to lr * f     Hu et al. 2024, arXiv 2404.06395
        inverse_sqrt     lr * sqrt((w + 1) / (s + 1))                    Vaswani et al. 2017, arXiv 1706.03762
        constant         lr

    `min_lr_ratio` is reached at s = S, one step after the last, so that no step is spent at a rate of zero. In wsd a
    warm-up that reaches into the last d steps goes first, and the decay takes the rest.
    """
    warmup = min(cfg.warmup_steps, steps)
    shape = _SHAPES[cfg.name](cfg, warmup, steps)

    def lr(step: jax.typing.ArrayLike) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        warm = (s + 1) / (warmup + 1)
        return jnp.float32(peak) * jnp.where(s < warmup, warm, shape(s))

    return lr


def _progress(start: int, end: int) -> Schedule:
    """0 until `start`, 1 from `end` on, linear between."""
    return lambda s: jnp.clip((s - start) / max(end - start, 1), 0.0, 1.0)


def _cosine(cfg: ScheduleConfig, warmup: int, steps: int) -> Schedule:
    p = _progress(warmup, steps)
    return lambda s: cfg.min_lr_ratio + (1 - cfg.min_lr_ratio) * 0.5 * (1 + jnp.cos(jnp.pi * p(s)))


def _linear(cfg: ScheduleConfig, warmup: int, steps: int) -> Schedule:
    p = _progress(warmup, steps)
    return lambda s: 1 - (1 - cfg.min_lr_ratio) * p(s)


def _wsd(cfg: ScheduleConfig, warmup: int, steps: int) -> Schedule:
    p = _progress(max(warmup, steps - round(cfg.decay_fraction * steps)), steps)
    return lambda s: 1 - (1 - cfg.min_lr_ratio) * p(s)


def _inverse_sqrt(cfg: ScheduleConfig, warmup: int, steps: int) -> Schedule:
    del cfg, steps
    return lambda s: jnp.sqrt((warmup + 1) / (s + 1))


def _constant(cfg: ScheduleConfig, warmup: int, steps: int) -> Schedule:
    del cfg, warmup, steps
    return jnp.ones_like


_SHAPES = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}
