"""A pull-back in two parts: the same gradients, no work twice, and no more kept between them than theory says."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from jaxtrain.config.schema import Config
from jaxtrain.kernels.moe.balance import router_z
from jaxtrain.mesh.rules import BATCH, SEQUENCE
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import define, make_env
from jaxtrain.nn.env import Env
from jaxtrain.nn.rope import frequencies, rotation
from jaxtrain.nn.stack import scan
from jaxtrain.pipeline.cut import SINK, SOURCE, Graph
from jaxtrain.pipeline.split import split

B, T, D, F, L = 2, 8, 16, 32, 3
REMATS = ("none", "full", "dots", ("attention", "residual"))


def taken(stage, params, x):
    """A stage's pull-back as (pull, kept, given, dy): of its residuals those are given that are parameters."""
    y, pull = jax.vjp(stage, params, x)
    leaves, tree = jax.tree.flatten(pull)
    known = jax.tree.leaves(params)
    source = [next((i for i, own in enumerate(known) if own is leaf), None) for leaf in leaves]

    def rebuilt(kept, given, dy):
        rest, known = iter(kept), jax.tree.leaves(given)
        return jax.tree.unflatten(tree, [next(rest) if i is None else known[i] for i in source])(dy)

    keys = iter(jax.random.split(jax.random.key(9), len(jax.tree.leaves(y))))
    dy = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), y)
    return rebuilt, [leaf for leaf, i in zip(leaves, source) if i is None], params, dy


def parts(pull, kept, given, dy):
    """The split, and functions of the same arguments: B's results, and W's from them."""
    cut = split(pull, kept, given, dy)

    def weights(kept, given, between, dy):
        return cut.w([kept[i] for i in cut.kept], given, between, [jax.tree.leaves(dy)[i] for i in cut.dy])

    return cut, weights


def check(stage, params, x, exact: bool = True):
    """That B and W, compiled apart, give what the pull-back gives, with the same matmuls. Returns the split."""
    case = taken(stage, params, x)
    pull, kept, given, dy = case
    cut, weights = parts(*case)
    dw, dx = jax.jit(pull)(kept, given, dy)
    own_dx, between = jax.jit(cut.b)(kept, given, dy)
    own_dw = jax.jit(weights)(kept, given, between, dy)
    assert [(x.shape, x.dtype) for x in between] == [(x.shape, x.dtype) for x in cut.between]
    for own, whole in zip(jax.tree.leaves((own_dw, own_dx)), jax.tree.leaves((dw, dx)), strict=True):
        assert own.dtype == whole.dtype
        own, whole = np.asarray(own, np.float64), np.asarray(whole, np.float64)
        tight = 1e-6 * np.abs(whole).max() if exact else 2**-8 * np.abs(whole).max()
        np.testing.assert_allclose(own, whole, rtol=0, atol=tight)
    flops = [matmuls(fn, *args) for fn, args in (
        (pull, (kept, given, dy)), (cut.b, (kept, given, dy)), (weights, (kept, given, between, dy))
    )]  # fmt: skip
    assert flops[1] + flops[2] == flops[0]
    return cut, case, flops


def matmuls(fn, *args) -> int:
    """FLOPs of all matmuls of a function whose results are all wanted, loops' as often as they run."""

    def of(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                left = eqn.invars[0].aval.shape
                total += 2 * eqn.outvars[0].aval.size * int(np.prod([left[dim] for dim in contracted]))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(inner, "eqns"):
                    total += of(inner) * eqn.params.get("length", 1)
        return total

    return of(jax.make_jaxpr(fn)(*args))


def normal(seed: int, *shape: int, dtype: Any = jnp.float32):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, dtype)


def layer(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def two_matmuls(remat: str | None):
    """Layers of two matmuls in a scan, under a policy of `jax.checkpoint`."""
    policy = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}

    def stage(params, x):
        step = lambda x, w: (layer(w, x), None)  # noqa: E731
        return lax.scan(step if remat is None else jax.checkpoint(step, policy=policy[remat]), x, params)[0]

    return stage, {"up": normal(0, L, D, F), "down": normal(1, L, F, D)}, normal(2, B, T, D)


def nbytes(shapes) -> int:
    return sum(x.size * x.dtype.itemsize for x in shapes)


@pytest.mark.parametrize("remat", [None, "full", "dots"])
def test_a_layer_keeps_the_inputs_of_its_matmuls_and_their_cotangents_and_nothing_else(remat: str | None):
    cut, case, (whole, b, w) = check(*two_matmuls(remat))
    kept = [case[1][i] for i in cut.kept]
    forward = 2 * 2 * B * T * D * F * L
    assert w == forward  # the weights' gradients alone
    assert b == whole - w == forward * (1.5 if remat == "full" else 1)
    ends, inner = L * B * T * D * 4, L * B * T * F * 4  # bytes of x or y, and of hidden values, in all layers
    assert nbytes([*kept, *cut.between]) == 2 * ends + 2 * inner
    # What F keeps is not copied: x, and the hidden values unless they are computed again.
    assert nbytes(cut.between) == ends + inner * (2 if remat == "full" else 1)
    assert cut.dy == ()


def test_layers_in_a_python_loop_take_the_cotangent_from_the_caller():
    def stage(params, x):
        for index in range(L):
            x = layer(jax.tree.map(lambda w, i=index: w[i], params), x)
        return x

    _, params, x = two_matmuls(None)
    cut, _, _ = check(stage, params, x)
    assert cut.dy == (0,)
    assert nbytes(cut.between) == (L - 1) * B * T * D * 4 + L * B * T * F * 4


def test_casts_of_weights_are_done_again_and_sums_are_done_early():
    def norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale

    def step(x, w):
        up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.silu(norm(x, w["scale"]).astype(jnp.bfloat16) @ up) @ down, None

    params = {"up": normal(0, L, D, F), "down": normal(1, L, F, D), "scale": 1 + normal(3, L, D)}
    cut, case, _ = check(lambda p, x: lax.scan(jax.checkpoint(step), x, p)[0], params, normal(2, B, T, D, dtype=jnp.bfloat16), False)
    shapes = sorted(x.shape[1:] for x in cut.between)
    # Not the cotangent behind the norm, which is as big as x: the sum of it that the scale's gradient is.
    assert shapes == sorted([(D,), (B, T, D), (B, T, D), (B, T, F), (B, T, F)])
    assert {x.shape: x.dtype for x in cut.between}[L, B, T, F] == jnp.bfloat16


def test_a_scan_in_a_scan_and_weights_that_layers_share():
    def inner(x, w):
        return layer(w, x), jnp.sum(x**2)

    def stage(params, x):
        def outer(x, w):
            x, sums = lax.scan(jax.checkpoint(inner), x, w)
            return x * jnp.tanh(x @ params["shared"]), sums.sum()

        x, sums = lax.scan(outer, x, params["own"])
        return x @ params["shared"], sums.sum()

    own = {"up": normal(0, 2, L, D, F), "down": normal(1, 2, L, F, D)}
    cut, _, _ = check(stage, {"own": own, "shared": normal(2, D, D)}, normal(3, B, T, D))
    assert (2, L, B, T, F) in [x.shape for x in cut.between]


def test_what_cannot_be_cut_is_in_b():
    def stage(params, x):
        x = lax.cond(x[0, 0, 0] > 0, lambda: layer(params, x), lambda: x)
        return lax.fori_loop(0, 2, lambda _, x: jnp.sin(x @ params["square"]), x)

    params = {"up": normal(0, D, F), "down": normal(1, F, D), "square": normal(2, D, D)}
    case = taken(stage, params, normal(3, B, T, D))
    cut, weights = parts(*case)
    pull, kept, given, dy = case
    own_dx, between = cut.b(kept, given, dy)
    jax.tree.map(np.testing.assert_array_equal, (weights(kept, given, between, dy), own_dx), pull(kept, given, dy))


def test_named_values_and_a_custom_rule():
    @jax.custom_vjp
    def rule(w, x):
        return x @ w

    rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (jnp.einsum("bti,bto->io", kept[1], 2 * g), g @ kept[0].T))

    def step(x, w):
        return x + rule(w["down"], checkpoint_name(jax.nn.gelu(rule(w["up"], x)), "hidden")), None

    _, params, x = two_matmuls(None)
    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    check(lambda p, x: lax.scan(jax.checkpoint(step, policy=policy), x, p)[0], params, x)


MODEL = {"embed": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 48, "vocab": 67, "init_std": 0.2}
MOE = {"experts": 4, "top_k": 2, "mlp": 24}


def decoder(precision: str, remat: Any, sharder: Sharder | None = None, **options):
    """The layers of a decoder as a stage."""
    cfg = Config(model=MODEL | options, precision=precision, step={"remat": remat})
    env = make_env(cfg, sharder or Sharder())
    definition = define(cfg, env, MODEL["vocab"])
    params = definition.init(jax.random.key(0))
    positions = jnp.tile(jnp.arange(16), (4, 1))
    segments = 1 + positions // 9
    period = cfg.model.window_every

    def stage(layers, x):
        model = definition.bind(params | {"layers": layers})
        turn = rotation(positions, frequencies(8, 1e4, None))
        order = segments * 16 + positions

        def step(block, x, _, index):
            window = None if period > 1 and index == period - 1 else cfg.model.window
            x, _, load = block(x, turn, positions, segments, window, None, order)
            return x, load

        x, load = scan(model.layers, step, env.constrain(x, BATCH, SEQUENCE, None), env=env, period=period)
        return x if load is None else (x, router_z(load))

    return stage, params["layers"], normal(1, 4, 16, 32, dtype=env.policy.compute)


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_a_decoder(remat):
    cut, case, (whole, b, w) = check(*decoder("fp32", remat))
    weights = [p for p in jax.tree.leaves(case[2]) if p.ndim > 2]
    assert w == 2 * 4 * 16 * sum(p.size for p in weights)
    assert not {x.shape for x in cut.between} & {p.shape for p in weights}


@pytest.mark.parametrize("options", [
    {"window": 4, "window_every": 2, "layers": 5, "qk_norm": True, "post_norm": True},
    {"moe": MOE}, {"moe": MOE | {"capacity": 0.8, "shared": 1}}, {"attention_bias": True, "mlp_bias": True},
], ids=["windows", "dropless", "capacity", "biases"])  # fmt: skip
@pytest.mark.parametrize(("precision", "remat"), [("bf16", "none"), ("bf16", "full"), ("fp32", "dots")])
def test_decoders(precision: str, remat: str, options: dict):
    check(*decoder(precision, remat, **options), exact=precision == "fp32")


F_, B_, W_ = range(3)


def stages_in_ticks(mesh, stage, params, x, dy, table):
    """Gradients of each of two stages, added up over microbatches, and of their inputs.

    Both stages see the same inputs and cotangents, in the order of `table` [ticks, stages]: (action, microbatch), with
    actions F, B, W. Everything that lives longer than a tick is in ring buffers of two slots.
    """

    def run(params, x, dy):
        params = jax.tree.map(lambda p: p[0], params)
        pull = {}

        def forward(params, x):
            y, vjp = jax.vjp(stage, params, x)
            leaves, pull["tree"] = jax.tree.flatten(vjp)
            known = jax.tree.leaves(params)
            pull["source"] = [next((i for i, p in enumerate(known) if p is leaf), None) for leaf in leaves]
            return [leaf for leaf, i in zip(leaves, pull["source"]) if i is None]

        def backward(kept, given, dy):
            rest, known = iter(kept), jax.tree.leaves(given)
            leaves = [next(rest) if i is None else known[i] for i in pull["source"]]
            return jax.tree.unflatten(pull["tree"], leaves)(dy)

        kept = jax.eval_shape(forward, params, x[0])
        cut = split(backward, kept, params, dy[0])
        ring = lambda shapes: [jnp.zeros((2, *s.shape), s.dtype) for s in shapes]  # noqa: E731

        def put(ring, slot, values):
            return [buffer.at[slot].set(value) for buffer, value in zip(ring, values, strict=True)]

        def tick(carry, now):
            action, slot = (part[lax.axis_index("pipeline")] for part in now)

            def do_f(kept, between, dx, grads):
                return put(kept, slot, forward(params, x[slot])), between, dx, grads

            def do_b(kept, between, dx, grads):
                own, values = cut.b([buffer[slot] for buffer in kept], params, dy[slot])
                return kept, put(between, slot, values), dx.at[slot].set(own), grads

            def do_w(kept, between, dx, grads):
                held = [kept[i][slot] for i in cut.kept]
                own = cut.w(held, params, [b[slot] for b in between], [dy[slot]] * len(cut.dy))
                return kept, between, dx, jax.tree.map(jnp.add, grads, own)

            return lax.switch(action, [do_f, do_b, do_w], *carry), None

        first = ring(kept), ring(cut.between), jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, params)
        (_, _, dx, grads), _ = lax.scan(tick, first, table)
        return jax.tree.map(lambda g: g[None], (grads, dx))

    spec = PartitionSpec("pipeline")
    none = PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(spec, none, none), out_specs=spec, axis_names={"pipeline"}, check_vma=False
    )  # fmt: skip
    return jax.jit(mapped)(params, x, dy)


@pytest.mark.parametrize("options", [{}, {"moe": MOE | {"capacity": 2.0}}], ids=["dense", "experts"])
def test_b_and_w_in_branches_of_different_ticks_on_a_mesh(options: dict):
    """Two stages of two microbatches, each on a mesh of four; experts on several devices are in a shard_map."""
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    rules = {
        "batch": ("data",), "embed": ("data",), "expert": ("data",), "heads": ("model",), "kv_heads": ("model",),
        "mlp": ("model",), "sequence": ("model",),
    }  # fmt: skip
    rules = rules | ({"embed": ()} if options else {})
    actions = np.array([[F_, F_, B_, B_, W_, W_], [F_, B_, F_, W_, B_, W_]], np.int32).T
    microbatch = np.array([[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1]], np.int32).T
    plain, layers, _ = decoder("fp32", "full", layers=2, **options)
    placed, _, _ = decoder("fp32", "full", Sharder(mesh, rules).without("pipeline"), layers=2, **options)
    only = (lambda stage: lambda p, x: stage(p, x)[0]) if options else (lambda stage: stage)
    params = jax.tree.map(lambda p: jnp.stack([p, -p]), layers)
    x, dy = normal(5, 2, 4, 16, 32), normal(6, 2, 4, 16, 32)
    grads, dx = stages_in_ticks(mesh, only(placed), params, x, dy, (actions, microbatch))

    def alone(params):
        pulls = [jax.vjp(only(plain), params, x[i])[1](dy[i]) for i in range(2)]
        return jax.tree.map(jnp.add, pulls[0][0], pulls[1][0]), jnp.stack([pull[1] for pull in pulls])

    expected = jax.jit(lambda params: lax.map(alone, params))(params)
    for own, whole in zip(jax.tree.leaves((grads, dx)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
