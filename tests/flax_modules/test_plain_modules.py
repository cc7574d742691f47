"""Plain modules beyond parity: precision, remat, ready-made losses, bad input in one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from command_modules import LinenOwnDtype
from conformance import MODULES

from jaxtrain.core import program
from jaxtrain.core.components import Components
from jaxtrain.core.program import build_program
from jaxtrain.core.state import non_trainable
from jaxtrain.distributed import runtime
from jaxtrain.errors import UserError

HERE = Path(__file__).parent


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
        ("NothingLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("EmptyLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("ListLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("RowsLoss", r"each a tuple \(sum, weight\) of two scalars, or a mean"),
        ("NothingLoss", r"found \{'loss': None\}"),
        ("RowsLoss", r"found \{'rows': \(float32\[16\], float32\[16\]\)\}"),
        ("ComplexLoss", r"found \{'loss': complex64\[\]\}"),
        ("NumberedTerms", r"found \{1: \(float32\[\], float32\[\]\), 2: "),
        ("ManyArguments", r"ManyArguments.loss\(batch, key, more\): missing a required argument: 'more'"),
        ("TwoOfOnePath", "two variables have the path linear/kernel; expected one"),
        ("FloatCount", "variable seen of int32 has float32 after the loss; expected int32"),
        ("TakenTerm", "the loss returns the name `grad_norm`, which another metric has"),
        ("TakenMetric", "the loss returns the name `size`, which another metric has"),
        ("TakenLoss", "the loss returns the name `loss`, which another metric has"),
        ("NoLoss", r"NoLoss has no method `loss\(batch, key\)`; expected one, or loss.function"),
        ("TooManyNames", r"scale has the names .*'embed', 'mlp'.* of a variable of shape \(16,\)"),
        ("NumberNames", r"scale has the names \(3,\) of .*\(16,\); expected a list of one text or None a dim"),
        ("OneTextAsNames", r"scale has the names 'embed' of .*\(16,\); expected a list of one text or None a dim"),
        ("VanishingState", r"variable seen of shape \(1,\) is gone after the loss; expected the same shape"),
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


def test_an_array_of_the_python_module_is_a_constant():
    """On every layout, and as if the pass had created it."""
    options = ("step.microbatches=2", "model.type=odd_modules:ReadsGlobal")
    expected, _ = conformance.train(conformance.program("ConvNet", *options, "layout=ddp", devices=1), 3)
    for name in ("ReadsGlobal", "ReadsNothing"):
        built = conformance.program("ConvNet", "layout=fsdp", options[0], f"model.type=odd_modules:{name}")
        assert conformance.largest_difference(expected, conformance.train(built, 3)[0])[0] < 1e-5


def test_arrays_that_a_pass_leaves_behind_change_nothing():
    built = odd("KeepsOutputs", "step.microbatches=2")
    state, metrics = conformance.train(built, 2)
    assert np.isfinite([m["loss"] for m in metrics]).all()
    assert set(state["params"]) == {"linear"}
    assert "mutable" not in state


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs jaxtrain on the modules beside this file in a process of its own, whose JAX is not configured."""
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    env["PYTHONPATH"] = f"{HERE}:{HERE.parents[1]}"
    config = ("data.type=conformance:Rows", "data.global_batch=16", "precision=fp32", "steps=2", "name=own")
    (tmp_path / "own.yaml").write_text("name: own\nsimulate: 8\n")
    line = [sys.executable, "-m", "jaxtrain.cli.main", "train", "own.yaml", *config, *arguments]
    return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)


def test_arrays_that_an_import_allocates_do_not_start_jax_with_other_devices(tmp_path: Path):
    done = command(tmp_path, "model.type=odd_modules:ReadsGlobal", "layout=fsdp")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 x simulated cpu" in done.stdout + done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("WrongLoss", "jaxtrain: model.type: `loss` must return"),
        ("ReadsKept", "jaxtrain: model.type odd_modules:ReadsKept: the loss uses an array that it has kept"),
        ("Colliding", "jaxtrain: rules.embed: axis `fsdp` would shard two dims"),
    ],
)
def test_the_command_line_says_a_mistake_in_one_line(name: str, line: str, tmp_path: Path):
    done = command(tmp_path, f"model.type=odd_modules:{name}", "layout=fsdp", "step.microbatches=2")
    assert done.returncode == 2
    errors = [text for text in done.stderr.splitlines() if not text.startswith("note ")]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith(line)


def test_devices_that_started_before_simulate_are_one_line():
    with pytest.raises(UserError, match=r"8 cpu devices, not 4 simulated ones; .*before anything else uses JAX"):
        runtime.start(4)


def test_attributes_of_any_name_are_the_users():
    trace(lambda: odd("NamedAttributes"))


def test_a_key_may_be_taken_by_its_name_alone():
    trace(lambda: odd("KeywordKey"))


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["ConvNet", "VisionTransformer", "LinenConvNet", "LinenMLP", "ScannedMLP", "GPT"])
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


def test_a_linen_submodule_with_a_dtype_keeps_it_and_its_parameters_unrounded():
    config = conformance.config("LinenMLP", "layout=ddp", "precision=bf16")
    built = build_program(config, None, jax.devices()[:1], conformance.batch(0), Components(model=LinenOwnDtype()))
    params, batch = built.init()["params"], conformance.batch(0)
    total, _ = built.evaluate(params, batch)[0]["outputs"]
    x = batch["image"].reshape(conformance.ROWS, -1).astype(jnp.bfloat16).astype(np.float64)
    kernel = np.asarray(params["exact"]["kernel"], np.float64)
    assert float(total) == pytest.approx(np.sum((x @ kernel) ** 2), rel=1e-6)
    assert float(total) != pytest.approx(np.sum((x @ kernel.astype(jnp.bfloat16)) ** 2), rel=1e-5)


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


def test_a_replica_sees_its_own_rows_alone_only_if_they_are_proven_independent(monkeypatch):
    """The suite notices if the proof is undone: a loss across rows is then another one."""
    options = ("layout=ddp", "step.microbatches=2")
    proven = conformance.program("Mixer", *options, *MODULES["Mixer"])
    assert proven.gradients.replica_model_def is not None
    across = conformance.program("Contrastive", *options)
    assert across.gradients.replica_model_def is None
    monkeypatch.setattr(program, "rows_are_proven_independent", lambda *_: True)
    _, right = conformance.train(across, 1)
    _, wrong = conformance.train(conformance.program("Contrastive", *options), 1)
    assert abs(wrong[0]["loss"] / right[0]["loss"] - 1) > 0.1


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
