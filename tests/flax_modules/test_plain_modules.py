"""Plain modules beyond parity: precision, remat, ready-made losses, bad input in one line."""

from __future__ import annotations

import re

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conformance import MODULES

from jaxtrain.core.program import build_program
from jaxtrain.core.state import non_trainable
from jaxtrain.errors import UserError


def odd(name: str, *overrides: str):
    config = conformance.config("ConvNet", f"model.type=odd_modules:{name}", "layout=ddp", *overrides)
    return build_program(config, None, jax.devices()[:2], conformance.batch(0))


def trace(build) -> None:
    built = build()
    jax.eval_shape(built.step, built.state, conformance.batch(0))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("WrongLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("TextLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("NoLoss", r"NoLoss has no method `loss\(batch, key\)`; expected one, or loss.function"),
        ("TooManyNames", r"scale has the names .* of a variable of shape \(16,\)"),
        ("GrowingState", r"variable seen of shape \(1,\) has the shape \(2,\) after the loss"),
        ("AssigningLoss", "the loss assigns to a parameter"),
        ("ArrayCounts", r"expected \{name: scalar or \(sum, weight\)\}, or a method `metrics\(counts\)`"),
        ("NoRngs", "does not take them: .*rngs"),
        ("make_nothing", "returned a NoneType; expected a Flax module"),
    ],
)
def test_a_mistake_is_one_line(name: str, message: str):
    with pytest.raises(UserError, match=message) as error:
        trace(lambda: odd(name))
    assert "\n" not in str(error.value)


def test_attributes_of_any_name_are_the_users():
    trace(lambda: odd("NamedAttributes"))


def test_names_that_collide_are_one_line():
    with pytest.raises(UserError, match=r"axis `?fsdp`?.* (twice|two dims)|two dims"):
        odd("Colliding", "layout=fsdp", "mesh={fsdp: 2}")


def test_a_linen_module_needs_a_batch():
    config = conformance.config("LinenMLP", *MODULES["LinenMLP"], "layout=ddp")
    with pytest.raises(UserError, match="Linen module LinenMLP is created from a batch"):
        build_program(config, None, jax.devices()[:1])


def matmul_dtypes(built) -> list[tuple[str, str]]:
    """Dtypes of the operands of every matmul and convolution of a forward pass."""
    other = non_trainable(built.state)
    text = built.evaluate.lower(built.state["params"], conformance.batch(0), other).as_text()
    operands = re.findall(r"(?:dot_general|convolution)\S*\(?.*?: \(tensor<[\dx]*(\w+)>, tensor<[\dx]*(\w+)>\)", text)
    assert operands
    return operands


@pytest.mark.parametrize("name", ["ConvNet", "VisionTransformer", "LinenConvNet", "LinenMLP", "ScannedMLP"])
def test_bf16_computes_in_bfloat16(name: str):
    built = conformance.program(name, "layout=fsdp", *MODULES[name], "precision=bf16")
    assert set(matmul_dtypes(built)) == {("bf16", "bf16")}
    for kind in ("params", "mutable"):
        assert {leaf.dtype for leaf in jax.tree.leaves(built.state.get(kind, {}))} <= {jnp.dtype(jnp.float32)}
    _, metrics = conformance.train(built, 5)
    exact = conformance.train(conformance.program(name, "layout=fsdp", *MODULES[name]), 5)[1]
    np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in exact], rtol=0.03)


def test_a_module_with_a_dtype_keeps_it():
    built = odd("OwnDtype", "precision=bf16")
    assert sorted(set(matmul_dtypes(built))) == [("bf16", "bf16"), ("f32", "f32")]


@pytest.mark.parametrize("precision", ["fp16", "bf16_pure"])
def test_other_precisions_train(precision: str):
    built = conformance.program("ConvNet", "layout=zero2", *MODULES["ConvNet"], f"precision={precision}")
    state, metrics = conformance.train(built, 5)
    assert np.isfinite([m["loss"] for m in metrics]).all()
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {
        jnp.dtype(jnp.bfloat16 if precision == "bf16_pure" else jnp.float32)
    }


def test_ready_made_losses_equal_optax():
    batch = conformance.batch(0)
    config = ("loss={function: cross_entropy, inputs: image, targets: label, label_smoothing: 0.1, z_loss: 0.01}",)
    built = conformance.program("Mixer", "layout=fsdp", *config)
    metrics = built.step(built.init(), batch)[1]
    model = built.model_def.bind(built.init()["params"])
    logits = model(batch["image"])
    smooth = optax.smooth_labels(jax.nn.one_hot(batch["label"], 4), 0.1)
    assert metrics["cross_entropy"] == pytest.approx(
        float(optax.softmax_cross_entropy(logits, smooth).mean()), rel=1e-5
    )
    assert metrics["z_loss"] == pytest.approx(0.01 * float((jax.nn.logsumexp(logits, -1) ** 2).mean()), rel=1e-5)
    with pytest.raises(UserError, match="the batch has no `inputs`; it has"):
        trace(lambda: conformance.program("Mixer", "layout=fsdp", "loss=cross_entropy"))
    with pytest.raises(UserError, match="no loss is called `crossentropy`"):
        conformance.program("Mixer", "layout=fsdp", "loss=crossentropy")


def test_remat_recomputes_the_pass_and_changes_nothing():
    plain, full = (
        conformance.program("VisionTransformer", "layout=fsdp", f"step.remat={remat}", *MODULES["VisionTransformer"])
        for remat in ("none", "full")
    )
    assert conformance.largest_difference(conformance.train(plain, 3)[0], conformance.train(full, 3)[0])[0] < 1e-5
    matmuls = [
        len(re.findall("dot_general", p.step.lower(p.state, conformance.batch(0)).as_text())) for p in (plain, full)
    ]
    assert matmuls[1] > 1.2 * matmuls[0]


def test_ema_and_clipping_of_a_plain_module():
    options = ("optimizer.ema_decay=0.9", "optimizer.grad_clip_norm=0.1", *MODULES["ConvNet"])
    one, _ = conformance.train(conformance.program("ConvNet", "layout=ddp", *options, devices=1), 5)
    many, _ = conformance.train(conformance.program("ConvNet", "layout=zero1", *options), 5)
    for a, b in zip(jax.tree.leaves(one["ema"]), jax.tree.leaves(many["ema"]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_adam_gives_the_same_on_every_layout():
    """With an epsilon of 1e-3; at 1e-8 rounding decides the direction of small gradients."""
    adam = ("optimizer.name=adamw", "optimizer.epsilon=1e-3", "optimizer.lr=0.01", "step.microbatches=2")
    for name in ("ResNet", "GPT"):
        expected, _ = conformance.train(conformance.program(name, *adam, "layout=ddp", *MODULES[name], devices=1), 20)
        for layout in ("ddp", "fsdp"):
            state, _ = conformance.train(conformance.program(name, *adam, f"layout={layout}", *MODULES[name]), 20)
            assert conformance.largest_difference(expected, state)[0] < 1e-5


def test_a_replica_sees_its_own_rows_alone_only_if_the_model_declares_it(monkeypatch):
    """The suite notices if the declaration is ignored: the loss across rows is then another one."""
    options = ("layout=ddp", "step.microbatches=2", *MODULES["Contrastive"])
    _, expected = conformance.train(conformance.program("Contrastive", *options, devices=1), 2)
    import nnx_modules

    monkeypatch.setattr(nnx_modules.Contrastive, "rows_are_independent", True, raising=False)
    _, wrong = conformance.train(conformance.program("Contrastive", *options), 2)
    assert abs(wrong[0]["loss"] / expected[0]["loss"] - 1) > 0.1


def test_a_declared_mean_is_a_mean_of_means_and_not_scaled(monkeypatch):
    """A model that declares independent rows and returns (mean, 1.0) is not scaled by the number of replicas."""
    import nnx_modules

    def loss(self, batch):
        nats = optax.softmax_cross_entropy_with_integer_labels(self(batch["image"]), batch["label"])
        return {"ce": (nats.mean(), jnp.float32(1.0))}

    monkeypatch.setattr(nnx_modules.Mixer, "rows_are_independent", True, raising=False)
    monkeypatch.setattr(nnx_modules.Mixer, "loss", loss, raising=False)
    options = ("layout=ddp", "step.microbatches=2")
    expected, one = conformance.train(conformance.program("Mixer", *options, devices=1), 5)
    state, many = conformance.train(conformance.program("Mixer", *options), 5)
    np.testing.assert_allclose([m["loss"] for m in many], [m["loss"] for m in one], rtol=1e-5)
    assert conformance.largest_difference(expected, state)[0] < 1e-5
