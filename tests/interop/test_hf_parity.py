"""Every supported architecture against transformers: logits, greedy generation and export."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch (jaxtrain[peer])")
pytest.importorskip("transformers", reason="needs transformers (jaxtrain[peer])")
os.environ["HF_HUB_OFFLINE"] = "1"

import hf_loaded
import hf_models

from jaxtrain.interop.config_json import choose_export_family
from jaxtrain.interop.save_weights import save_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS

PROMPT = [5, 130, 17, 64, 2, 99, 33]


@pytest.mark.parametrize("case", hf_models.CASES)
def test_logits_generation_and_round_trip(case: str, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    peer = hf_models.make(case, tmp_path / "in")
    config, family, model_def, params = hf_loaded.load_model(tmp_path / "in")
    tokens = np.random.default_rng(0).integers(0, 131, (2, 40))
    expected = hf_models.logits(peer, tokens)
    assert np.abs(expected).max() > 0.5  # not a model of zeros
    assert_close(hf_loaded.logits(model_def, params, tokens), expected)

    peer.generation_config.eos_token_id = None
    options = {"do_sample": False, "max_new_tokens": 64, "pad_token_id": 0}
    generated = peer.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert hf_loaded.greedy(model_def, params, PROMPT, 64) == generated

    before = json.loads((tmp_path / "in/config.json").read_text())
    chosen, content = choose_export_family(config.model, 131, None, before)
    assert chosen is family
    (tmp_path / "out").mkdir()
    save_weights(tmp_path / "out", TENSOR_MAPPINGS[family.name], hf_loaded.flat(params), np.dtype(np.float32), 20_000)
    (tmp_path / "out/config.json").write_text(json.dumps(content))
    again, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    np.testing.assert_array_equal(hf_models.logits(again.eval(), tokens), expected)
    _, _, _, back = hf_loaded.load_model(tmp_path / "out")
    for path, value in hf_loaded.flat(back).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(hf_loaded.flat(params)[path]), path)


def assert_close(actual: np.ndarray, expected: np.ndarray):
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error < 1e-5, error
