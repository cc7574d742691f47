"""Rematerialisation of single submodules: the same numbers, less memory, and a mistake in one line."""

from __future__ import annotations

import re

import conformance
import jax
import jax.numpy as jnp
import pytest
from conformance import MODULES
from flax import nnx

from jaxtrain.config import ConfigError
from jaxtrain.core.components import Components
from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError
from jaxtrain.models.model_def import NOTHING

CASES = {
    "ConvNet": "[norm, head]", "GPT": "[blocks/.*]", "ResNet": "[blocks/.*]", "ScannedMLP": "[layers]",
    "NamedMLP": "[up, down]", "VisionTransformer": "['blocks/0/(attention|up)']",
    "LinenConvNet": "[BatchNorm_0, Conv_0]",
    "LinenTransformer": "[LinenBlock_0, 'LinenBlock_0/.*']",
}  # fmt: skip


def count_remats(built) -> int:
    text = str(jax.make_jaxpr(built.step_with_gradients)(built.state, conformance.batch(0)))
    return len(re.findall(r"(?:remat2?|checkpoint)\[", text))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_without(name: str):
    """Noise and statistics, too."""
    options = ("layout=fsdp", "step.microbatches=2", *MODULES[name])
    plain = conformance.program(name, *options)
    built = conformance.program(name, *options, "step.remat=full", f"step.remat_modules={CASES[name]}")
    # Layers that a loop runs are rematerialised anyway, by a policy that recomputes less.
    assert count_remats(built) > count_remats(plain) - (name == "ScannedMLP")
    expected, metrics = conformance.train(plain, 3)
    state, found = conformance.train(built, 3)
    assert [m["loss"] for m in found] == pytest.approx([m["loss"] for m in metrics], rel=1e-6)
    assert conformance.largest_difference(expected, state)[0] < 1e-6


class Deep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.read = nnx.Linear(48, 256, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(8)])

    def loss(self, batch):
        x = self.read(batch["image"].reshape(-1, 48))
        for block in self.blocks:
            x = block(x)
        return {"size": (jnp.sum(x**2), jnp.float32(len(x)))}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(256, 2048, rngs=rngs)
        self.down = nnx.Linear(2048, 256, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


def test_activations_are_not_kept():
    """What is kept for the backward pass falls to the inputs of the blocks, and the parameters."""
    kept = []
    for more in ((), ("step.remat=full", "step.remat_modules=['blocks/[0-9]+']")):
        config = conformance.config("ConvNet", "layout=ddp", *more)
        built = build_program(config, None, jax.devices()[:1], conformance.batch(0), Components(model=Deep))
        kept.append(residual_size(built, conformance.batch(0)))
    assert kept[1] <= 10 * conformance.ROWS * 256 < conformance.ROWS * 8 * 2048 <= kept[0]


def residual_size(built, batch) -> int:
    """Elements that the backward pass gets from the forward pass, but for parameters."""

    def loss(params):
        return built.model_def.loss(params, NOTHING, batch, jax.random.key(0))[0]["size"][0]

    params = built.init()["params"]
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    residuals = jax.tree.leaves(jax.vjp(loss, params)[1])
    return sum(leaf.size for leaf in residuals if leaf.shape not in shapes)


@pytest.mark.parametrize("name", ["GPT", "LinenConvNet"])
def test_a_pattern_that_matches_nothing_is_one_line(name: str):
    with pytest.raises(UserError, match=r"step.remat_modules: no submodule matches `layer`; the model's are ") as error:
        conformance.program(name, *MODULES[name], "layout=ddp", "step.remat=full", "step.remat_modules=[layer]")
    assert "\n" not in str(error.value)


def test_it_goes_with_a_policy():
    with pytest.raises(ConfigError, match="remat=none recomputes nothing; expected full or dots"):
        conformance.config("GPT", *MODULES["GPT"], "step.remat_modules=['blocks/.*']")
