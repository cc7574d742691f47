"""Stacked layers of plain modules: found by tracing, named `layers`, rematerialised one by one."""

from __future__ import annotations

from functools import partial

import conformance
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxtrain.core.components import Components
from jaxtrain.core.program import build_program
from jaxtrain.optim.param_dims import is_matrix

WIDTH, LAYERS = 256, 8


class Layer(nnx.Module):
    """A gated layer whose hidden dim is eight times as wide as its input."""

    def __init__(self, rngs: nnx.Rngs, names=(None, None)):
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), names) if any(names) else nnx.initializers.normal()
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 8 * WIDTH, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(8 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.silu(self.up(self.norm(x))))


class Stack(nnx.Module):
    """Layers that one of three loops runs, over images of 48 numbers."""

    def __init__(self, loop: str = "nnx.scan", names=(None, None), *, rngs: nnx.Rngs):
        self.loop = loop
        self.read = nnx.Linear(48, WIDTH, rngs=rngs)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return Layer(rngs, names)

        self.layers = create(rngs)
        self.head = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        x = self.read(x.reshape(len(x), -1))
        if self.loop == "nnx.scan":
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        elif self.loop == "lax.scan":
            graphdef, state = nnx.split(self.layers)
            x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(graphdef, layer)(x), None), x, state)
        else:  # all layers twice, in an outer loop that does not slice them
            graphdef, state = nnx.split(self.layers)

            @jax.checkpoint
            def once(state, x):
                return jax.lax.scan(lambda x, layer: (nnx.merge(graphdef, layer)(x), None), x, state)[0]

            x, _ = jax.lax.scan(lambda x, _: (once(state, x), None), x, None, length=2)
        return self.head(x)


class Grouped(nnx.Module):
    """Groups of two layers: a loop in a loop."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def create(rngs):
            return nnx.Linear(48, 48, rngs=rngs)

        self.layers = create(rngs)
        self.head = nnx.Linear(48, 4, rngs=rngs)

    def __call__(self, x):
        run = nnx.scan(lambda x, layer: nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        groups = nnx.scan(lambda x, group: run(x, group), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.head(groups(x.reshape(len(x), -1), self.layers))


class OverTime(nnx.Module):
    """A loop over steps in time, which reads the whole of each parameter in every step."""

    def __init__(self, rngs: nnx.Rngs):
        self.cell = nnx.Linear(12, 12, rngs=rngs)
        self.head = nnx.Linear(12, 4, rngs=rngs)

    def __call__(self, x):
        x_TBD = x.reshape(len(x), 4, 12).swapaxes(0, 1)
        graphdef, state = nnx.split(self.cell)
        step = lambda h, x: (jnp.tanh(nnx.merge(graphdef, state)(h + x)), None)  # noqa: E731
        return self.head(jax.lax.scan(step, jnp.zeros_like(x_TBD[0]), x_TBD)[0])


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(48)(nn.tanh(x)), None


class LinenStack(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
        return nn.Dense(4)(layers(x.reshape(len(x), -1), None)[0])


def program(model, *overrides: str, devices: int = 8):
    keys = ("layout=fsdp", "loss={function: cross_entropy, inputs: image, targets: label}", *overrides)
    config = conformance.config("ConvNet", *keys)
    return build_program(config, None, jax.devices()[:devices], conformance.batch(0), Components(model=model))


def names_of(built) -> dict[str, tuple]:
    return {path: names for path, (_, names) in built.model_def.tensors().items()}


@pytest.mark.parametrize("loop", ["nnx.scan", "lax.scan", "twice"])
def test_the_dim_of_stacked_layers_is_found(loop: str):
    names = names_of(program(partial(Stack, loop)))
    assert names["layers/up/kernel"] == ("layers", None, "inferred")  # the other one is less than a quarter
    assert names["layers/down/kernel"] == ("layers", "inferred", None)
    assert names["layers/norm/scale"] == ("layers", "inferred")
    assert "layers" not in names["read/kernel"] + names["head/kernel"]


def test_names_do_not_depend_on_the_layout():
    """An optimizer treats vectors and matrices by their names."""
    one, many = (names_of(program(Stack, f"layout={layout}", devices=n)) for layout, n in (("ddp", 1), ("fsdp", 8)))
    is_stacked = lambda names: {path for path, each in names.items() if each[:1] == ("layers",)}  # noqa: E731
    assert is_stacked(one) == is_stacked(many) == {f"layers/{p}" for p in ("norm/scale", "up/kernel", "down/kernel")}
    assert not is_matrix(one["layers/norm/scale"])
    assert is_matrix(one["layers/up/kernel"])


def test_names_of_one_layer_are_those_behind_the_stack():
    """`nnx.vmap` adds no name to those that a layer declares."""
    names = names_of(program(partial(Stack, names=("embed", "mlp"))))
    assert names["layers/up/kernel"] == ("layers", "embed", "mlp")


def test_a_loop_in_a_loop_stacks_two_dims():
    assert names_of(program(Grouped))["layers/kernel"] == ("layers", None, "inferred", None)


def test_a_loop_over_time_stacks_nothing():
    assert names_of(program(OverTime, devices=4))["cell/kernel"] == ("inferred", None)


def test_layers_of_linen_are_found():
    names = names_of(program(LinenStack))
    assert {path: each for path, each in names.items() if "ScanLinenLayer" in path} == {
        "ScanLinenLayer_0/Dense_0/kernel": ("layers", "inferred", None),
        "ScanLinenLayer_0/Dense_0/bias": ("layers", "inferred"),
    }


def temporary_bytes(rows: int, *overrides: str, devices: int) -> int:
    built = program(Stack, *overrides, devices=devices)
    batch = {k: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for k, x in conformance.batch(0).items()}
    return built.step.lower(built.state, batch).compile().memory_analysis().temp_size_in_bytes


def test_gathered_weights_are_not_kept_for_the_backward_pass():
    layer = 2 * WIDTH * 8 * WIDTH * 4  # bytes
    assert temporary_bytes(conformance.ROWS, devices=8) < 2.5 * layer


def test_activations_of_layers_are_recomputed():
    """Bytes in units of the layers' inputs: an input, its norm, and the wide hidden state; or the input alone.

    Autodiff of the same loop keeps 36 of them, and rematerialisation of the whole loop at once keeps as many.
    """
    inputs = LAYERS * (rows := 8192) * WIDTH * 4
    elementwise, all_but_inputs = (
        temporary_bytes(rows, "layout=ddp", f"step.remat={remat}", devices=1) for remat in ("none", "full")
    )
    assert elementwise < 15 * inputs
    assert all_but_inputs < 6 * inputs


def test_numbers_are_those_of_plain_optax():
    built = program(Stack, "optimizer.betas=[0.0, 0.95]")
    params = jax.device_get(built.init()["params"])
    model, losses = Stack(rngs=nnx.Rngs(0)), []
    for step in range(3):
        batch = conformance.batch(step)

        def loss(params, batch=batch):
            module = nnx.clone(model)
            nnx.update(module, params)
            return optax.softmax_cross_entropy_with_integer_labels(module(batch["image"]), batch["label"]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
        losses.append(float(value))
    assert [m["loss"] for m in conformance.train(built, 3)[1]] == pytest.approx(losses, rel=1e-5)


def test_gradients_of_layers_are_reduced_in_the_compute_dtype():
    """In bfloat16 the losses are those of another layout, and the stacks of gradients are bfloat16."""
    one, many = (program(Stack, f"layout={layout}", "precision=bf16") for layout in ("ddp", "fsdp"))
    expected, found = ([m["loss"] for m in conformance.train(built, 3)[1]] for built in (one, many))
    assert found == pytest.approx(expected, rel=5e-3)
    proxies = jax.eval_shape(many.gradients.grad_proxies, many.model_def.params)
    assert proxies["layers"]["up"]["kernel"].dtype == jnp.bfloat16
    assert proxies["read"]["kernel"].dtype == jnp.float32
