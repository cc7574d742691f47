"""Sampling against NumPy, and the generator's bookkeeping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.program import model_from_config
from jaxtrain.inference.generate import Generator, sample
from jaxtrain.sharding.sharder import Sharder

LOGITS = np.log(np.array([0.4, 0.25, 0.2, 0.1, 0.05]))


def frequencies(draws: int = 4000, **options) -> np.ndarray:
    logits = jnp.tile(jnp.asarray(LOGITS, jnp.float32), (draws, 1))
    options = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    return np.bincount(np.asarray(sample(logits, jax.random.key(0), **options)), minlength=5) / draws


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.4, 0.25, 0.2, 0.1, 0.05]),
        ({"temperature": 0.5}, np.array([0.4, 0.25, 0.2, 0.1, 0.05]) ** 2 / 0.275),
        ({"temperature": 0}, [1, 0, 0, 0, 0]),
        ({"top_k": 2}, [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0]),
        ({"top_k": 99}, [0.4, 0.25, 0.2, 0.1, 0.05]),
        ({"top_p": 0.6}, [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0, 0]),
        ({"top_p": 1.0}, [0.4, 0.25, 0.2, 0.1, 0.05]),
    ],
)
def test_sampling_follows_the_distribution(options, expected):
    np.testing.assert_allclose(frequencies(**options), expected, atol=0.03)


@pytest.fixture(scope="module")
def tiny():
    cfg = Config(model={"embed": 32, "layers": 2, "heads": 2, "mlp": 64}, precision="fp32")
    model_def = model_from_config(cfg, Sharder(), 64)
    return model_def, model_def.init(jax.random.key(0))[0]


def test_greedy_text_equals_the_whole_model_run_again_and_again(tiny):
    model_def, params = tiny
    prompt = np.array([3, 1, 4, 1, 5], np.int32)
    got = list(Generator(model_def, 60, temperature=0)(params, prompt, 12, seed=0))

    @jax.jit
    def last(params, tokens, length):
        model, positions = model_def.bind(params), jnp.arange(32)[None]
        logits = model.logits(model.hidden(tokens, positions, jnp.ones_like(tokens))[0])[0, length - 1]
        return jnp.argmax(jnp.where(jnp.arange(64) < 60, logits, -jnp.inf))

    ids = list(prompt)
    for _ in range(12):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(ids)] = ids
        ids.append(int(last(params, padded, len(ids))))
    assert got == ids[5:]


def test_generation_is_repeatable_and_stops_at_the_end_token(tiny):
    model_def, params = tiny
    generator = Generator(model_def, 60, temperature=1.0, top_k=20)
    prompt = np.array([7], np.int32)
    one, two, other = (list(generator(params, prompt, 20, seed=s)) for s in (1, 1, 2))
    assert one == two != other
    assert max(one) < 60
    stopped = list(generator(params, prompt, 20, seed=1, stops=[one[4]]))
    assert stopped == one[: one.index(one[4])]
