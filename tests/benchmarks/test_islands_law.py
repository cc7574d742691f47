"""Table of benchmarks/islands_law.py against sums by hand, its configs, and the published figures in it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load_benchmark

from jaxtrain.core.resolve import resolve


@pytest.fixture
def law() -> ModuleType:
    return load_benchmark("islands_law")


def test_gaps_are_between_the_best_runs(law: ModuleType) -> None:
    losses = [("data parallel", 1e-3, 2.2), ("data parallel", 2e-3, 2.0), ("diloco, 4 islands", 1e-3, 2.1)]
    runs = [{"way": way, "rate": rate, "curve": [(1, 9.0), (2, loss)]} for way, rate, loss in losses]
    base, four = law.rows(runs, 10**6)
    assert (base["rate"], base["tried"], base["gap %"], base["law %"]) == ("0.002", 2, 0.0, 0.0)
    assert four["gap %"] == pytest.approx(5.0)
    assert four["published, 35M %"] == pytest.approx(1.98, abs=0.01)
    assert four["law %"] == pytest.approx(100 * (19.762 / 18.129 * 10 ** (6 * -0.0039) - 1))


def test_power_laws_are_within_a_hundredth_of_the_table_that_they_were_fitted_to(law: ModuleType) -> None:
    for name, way in law.WAYS.items():
        assert way.law(35 * 10**6) == pytest.approx(way.published, rel=0.01), name


def test_ways_have_the_same_tokens_in_whole_rounds(law: ModuleType, tmp_path: Path) -> None:
    count, counts = law.parameters(), set()
    for name, way in law.WAYS.items():
        file = tmp_path / "config.yaml"
        settings = law.settings_of(name, 1e-3, law.steps_of(count))
        file.write_text(json.dumps(settings | {"dir": str(tmp_path)}))
        config, _ = resolve(str(file))
        counts.add(config.steps * config.data.global_batch * config.data.sequence)
        assert config.steps % law.EVERY == 0
        assert config.islands.count == way.islands
        assert config.data.global_batch % max(1, way.islands) == 0
        assert (config.optimizer.betas, config.schedule.min_lr_ratio) == ((0.9, 0.99), 0.05)
        if way.islands:
            assert (config.sync.every, config.sync.outer.lr, config.sync.outer.momentum) == (30, 0.6, 0.9)
    (tokens,) = counts
    assert tokens == pytest.approx(20 * count, rel=0.01)


def test_rates_are_tried_until_the_best_one_has_neighbours(law: ModuleType) -> None:
    next_rate = law.common.next_rate
    assert next_rate({}, 4.0) == 4.0
    assert next_rate({4.0: 1.0}, 4.0) == 2.0
    assert next_rate({4.0: 1.0, 2.0: 2.0}, 4.0) == 8.0
    assert next_rate({4.0: 1.0, 2.0: 0.5}, 4.0) == 1.0
    assert next_rate({4.0: 1.0, 2.0: 2.0, 8.0: math.inf}, 4.0) is None
