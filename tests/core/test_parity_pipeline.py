"""Pipeline stages under every schedule give the loss and the gradients of one device.

The whole matrix of schedules, stages and other axes is `make matrix`: it compiles 60 programs, up to 16 devices wide.
"""

from __future__ import annotations

import functools

import harness
import jax
import numpy as np
import pytest
import tower_model
from harness import close_trees

from jaxtrain.config.schema import Config
from jaxtrain.core.program import build_program
from jaxtrain.errors import UserError

RULES = {**harness.RULES, "layers": "pipeline", "vocab": ["pipeline", "model"]}
LAYERS, MICROBATCHES = 8, 4
DENSE = {"layers": LAYERS, "sliding_window": None, "sliding_window_pattern": 1}
EXPERTS = {
    **DENSE,
    "biases": [],
    "moe": {"num_experts": 4, "top_k": 2, "bias_update_rate": 1e-3, "load_balance_loss": 0.02, "router_z_loss": 1e-3},
}
MOE_RULES = {**RULES, "batch": "expert", "expert": "expert", "embed": "expert"}
SCHEDULES = ("gpipe", "1f1b", "1f1b_aligned", "interleaved_1f1b", "zb_h1", "zb_v", "v_half")
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiling takes the time
MESHES = {
    "2": {"pipeline": 2},
    "2 fsdp model": {"pipeline": 2, "fsdp": 2, "model": 2},
    "2 data": {"pipeline": 2, "data": 2, "model": 2},
    "2 expert": {"pipeline": 2, "expert": 2, "model": 2},
    "4 fsdp": {"pipeline": 4, "fsdp": 2},
    "4 model": {"pipeline": 4, "model": 2},
}
WITH = {
    "model": {"model": 2}, "fsdp": {"fsdp": 2}, "fsdp model": {"fsdp": 2, "model": 2}, "experts": {"expert": 2},
}  # fmt: skip


@functools.cache
def want(kind: str, layers: int):
    changes = {
        "dense": {"model": DENSE | {"layers": layers}},
        "sliding_window": {"model": {**DENSE, "sliding_window": 12}},
        "groups": {
            "model": {**DENSE, **harness.OTHERS, "sliding_window": 12, "sliding_window_pattern": 2, "layers": layers}
        },
        "moe": {
            "model": EXPERTS | {"layers": layers},
            "loss": {"z_loss": 1e-3},
        },
    }[kind]
    return changes, found(harness.program(**changes))


def found(program, params=None, *scale):
    gradients = jax.jit(program.gradients, compiler_options=QUICK)
    params = program.init()["params"] if params is None else params
    return gradients(params, harness.placed(program, 0), jax.random.key(0), *scale)


def equal(kind: str, mesh: dict, rules: dict, layers: int = LAYERS, **more):
    changes, expected = want(kind, layers)
    more = {"step": {"microbatches": MICROBATCHES}, **more}
    got = found(harness.program(mesh, rules=rules, **changes, **more))
    close_trees(got.grads, expected.grads, 1e-5)
    assert got.sums.keys() == expected.sums.keys()
    for name, value in expected.sums.items():
        np.testing.assert_allclose(got.sums[name], value, rtol=1e-5)
        np.testing.assert_allclose(got.weights[name], expected.weights[name], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, got.counts, expected.counts)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [
        *(("2 fsdp model", name) for name in SCHEDULES),
        *(("4 fsdp", name) for name in ("1f1b", "interleaved_1f1b", "zb_v")),
    ],
)
def test_every_schedule(mesh: str, schedule: str):
    equal("dense", MESHES[mesh], RULES, pipeline={"schedule": schedule})


@pytest.mark.matrix
@pytest.mark.parametrize("axes", WITH)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_axis(schedule: str, stages: int, axes: str):
    mesh = {"pipeline": stages, **WITH[axes]}
    kind, rules = ("moe", MOE_RULES) if axes == "experts" else ("dense", RULES)
    equal(kind, mesh, rules, pipeline={"schedule": schedule})


@pytest.mark.matrix
@pytest.mark.parametrize("schedule", ["1f1b_aligned", "zb_v"])
@pytest.mark.parametrize("precision", ["bf16", "bf16_pure", "fp16"])
def test_every_precision(precision: str, schedule: str):
    """As near as one device of the same precision: `1.03` to the number of layers, of the units of design."""
    unit = 2**-11 if precision == "fp16" else 2**-8
    one, scale = harness.program(model=DENSE, precision=precision), np.float32(2**10 if precision == "fp16" else 1)
    more = {"pipeline": {"schedule": schedule}, "step": {"microbatches": MICROBATCHES}}
    stages = harness.program(MESHES["2 fsdp model"], RULES, model=DENSE, precision=precision, **more)
    params = one.init()["params"]
    placed = jax.tree.map(lambda p, s: jax.device_put(np.asarray(p), s.sharding), params, stages.state["params"])
    grads = [
        np.concatenate([np.asarray(g, np.float64).ravel() / scale for g in jax.tree.leaves(found(*x, scale).grads)])
        for x in ((one, params), (stages, placed))
    ]
    assert np.linalg.norm(grads[1] - grads[0]) <= 4 * 1.03**LAYERS * unit * np.linalg.norm(grads[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_replicas_and_zero(zero: int):
    equal("dense", MESHES["2 data"], RULES, zero=zero)


def test_experts_whose_weights_replicas_share():
    rules = {**MOE_RULES, "batch": ["data", "expert"]}
    zb_h1 = {"schedule": "zb_h1"}
    equal("moe", {"pipeline": 2, "data": 2, "expert": 2}, rules, zero=3, step={"microbatches": 2}, pipeline=zb_h1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_h1"])
def test_experts(schedule: str):
    equal("moe", MESHES["2 expert"], MOE_RULES, pipeline={"schedule": schedule})


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "layers", "mesh", "more"),
    [
        ("dense", 7, "2 fsdp model", {"pipeline": {"schedule": "zb_v"}}),
        ("dense", 6, "4 fsdp", {}),
        ("groups", 6, "2 data", {"zero": 2}),
        ("moe", 5, "2 expert", {"pipeline": {"schedule": "interleaved_1f1b"}}),
    ],
)
def test_stages_of_unequal_numbers_of_layers(kind: str, layers: int, mesh: str, more: dict):
    equal(kind, MESHES[mesh], MOE_RULES if kind == "moe" else RULES, layers, **more)


@pytest.mark.parametrize("context", ["ulysses", "gather"])
def test_shards_of_a_sequence(context: str):
    """With a window that elsewhere would have the neighbour's end sent, by a permutation."""
    rules = {**RULES, "context": ["context"], "sequence": ["context", "model"]}
    equal("sliding_window", {"pipeline": 2, "context": 2, "model": 2}, rules, context_parallel=context)


def test_unrolled_layers():
    equal("dense", {"pipeline": 2, "data": 2}, RULES, step={"microbatches": MICROBATCHES, "unroll": 0})


def test_remat():
    equal("dense", MESHES["4 model"], RULES, step={"microbatches": MICROBATCHES, "remat": "full"})


@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", 4), ("zb_v", 6)])
def test_a_users_own_model(schedule: str, layers: int):
    """Not of tokens: a pytree goes from stage to stage, and the weights of the ends are shared."""

    def run(mesh: dict, rules: dict, **more):
        cfg = Config(
            precision="fp32", mesh=mesh, rules=rules, steps=10, data={"global_batch": 8, "sequence": 1},
            model={"type": "tower_model:Tower", "options": {"size": 8, "layers": layers}}, **more,
        )  # fmt: skip
        program = build_program(cfg, None, jax.devices()[: int(np.prod(list(mesh.values())))])
        key = jax.random.key(0)
        return jax.jit(program.gradients)(program.init()["params"], tower_model.batch(8, 8), key)

    one = run({"data": 1}, {"batch": "data"})
    rules = {"batch": "data", "layers": "pipeline", "mlp": "model"}
    pipeline = {"schedule": schedule}
    got = run({"pipeline": 2, "data": 2, "model": 2}, rules, pipeline=pipeline, step={"microbatches": 4})
    close_trees(got.grads, one.grads, 1e-5)
    close_trees((got.sums, got.weights, got.counts), (one.sums, one.weights, one.counts), 1e-5)


def test_a_model_without_parts_is_refused():
    cfg = Config(
        mesh={"pipeline": 2}, rules={"features": "pipeline"}, data={"global_batch": 8, "sequence": 1},
        model={"type": "linear_model:Linear", "options": {"size": 4}},
    )  # fmt: skip
    with pytest.raises(UserError, match="need the methods embed_inputs, run_layers and head_loss, and it has no"):
        build_program(cfg, None, jax.devices()[:2])


def test_a_model_that_does_not_leave_out_what_is_no_layer_is_refused():
    cfg = Config(
        mesh={"pipeline": 2}, rules={"layers": "pipeline"}, data={"global_batch": 4, "sequence": 1},
        step={"microbatches": 2}, model={"type": "tower_model:Heedless", "options": {"size": 4, "layers": 3}},
    )  # fmt: skip
    program = build_program(cfg, None, jax.devices()[:2])
    with pytest.raises(UserError, match="3 layers in unequal parts need `run_layers` to pass its `layers` to"):
        jax.eval_shape(program.gradients, program.state["params"], tower_model.batch(4, 4), jax.random.key(0))
