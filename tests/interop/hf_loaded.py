"""Helpers that load a Hugging Face folder on one device and run the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxtrain.config import Config
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.inference.generate import Generator
from jaxtrain.interop import config_json
from jaxtrain.interop.families import Family
from jaxtrain.interop.load_weights import load_weights
from jaxtrain.interop.tensor_map import TENSOR_MAPPINGS
from jaxtrain.models.model_def import ModelDef, define_model
from jaxtrain.nn.env import Env


def load_model(folder: Path) -> tuple[Config, Family, ModelDef, Any]:
    """Returns config, family, model_def and loaded parameters."""
    family, section = config_json.read_model_config(folder)
    config = Config(model=ModelConfig.model_validate(section), precision="fp32")
    model_def = define_model(config.model, config.loss, Env(), section["vocab"])
    sharding = SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), model_def.params)
    return config, family, model_def, load_weights(folder, TENSOR_MAPPINGS[family.name], abstract)


def flat(params: Any) -> dict[str, jax.Array]:
    """Returns `a/b/c` -> array."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def logits(model_def: ModelDef, params: Any, tokens: np.ndarray) -> np.ndarray:
    """Returns float32 [B, T, V]."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def forward(params: Any) -> jax.Array:
        model = model_def.bind(params)
        return model.logits(model.hidden(jnp.asarray(tokens), positions, None)[0])

    return np.asarray(forward(params))


def greedy(model_def: ModelDef, params: Any, prompt: list[int], tokens: int) -> list[int]:
    """Generates the most likely continuation with the KV cache."""
    vocab = params["embed"]["table"].shape[0]
    generator = Generator(model_def, vocab, temperature=0.0)
    return list(generator(params, np.array(prompt), tokens, seed=0))
