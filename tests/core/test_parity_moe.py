"""Experts on any layout against one device: losses, every gradient, the load; accumulation, remat, selection biases."""

from __future__ import annotations

import functools

import harness
import jax
import numpy as np
import pytest
from harness import close_trees

from jaxtrain.core.program import model_from_config
from jaxtrain.inference.generate import decoding_sharder

RULES = harness.RULES | {"batch": ["data", "fsdp", "expert"], "embed": ["fsdp", "expert"], "expert": "expert"}
NO_SEQUENCE = {k: v for k, v in RULES.items() if k != "sequence"}
CONTEXT = RULES | {"context": "context", "sequence": ["context", "model"], "embed": ["fsdp", "expert", "context"]}
LAYOUTS = {
    "ep": ({"expert": 8}, RULES),
    "dp_ep": ({"data": 2, "expert": 4}, RULES),
    "fsdp_ep_tp_sp": ({"fsdp": 2, "expert": 2, "model": 2}, RULES),
    "fsdp_ep_tp": ({"fsdp": 2, "expert": 2, "model": 2}, NO_SEQUENCE),
    "dp_ep_tp": ({"data": 2, "expert": 2, "model": 2}, RULES),
    "ep_cp_tp": ({"expert": 2, "context": 2, "model": 2}, CONTEXT),
}
KINDS = {
    "dropless": {"num_experts": 8, "top_k": 2, "shared_experts": 1, "bias_update_rate": 1e-3},
    "switch": {"num_experts": 8, "top_k": 1, "capacity_factor": 1.0},
    "gshard": {"num_experts": 8, "top_k": 2, "capacity_factor": 1.0},
}
SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "vocab": 256}
LOSSES = {"load_balance_loss": 0.05, "router_z_loss": 1e-3}
WIDTHS = {"dropless": 16, "switch": 32, "gshard": 16}  # of an expert


@functools.cache
def shared(kind: str, layout: str | None = None):
    return program(kind, layout)


def program(kind: str, layout: str | None = None, **changes):
    mesh, rules = LAYOUTS[layout] if layout else (None, RULES)
    model = {**SIZES, "mlp": WIDTHS[kind], "biases": [], "qk_norm": "none", "sliding_window": None}
    changes = {
        "model": model | {"sliding_window_pattern": 1, "moe": KINDS[kind] | LOSSES},
        "optimizer": {"lr": 1e-3},
    } | changes
    return harness.program(mesh, rules, **changes)


@functools.cache
def one_device(kind: str):
    return harness.run(shared(kind), 20)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "layout"), [("dropless", "ep"), ("dropless", "fsdp_ep_tp_sp"), ("gshard", "dp_ep")])
def test_twenty_steps_equal_one_device(kind: str, layout: str):
    state, metrics = harness.run(shared(kind, layout), 20)
    expected_state, expected = one_device(kind)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-4)
    for name in ("moe/load_max", "moe/load_min", "moe/dropped"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6)  # far below one choice
    close_trees(expected_state["params"], state["params"], 1e-4)


@functools.cache
def params(kind: str):
    return jax.device_get(shared(kind).init()["params"])


def gradients(kind: str, program):
    """Gradients, sums, weights and counts of one batch, in as many parts as the config says."""
    placed = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), params(kind), program.state["params"])
    return jax.jit(program.gradients)(placed, harness.placed(program, 0), jax.random.key(0))


@functools.cache
def one_device_gradients(kind: str):
    return gradients(kind, shared(kind))


def equal(kind: str, got) -> None:
    """Gradients within 1e-5 of their norm, counts and the gradient of the selection bias exactly."""
    expected = one_device_gradients(kind)
    close_trees(expected[:3], got[:3], 1e-5)
    jax.tree.map(np.testing.assert_array_equal, got[3], expected[3])
    bias = "bias" in got[0]["layers"]["moe"]
    assert bias == ("bias_update_rate" in KINDS[kind])
    if bias:
        np.testing.assert_array_equal(got[0]["layers"]["moe"]["bias"], expected[0]["layers"]["moe"]["bias"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("dropless", "fsdp_ep_tp_sp"), ("dropless", "fsdp_ep_tp"), ("switch", "ep"), ("gshard", "dp_ep"),
     ("gshard", "fsdp_ep_tp")],
)  # fmt: skip
def test_every_gradient_equals_one_device(kind: str, layout: str):
    equal(kind, gradients(kind, shared(kind, layout)))
    placed, chosen = one_device_gradients(kind)[3]["placed"], one_device_gradients(kind)[3]["chosen"]
    assert (placed.sum() < 0.95 * chosen.sum()) == ("capacity_factor" in KINDS[kind])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "layout", "step"),
    [("dropless", None, {"microbatches": 4}), ("gshard", "fsdp_ep_tp_sp", {"microbatches": 2, "remat": "full"}),
     ("dropless", "dp_ep_tp", {"microbatches": 2})],
)  # fmt: skip
def test_accumulation_balances_the_whole_batch(kind: str, layout: str | None, step: dict):
    """A balance loss of each microbatch, or of each replica, by itself would be another loss."""
    equal(kind, gradients(kind, program(kind, layout, step=step)))


def test_the_order_of_the_ring_drops_the_same_tokens():
    """Rows lie in zig-zag order over `context`: places go by the order of the tokens, not by that of the array."""
    equal("gshard", gradients("gshard", program("gshard", "ep_cp_tp", context_parallel="ring")))


def test_expert_weights_stored_over_the_replicas():
    equal("gshard", gradients("gshard", program("gshard", "dp_ep", zero=3)))


def test_full_remat_does_not_change_the_result():
    equal("dropless", gradients("dropless", program("dropless", "dp_ep", step={"remat": "full"})))


def test_selection_biases_move_by_the_sign_of_the_load_alone():
    """Neither clipped, nor decayed, nor in the gradient norm; and no moments are kept of them."""
    options = {"lr": 1e-3, "grad_clip_norm": 1e-3, "weight_decay": 0.5, "decay_all_parameters": True}
    run = program("dropless", optimizer=options)
    grads, *_ = one_device_gradients("dropless")
    excess = np.asarray(grads["layers"]["moe"]["bias"])
    assert np.abs(excess).max() >= 8
    state, metrics = run.step(run.init(), harness.batch(0))
    np.testing.assert_array_equal(state["params"]["layers"]["moe"]["bias"], np.float32(-1e-3) * np.sign(excess))
    leaves = jax.tree_util.tree_leaves_with_path(grads)
    counted = [np.asarray(g, np.float64) for path, g in leaves if path[-1].key != "bias"]
    norm = np.sqrt(sum(float((g**2).sum()) for g in counted))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state["opt_state"])]
    assert any("router" in path for path in paths)
    assert not any("bias" in path for path in paths)


def test_two_runs_are_bitwise_equal():
    run = shared("dropless", "fsdp_ep_tp_sp")
    (a, _), (b, _) = (harness.run(run, 3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_decoding_on_a_mesh_equals_one_device():
    """Experts and their width sharded, the tokens in flight on every device; nothing is dropped."""
    tokens = harness.batch(1)["tokens"][:3, :8]

    def logits(run):
        model_def = model_from_config(run.config, decoding_sharder(run.sharder), 256)
        placed = jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), params("gshard"), run.state["params"])

        def decode(params):
            model = model_def.bind(params)
            _, cache = model.decode(tokens[:, :7], model.empty_cache(3, 8))
            return model.decode(tokens[:, 7:], cache)[0]

        return jax.jit(decode)(placed)

    many, one = logits(shared("gshard", "fsdp_ep_tp")), logits(shared("gshard"))
    np.testing.assert_allclose(many, one, rtol=1e-4, atol=1e-5)


def test_selection_biases_stay_float32_where_weights_are_bfloat16():
    run = program("dropless", "fsdp_ep_tp_sp", precision="bf16_pure")
    state, metrics = harness.run(run, 2)
    moe = state["params"]["layers"]["moe"]
    assert (moe["bias"].dtype, moe["up"].dtype, moe["router"].dtype) == ("float32", "bfloat16", "bfloat16")
    np.testing.assert_allclose(metrics["loss"], one_device("dropless")[1]["loss"][:2], rtol=2e-3)
