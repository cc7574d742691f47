"""Several prompts at once: each goes on as it would alone, on one device and on eight."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program, model_from_config
from jaxtrain.errors import UserError
from jaxtrain.inference.generate import Generator, decoding_sharder, padded_rows
from jaxtrain.sharding.sharder import Sharder

PROMPTS = [np.array(ids, np.int32) for ids in ([3, 1, 4, 1, 5], [9], list(range(20, 41)), [2, 7, 1, 8])]
MODEL = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64, "init_std": 0.3, "sliding_window": 6}


def columns(generator: Generator, params, prompts, tokens: int, **options) -> list[list[int]]:
    steps = list(generator.batch(params, prompts, tokens, seed=0, **options))
    return [[step[row] for step in steps if step[row] is not None] for row in range(len(prompts))]


@pytest.fixture(scope="module")
def alone():
    """Parameters, and what follows each prompt by itself on one device."""
    cfg = Config(model=MODEL, precision="fp32")
    model_def = model_from_config(cfg, Sharder(), 128)
    params, _ = jax.jit(model_def.init)(jax.random.key(3))
    generator = Generator(model_def, 120, temperature=0)
    return params, generator, [list(generator(params, prompt, 9, seed=0)) for prompt in PROMPTS]


def test_each_prompt_goes_on_as_it_would_alone(alone):
    params, generator, expected = alone
    assert len({tuple(ids) for ids in expected}) == 4
    assert columns(generator, params, PROMPTS, 9) == expected


def test_no_prompt_goes_past_the_last_learned_position():
    learned = {"learned_positions": 30}
    cfg = Config(model=MODEL | learned, precision="fp32")
    model_def = model_from_config(cfg, Sharder(), 128)
    generator, params = Generator(model_def, 120, temperature=0), jax.jit(model_def.init)(jax.random.key(3))[0]
    assert len(columns(generator, params, PROMPTS, 9)[2]) == 9  # the longest prompt has 21
    with pytest.raises(UserError, match="21 tokens and 10 new ones are more than the model's 30 learned positions"):
        generator.batch(params, PROMPTS, 10, seed=0)


def test_a_prompt_that_has_ended_says_nothing_more(alone):
    params, generator, expected = alone
    eos = expected[0][2]
    stopped = [ids[: ids.index(eos)] if eos in ids else ids for ids in expected]
    assert [len(ids) for ids in stopped] != [9] * 4
    assert columns(generator, params, PROMPTS, 9, stops=[eos]) == stopped


@pytest.mark.parametrize(
    "layout",
    [["layout=fsdp_tp", "mesh.model=2"], ["layout=3d"], ["layout=cp_ring", "mesh.context=2"]],
    ids=["fsdp_tp", "3d", "cp_ring"],
)
def test_eight_devices_write_the_same_and_share_out_the_cache(alone, layout):
    params, _, expected = alone
    base = {"model": MODEL, "precision": "fp32", "data": {"sequence": 32, "global_batch": 8}, "simulate": 8}
    cfg = jaxtrain.load(None, *layout, base=base)
    program = build_program(cfg, 128, jax.devices()[:8])
    placed = jax.tree.map(lambda leaf, to: jax.device_put(leaf, to.sharding), params, program.state["params"])
    rows = padded_rows(program.sharder, len(PROMPTS))
    sharder = decoding_sharder(program.sharder, rows)
    generator = Generator(model_from_config(cfg, sharder, 128), 120, temperature=0)
    assert columns(generator, placed, PROMPTS, 9, rows=rows) == expected
    kept = generator._prefill(placed, np.zeros((rows, 16), np.int32), np.full(rows, 4), jax.random.key(0), capacity=20)
    shard = kept[1].k.sharding.shard_shape(kept[1].k.shape)
    assert np.prod(kept[1].k.shape) // np.prod(shard) == 8
