"""Schedules against plain NumPy formulas at every step."""

import jax
import numpy as np
import pytest

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.optim.schedules import schedule

STEPS = 60


def reference(cfg: OptimizerConfig, steps: int, s: int) -> float:
    w, f = cfg.warmup_steps, cfg.min_lr_ratio
    if s < w:
        return cfg.lr * (s + 1) / (w + 1)
    p = min(max((s - w) / max(steps - w, 1), 0), 1)
    if cfg.schedule == "cosine":
        return cfg.lr * (f + (1 - f) * (1 + np.cos(np.pi * p)) / 2)
    if cfg.schedule == "linear":
        return cfg.lr * (1 - (1 - f) * p)
    if cfg.schedule == "inverse_sqrt":
        return cfg.lr * np.sqrt((w + 1) / (s + 1))
    if cfg.schedule == "wsd":
        start = max(w, steps - round(cfg.decay * steps))
        return cfg.lr if s < start else cfg.lr * (1 - (1 - f) * min((s - start) / max(steps - start, 1), 1))
    return cfg.lr


@pytest.mark.parametrize("warmup", [0, 1, 10, 55, 80])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_every_step(name, warmup):
    cfg = OptimizerConfig(schedule=name, warmup=warmup, lr=0.3, final=0.1, decay=0.25)
    got = jax.jit(jax.vmap(schedule(cfg, STEPS)))(np.arange(STEPS + 5, dtype=np.int32))
    want = [reference(cfg, STEPS, s) for s in range(STEPS + 5)]
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2e-6)


def test_milestones():
    cfg = OptimizerConfig(schedule="wsd", warmup=9, lr=1.0, final=0.0, decay=0.5)
    lr = schedule(cfg, 100)
    assert float(lr(0)) == pytest.approx(0.1)
    assert float(lr(9)) == float(lr(49)) == float(lr(50)) == 1.0
    assert float(lr(75)) == pytest.approx(0.5)
    assert float(lr(99)) > 0
    assert float(lr(100)) == 0


@pytest.mark.parametrize("extreme", [{"decay": 0.0}, {"decay": 1.0}, {"final": 1.0}, {"lr": 0.0}])
@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "inverse_sqrt", "constant"])
def test_always_finite(name, extreme):
    cfg = OptimizerConfig(schedule=name, warmup=1, **extreme)
    for steps in (1, 2, 3):
        assert all(0 <= float(schedule(cfg, steps)(s)) <= cfg.lr * 1.0001 for s in range(steps + 2))
