"""Every supported architecture trained here and in PyTorch, from the same weights on the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (jaxtrain[peer])")
pytest.importorskip("transformers", reason="needs transformers (jaxtrain[peer])")

import hf_loaded
import hf_models
import jax

from jaxtrain.core.program import build_program

STEPS, ROWS, TOKENS = 20, 4, 24
OPTIMIZER = {
    "name": "adamw", "lr": 3e-3, "betas": (0.9, 0.95), "epsilon": 1e-8,
    "weight_decay": 0.1, "decay_all_parameters": True, "grad_clip_norm": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("case", hf_models.CASES)
def test_losses_are_those_of_torch(case: str, tmp_path: Path):
    peer = hf_models.make(case, tmp_path)
    first = np.random.default_rng(3).integers(0, 131, (STEPS, ROWS, 1))
    tokens = (first + 7 * np.arange(TOKENS + 1)) % 131  # what comes next can be learned
    config, _, _, params = hf_loaded.load_model(tmp_path)
    changes = {
        "optimizer": OPTIMIZER,
        "schedule": {"name": "constant"},
        "steps": STEPS,
        "data": {"global_batch": ROWS, "sequence": TOKENS},
    }
    config = config.model_validate({**config.model_dump(), **changes})
    program = build_program(config, 131, jax.devices()[:1])
    state = program.init()
    state["params"] = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), params, program.state["params"])
    losses = []
    for step in range(STEPS):
        state, metrics = program.step(state, batch(tokens[step]))
        losses.append(float(metrics["loss"]))
    expected = torch_losses(peer, tokens)
    assert expected[-1] < expected[0] - 0.1  # it learns
    np.testing.assert_allclose(losses[:5], expected[:5], rtol=1e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # AdamW enlarges rounding where a gradient is near 0


def batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns a batch with one document in each row."""
    inputs = tokens[:, :-1].astype(np.int32)
    positions = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), inputs.shape)
    ones = np.ones_like(inputs)
    targets = tokens[:, 1:].astype(np.int32)
    whole = {"tokens": inputs, "targets": targets, "positions": positions, "segments": ones}
    return whole | {"weights": ones.astype(np.float32)}


def torch_losses(peer, tokens: np.ndarray) -> list[float]:
    """Returns the losses of training in PyTorch."""
    import torch

    settings = {"lr": OPTIMIZER["lr"], "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(peer.parameters(), **settings)
    losses = []
    for rows in torch.tensor(tokens):
        logits = peer(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), OPTIMIZER["grad_clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses
