"""Batches of the built-in decoder from one's own data: what may be left out, and what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain
from jaxtrain.core.placement import complete_token_rows
from jaxtrain.errors import UserError

ROWS, TOKENS, STEPS = 8, 16, 3
FULL: list[dict[str, np.ndarray]] = []
for step in range(STEPS):
    tokens = np.random.default_rng(step).integers(0, 64, (ROWS, TOKENS)).astype(np.int32)
    FULL.append({
        "tokens": tokens,
        "targets": np.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1),
        "positions": np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1)),
        "segments": np.ones((ROWS, TOKENS), np.int32),
        "weights": np.tile(np.array([1.0] * (TOKENS - 1) + [0.0], np.float32), (ROWS, 1)),
    })  # fmt: skip


def losses(folder: Path, batches: list[dict[str, Any]], **keys: Any) -> list[float]:
    base = {
        "name": "run", "dir": str(folder), "simulate": 8, "steps": STEPS, "precision": "fp32",
        "model": {"embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 32, "vocab": 64},
        "data": {"sequence": TOKENS, "global_batch": ROWS}, "log": {"every": 1, "tensorboard": False},
        "layout": "cp_ring", "mesh": {"data": 4, "context": 2, "fsdp": 1},
    }  # fmt: skip
    result = jaxtrain.train({**base, **keys}, data=batches)
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_tokens_are_enough(tmp_path: Path):
    """Under the ring, whose rows are in another order, too."""
    alone = losses(tmp_path / "alone", [{"tokens": batch["tokens"]} for batch in FULL])
    assert len(alone) == STEPS
    assert alone == losses(tmp_path / "full", FULL)


def test_what_is_given_stays():
    batch = {"tokens": FULL[0]["tokens"], "targets": FULL[1]["tokens"], "weights": FULL[0]["weights"] / 2, "x": FULL[2]}
    complete = complete_token_rows({**batch, "x": np.zeros(ROWS)}, TOKENS)
    assert set(complete) == {"tokens", "targets", "positions", "segments", "weights", "x"}
    np.testing.assert_array_equal(complete["targets"], FULL[1]["tokens"])
    np.testing.assert_array_equal(complete["weights"], FULL[0]["weights"] / 2)
    whole = complete_token_rows({"tokens": FULL[0]["tokens"], "targets": FULL[1]["tokens"]}, TOKENS)
    assert whole["weights"].min() == 1.0  # the last place has a target


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (
            {"input_ids": FULL[0]["tokens"]},
            "data: the model reads tokens, and a batch has input_ids; expected `tokens`, integers [rows, 16]",
        ),
        (
            {"tokens": np.zeros((ROWS, TOKENS + 1), np.int32)},
            "data.sequence: expected `tokens`, integers [rows, 16], from the data; found int32 [8, 17]",
        ),
        (
            {"tokens": np.zeros((ROWS, TOKENS), np.float32)},
            "data.sequence: expected `tokens`, integers [rows, 16], from the data; found float32 [8, 16]",
        ),
    ],
)
def test_what_is_no_token_batch_is_said_in_one_line(tmp_path: Path, batch: dict[str, np.ndarray], said: str):
    with pytest.raises(UserError) as caught:
        losses(tmp_path, [batch] * STEPS)
    assert str(caught.value) == said
