"""Learning-rate schedules: a linear warm-up, then a shape. Pure functions of the step, safe under jit."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtrain.config.schema import Optimizer

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def schedule(cfg: Optimizer, steps: int) -> Schedule:
    """The learning rate of step s = 0, 1, .., steps - 1 as a float32 scalar.

    With w = `warmup`, S = `steps`, f = `final`, d = round(`decay` * S):

        s < w            lr * (s + 1) / (w + 1)        never zero, continuous, the peak is first reached at s = w
        p                clip((s - w) / (S - w), 0, 1)
        cosine           lr * (f + (1 - f) * (1 + cos(pi * p)) / 2)      Loshchilov and Hutter 2017, arXiv 1608.03983
        linear           lr * (1 - (1 - f) * p)
        wsd              lr, then over the last d steps linearly to lr * f     Hu et al. 2024, arXiv 2404.06395
        inverse_sqrt     lr * sqrt((w + 1) / (s + 1))                    Vaswani et al. 2017, arXiv 1706.03762
        constant         lr

    `final` is reached at s = S, one step after the last, so that no step is spent at a rate of zero. In wsd a warm-up
    that reaches into the last d steps goes first and the decay takes what is left.
    """
    shape = _SHAPES[cfg.schedule](cfg, steps)

    def lr(step: jax.typing.ArrayLike) -> jax.Array:
        s = jnp.asarray(step, jnp.float32)
        warm = (s + 1) / (cfg.warmup + 1)
        return jnp.float32(cfg.lr) * jnp.where(s < cfg.warmup, warm, shape(s))

    return lr


def _progress(start: int, end: int) -> Schedule:
    """0 until `start`, 1 from `end` on, linear between."""
    return lambda s: jnp.clip((s - start) / max(end - start, 1), 0.0, 1.0)


def _cosine(cfg: Optimizer, steps: int) -> Schedule:
    p = _progress(cfg.warmup, steps)
    return lambda s: cfg.final + (1 - cfg.final) * 0.5 * (1 + jnp.cos(jnp.pi * p(s)))


def _linear(cfg: Optimizer, steps: int) -> Schedule:
    p = _progress(cfg.warmup, steps)
    return lambda s: 1 - (1 - cfg.final) * p(s)


def _wsd(cfg: Optimizer, steps: int) -> Schedule:
    p = _progress(max(cfg.warmup, steps - round(cfg.decay * steps)), steps)
    return lambda s: 1 - (1 - cfg.final) * p(s)


def _inverse_sqrt(cfg: Optimizer, steps: int) -> Schedule:
    del steps
    return lambda s: jnp.sqrt((cfg.warmup + 1) / (s + 1))


def _constant(cfg: Optimizer, steps: int) -> Schedule:
    del cfg, steps
    return jnp.ones_like


_SHAPES = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}
