"""What one step promises besides parity: reference gradients, donation, dtypes, clipping, EMA."""

from __future__ import annotations

import re

import harness
import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import pytest

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError


def test_loss_and_gradient_of_a_linear_model_by_formula():
    """The whole step on a model small enough to differentiate by hand: SGD on a weighted mean square."""
    cfg = Config(
        precision="fp32", mesh={"data": 4}, rules={"batch": "data"}, steps=10,
        model={"type": "linear_model:Linear", "options": {"size": 3}}, data={"global_batch": 8, "sequence": 1},
        optimizer={"name": "sgd", "lr": 0.1, "betas": (0.0, 0.95), "weight_decay": 0.0, "grad_clip_norm": None},
        schedule={"name": "constant"},
        step={"microbatches": 2},
    )  # fmt: skip
    program = build_program(cfg, None, jax.devices()[:4])
    batch = linear_model.batch(8, 3)
    state, metrics = program.step(program.init(), batch)
    x, y, c = (batch[k].astype(np.float64) for k in ("x", "y", "count"))
    np.testing.assert_allclose(metrics["loss"], (c * y**2).sum() / c.sum(), rtol=1e-6)
    gradient = (c[:, None] * -2 * y[:, None] * x).sum(0) / c.sum()
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(gradient), rtol=1e-6)
    np.testing.assert_allclose(state["params"]["w"], -0.1 * gradient, rtol=1e-5)
    assert float(metrics["tokens"]) == c.sum()


@pytest.mark.parametrize("zero", [0, 1])
def test_microbatches_of_a_model_with_parameters_of_flax(zero: int):
    """A user's model may hold nnx.Param instead of `env.param`; here two of them in bfloat16, one read by index."""
    from linear_model import batch

    from jaxtrain.config.schema import Config
    from jaxtrain.core.program import build_program

    def grads(accumulate: int):
        cfg = Config(
            mesh={"data": 4}, rules={"batch": "data"}, zero=zero, steps=10, step={"microbatches": accumulate},
            model={"type": "linear_model:Foreign", "options": {"size": 4}}, data={"global_batch": 8, "sequence": 1},
        )  # fmt: skip
        program = build_program(cfg, None, jax.devices()[:4], example=batch(8, 4))
        found = jax.jit(program.gradients)(program.init()["params"], batch(8, 4), jax.random.key(0))
        return [np.asarray(g, np.float32) for g in jax.tree.leaves(found.grads)]

    for one, two in zip(grads(1), grads(2), strict=True):
        np.testing.assert_allclose(two, one, rtol=2**-7)
        assert np.any(one)


def test_counts_without_metrics_are_one_line():
    model = {"type": "linear_model:Counted", "options": {"size": 3}}
    cfg = Config(model=model, data={"global_batch": 8}, rules={"batch": "data"})
    program = build_program(cfg, None, jax.devices()[:1])
    with pytest.raises(UserError, match=r"or a method `metrics\(counts\)`"):
        jax.eval_shape(program.step, program.state, linear_model.batch(8, 3))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_term_knows_the_whole_batch_in_training_and_validation(accumulate: int):
    """A model's `statistics` reach its loss however the batch is cut: here the variance of y, by NumPy."""
    from linear_model import batch

    from jaxtrain.config.schema import Config
    from jaxtrain.core.program import build_program

    cfg = Config(
        precision="fp32", mesh={"data": 2}, rules={"batch": "data"}, steps=10, step={"microbatches": accumulate},
        model={"type": "linear_model:Spread", "options": {"size": 3}}, data={"global_batch": 8, "sequence": 1},
    )  # fmt: skip
    program, rows = build_program(cfg, None, jax.devices()[:2]), batch(8, 3)
    y, c = rows["y"].astype(np.float64), rows["count"].astype(np.float64)
    variance = np.average((y - np.average(y, weights=c)) ** 2, weights=c)
    state = program.init()  # the weights are zeros
    total, weight = program.evaluate(state["params"], rows)[0]["square"]
    np.testing.assert_allclose(total / weight, variance, rtol=1e-6)
    np.testing.assert_allclose(program.step(state, rows)[1]["loss"], variance, rtol=1e-6)


def test_state_is_donated():
    program = harness.program({"data": 2, "fsdp": 2, "model": 2})
    state = program.init()
    new, _ = program.step(state, harness.batch(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert int(new["step"]) == 1


def test_the_state_is_changed_where_it_lies():
    program = harness.program({"data": 2})
    text = program.step.lower(program.state, harness.batch(0)).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    given = dict(re.findall(r"%(\S+) = f32\[([\d,]+)\]\S* parameter\(", entry))
    copied = [name for name in re.findall(r" copy\(%([\w.\-]+)\)", entry) if name in given]
    assert len(given) > 50
    assert copied == []


def test_devices_do_not_wait_for_the_loss_amid_the_step():
    program = harness.program({"data": 2}, loss={"z_loss": 0.0})
    text = program.step.lower(program.state, harness.batch(0)).compile().as_text()
    reduced = re.findall(r" = (\(?f32.*?) all-reduce\(", text)
    alone = [shapes for shapes in reduced if not re.search(r"\[\d", shapes)]
    assert len(alone) < len(reduced)
    assert [shapes.count("f32[]") for shapes in alone] == [1]  # the weight, which is known before


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_half_precision_stays_near_float32(precision: str):
    """||dg|| / ||g|| <= 4 * 1.03^layers * 2^-8, and the stored dtypes are the policy's."""

    def grads(precision):
        program = harness.program({"fsdp": 2, "model": 2}, precision=precision)
        params = jax.tree.map(
            lambda p: p.astype(jnp.float32), harness.program({"fsdp": 2, "model": 2}).init()["params"]
        )
        params = jax.tree.map(
            lambda p, s: jax.device_put(p.astype(s.dtype), s.sharding), params, program.state["params"]
        )
        return jax.jit(program.gradients)(params, harness.batch(0), jax.random.key(0))[0]

    exact, half = grads("fp32"), grads(precision)
    expected = jnp.float32 if precision == "bf16" else jnp.bfloat16
    assert all(g.dtype == expected for g in jax.tree.leaves(half))
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(exact)))
    error = np.sqrt(
        sum(float(jnp.sum((g - h.astype(jnp.float32)) ** 2)) for g, h in zip(*map(jax.tree.leaves, (exact, half))))
    )
    assert error / norm <= 4 * 1.03**2 * 2**-8


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_every_optimizer_lowers_the_loss_sharded_as_on_one_device(name: str):
    lr = {"sgd": 0.3, "lion": 3e-3}.get(name, 1e-2)
    changes = {"optimizer": {"name": name, "lr": lr, "ema_decay": 0.5}, "schedule": {"name": "constant"}}

    def losses(mesh):
        program = harness.program(mesh, **changes)
        state, out = program.init(), []
        for _ in range(6):
            state, metrics = program.step(state, harness.batch(0))
            out.append(float(metrics["loss"]))
        return np.array(out), state

    (one, _), (many, state) = losses(None), losses({"data": 2, "fsdp": 2, "model": 2})
    np.testing.assert_allclose(many, one, rtol=2e-4)
    assert one[-1] < one[0] - 0.1
    ema, params = state["ema"]["head"], state["params"]["head"]
    assert ema.sharding.is_equivalent_to(params.sharding, 2)
    assert not np.allclose(ema, params)


def test_clipping_bounds_the_update():
    program = harness.program(
        optimizer={"name": "sgd", "lr": 1.0, "betas": (0.0, 0.95), "weight_decay": 0.0, "grad_clip_norm": 0.01},
        schedule={"name": "constant"},
    )
    before = jax.tree.map(np.asarray, program.init()["params"])
    state, metrics = program.step(program.init(), harness.batch(0))
    change = jax.tree.map(lambda a, b: float(np.sum((np.asarray(a) - b) ** 2)), state["params"], before)
    assert float(metrics["grad_norm"]) > 0.01
    np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(change))), 0.01, rtol=1e-3)


def test_accumulation_computes_the_forward_pass_once_per_microbatch():
    """The pass that counts the weights must cost nothing: compare matmuls of 1 x 8 rows with 4 x 2 rows."""

    def dots(accumulate: int, part: str) -> int:
        program = harness.program(step={"microbatches": accumulate})
        batch = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in harness.batch(0).items()}
        run, given = {
            "step": (program.step, program.state), "evaluate": (program.evaluate, program.state["params"])
        }[part]  # fmt: skip
        return run.lower(given, batch).compile().as_text().count(" dot(")

    assert dots(4, "step") == dots(1, "step")
    assert dots(4, "evaluate") == dots(1, "evaluate")
