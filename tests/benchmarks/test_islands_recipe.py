"""Table of benchmarks/islands_recipe.py against sums by hand, and its configs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_modules import load_benchmark

from jaxtrain.core.resolve import resolve


@pytest.fixture
def recipe() -> ModuleType:
    return load_benchmark("islands_recipe")


def test_gaps_are_to_one_worker_of_the_same_seed(recipe: ModuleType) -> None:
    losses = {("one worker", 0): 3.0, ("one worker", 1): 3.2, ("4 x batch", 0): 2.5, ("4 x batch", 1): 2.8}
    runs = [{"way": way, "seed": seed, "curve": [(1, 9.0), (2, loss)]} for (way, seed), loss in losses.items()]
    alone, batch = recipe.rows(runs)
    assert (alone["gap"], alone["seeds"]) == (0.0, 2)
    assert batch["loss"] == pytest.approx(2.65)
    assert batch["perplexity"] == pytest.approx(math.exp(2.65))
    assert (batch["gap"], batch["gap least"], batch["gap most"]) == pytest.approx((-0.45, -0.5, -0.4))
    assert batch["published gap"] == pytest.approx(math.log(15.30 / 16.23))


def test_ways_have_the_tokens_that_they_are_to_have_and_one_validation(recipe: ModuleType, tmp_path: Path) -> None:
    tokens, validated = {}, set()
    for way in recipe.WAYS:
        file = tmp_path / "config.yaml"
        file.write_text(json.dumps(recipe.settings_of(way, 0, False) | {"dir": str(tmp_path)}))
        config, _ = resolve(str(file))
        tokens[way] = config.steps * config.data.global_batch
        validated.add(config.eval.batches * config.data.global_batch)
        assert config.islands.count == (4 if way in recipe.EVERY else 0)
        assert config.steps % config.eval.every == 0
        if way in recipe.EVERY:
            assert config.steps % config.sync.every == 0
            assert (config.sync.outer.lr, config.sync.outer.momentum, config.sync.outer.nesterov) == (0.7, 0.9, True)
    assert len(validated) == 1
    one = tokens.pop("one worker")
    assert set(tokens.values()) == {4 * one}
