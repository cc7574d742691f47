"""Schedules against plain NumPy formulas at every step."""

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import ScheduleConfig
from jaxtrain.optim.schedules import make_schedule

STEPS, LR = 60, 0.3


def reference(cfg: ScheduleConfig, steps: int, s: int) -> float:
    w, f = min(cfg.warmup_steps, steps), cfg.min_lr_ratio
    if s < w:
        return LR * (s + 1) / (w + 1)
    p = min(max((s - w) / max(steps - w, 1), 0), 1)
    if cfg.name == "cosine":
        return LR * (f + (1 - f) * (1 + np.cos(np.pi * p)) / 2)
    if cfg.name == "linear":
        return LR * (1 - (1 - f) * p)
    if cfg.name == "inverse_sqrt":
        return LR * np.sqrt((w + 1) / (s + 1))
    if cfg.name == "wsd":
        start = max(w, steps - round(cfg.decay_fraction * steps))
        return LR if s < start else LR * (1 - (1 - f) * min((s - start) / max(steps - start, 1), 1))
    return LR


@pytest.mark.parametrize("warmup", [0, 1, 10, 55, 80])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_every_step(name, warmup):
    cfg = ScheduleConfig(name=name, warmup_steps=warmup, min_lr_ratio=0.1, decay_fraction=0.25)
    actual = jax.jit(jax.vmap(make_schedule(LR, cfg, STEPS)))(np.arange(STEPS + 5, dtype=np.int32))
    expected = [reference(cfg, STEPS, s) for s in range(STEPS + 5)]
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


def test_milestones():
    cfg = ScheduleConfig(name="wsd", warmup_steps=9, min_lr_ratio=0.0, decay_fraction=0.5)
    lr = make_schedule(1.0, cfg, 100)
    assert float(lr(0)) == pytest.approx(0.1)
    assert float(lr(9)) == float(lr(49)) == float(lr(50)) == 1.0
    assert float(lr(75)) == pytest.approx(0.5)
    assert float(lr(99)) > 0
    assert float(lr(100)) == 0


@pytest.mark.parametrize(
    "extreme", [{"decay_fraction": 0.0}, {"decay_fraction": 1.0}, {"min_lr_ratio": 1.0}, {"peak": 0.0}]
)
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_always_finite(name, extreme):
    extreme = dict(extreme)
    peak = extreme.pop("peak", LR)
    cfg = ScheduleConfig(name=name, warmup_steps=1, **extreme)
    for steps in (1, 2, 3):
        assert all(0 <= float(make_schedule(peak, cfg, steps)(s)) <= peak * 1.0001 for s in range(steps + 2))
