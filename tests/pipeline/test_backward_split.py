"""A split backward pass gives the same gradients, computes nothing twice, and saves no more than theory needs."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from remat import remat as remat_keys

from jaxtrain.config.schema import Config
from jaxtrain.core.program import model_from_config
from jaxtrain.losses.load_balancing import router_z_loss
from jaxtrain.nn.rope import frequencies, rotation
from jaxtrain.nn.stack import scan
from jaxtrain.pipeline.backward_split import SplitBackward, split_backward
from jaxtrain.pipeline.min_cut import SINK, SOURCE, Graph
from jaxtrain.pipeline.stage import run_if
from jaxtrain.sharding.rules import BATCH, SEQUENCE
from jaxtrain.sharding.sharder import Sharder

B, T, D, F, L = 2, 8, 16, 32, 3
REMATS = ("none", "full", "dots", ("attention", "residual"))


class StagePullback:
    """A stage's forward pass and pullback. Residuals that are parameters are not saved."""

    def __init__(self, stage):
        self.stage = stage

    def forward(self, params, x):
        """Returns (y, residuals)."""
        y, pullback = jax.vjp(self.stage, params, x)
        leaves, self.tree = jax.tree.flatten(pullback)
        constants = jax.tree.leaves(params)
        self.source = [next((i for i, constant in enumerate(constants) if constant is leaf), None) for leaf in leaves]
        return y, [leaf for leaf, i in zip(leaves, self.source) if i is None]

    def pullback(self, residuals, params, dy):
        rest, constants = iter(residuals), jax.tree.leaves(params)
        return jax.tree.unflatten(self.tree, [next(rest) if i is None else constants[i] for i in self.source])(dy)


def weight_part(parts: SplitBackward):
    """Returns W as a function of all residuals and all cotangents."""

    def run(residuals, params, saved, dy):
        cotangents = [jax.tree.leaves(dy)[i] for i in parts.w_cotangents]
        return parts.backward_weight([residuals[i] for i in parts.w_residuals], params, saved, cotangents)

    return run


def check(stage, params, x, tight: float = 1e-6):
    """Checks that B and W, compiled separately, give the gradients of the pullback, by the same matmuls.

    Returns the split, the residuals, and the FLOPs of all matmuls, of those of B, and of those of W.
    """
    unsplit = StagePullback(stage)
    y, residuals = jax.jit(unsplit.forward)(params, x)
    keys = iter(jax.random.split(jax.random.key(9), 9))
    dy = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), y)
    parts = split_backward(unsplit.pullback, residuals, params, dy)
    dx, saved, b_grads = jax.jit(parts.backward_input)(residuals, params, dy)
    w_grads = jax.jit(weight_part(parts))(residuals, params, saved, dy)
    actual = jax.tree.map(lambda _, *two: next(x for x in two if x is not None), params, b_grads, w_grads), dx
    assert [(x.shape, x.dtype) for x in saved] == [(x.shape, x.dtype) for x in parts.saved]
    compare(actual, jax.jit(unsplit.pullback)(residuals, params, dy), tight)
    total, b = (matmuls(fn, residuals, params, dy) for fn in (unsplit.pullback, parts.backward_input))
    w = matmuls(weight_part(parts), residuals, params, saved, dy)
    assert b + w == total
    return parts, residuals, (total, b, w)


def compare(actual: Any, expected: Any, tight: float):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tight * np.abs(y).max())


def matmuls(fn, *args) -> int:
    """Returns the FLOPs of a function's matmuls: of all iterations of a scan, and of one device of a shard_map."""

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


def nbytes(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, dtype)


def layer(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


PARAMS = {"up": normal(0, L, D, F), "down": normal(1, L, F, D)}
X = normal(2, B, T, D)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_a_layer_saves_only_the_inputs_of_its_matmuls_and_their_cotangents(remat: str):
    policies = jax.checkpoint_policies
    policy = {"none": policies.everything_saveable, "dots": policies.dots_with_no_batch_dims_saveable, "full": None}
    step = jax.checkpoint(lambda x, w: (layer(w, x), None), policy=policy[remat])
    parts, residuals, (total, b, w) = check(lambda params, x: lax.scan(step, x, params)[0], PARAMS, X)
    forward = 2 * 2 * B * T * D * F * L
    assert w == forward  # the weights' gradients alone
    assert b == total - w == forward * (1.5 if remat == "full" else 1)
    residual, hidden = L * B * T * D * 4, L * B * T * F * 4  # bytes in all layers
    assert nbytes([*(residuals[i] for i in parts.w_residuals), *parts.saved]) == 2 * residual + 2 * hidden
    # Residuals are not copied: x, and the hidden values unless they are recomputed.
    assert nbytes(parts.saved) == residual + hidden * (2 if remat == "full" else 1)
    assert parts.w_cotangents == ()


def test_layers_in_a_python_loop_take_the_cotangent_from_the_caller():
    def stage(params, x):
        for index in range(L):
            x = layer(jax.tree.map(lambda w, i=index: w[i], params), x)
        return x

    parts, *_ = check(stage, PARAMS, X)
    assert parts.w_cotangents == (0,)
    assert nbytes(parts.saved) == (L - 1) * X.nbytes + L * B * T * F * 4


def test_casts_of_weights_are_repeated_in_w_and_sums_are_done_in_b():
    def norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale

    def step(x, w):
        up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.silu(norm(x, w["scale"]).astype(jnp.bfloat16) @ up) @ down, None

    params = PARAMS | {"scale": 1 + normal(3, L, D)}
    x = X.astype(jnp.bfloat16)
    parts, *_ = check(lambda params, x: lax.scan(jax.checkpoint(step), x, params)[0], params, x, 2**-8)
    # Not the cotangent after the norm, which is as large as x: B computes the gradient of the scale from it.
    assert parts.b_grads == (1,)
    assert sorted(x.shape[-1] for x in parts.saved) == [D, D, F, F]
    assert {x.dtype.name for x in parts.saved} == {"bfloat16"}


def test_values_are_saved_before_they_are_gathered():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    places = [NamedSharding(mesh, PartitionSpec(None, axis)) for axis in ("model", None)]

    def stage(w, x):
        step = jax.checkpoint(lambda w, x: lax.with_sharding_constraint(jnp.cumsum(x, -1), places[1]) @ w)
        return lax.with_sharding_constraint(step(w, x), places[0])

    x = jax.device_put(X, places[0])
    parts, residuals, _ = check(stage, normal(0, D, F), x)
    jaxpr = jax.make_jaxpr(weight_part(parts))(residuals, PARAMS["up"][0], parts.saved, jnp.zeros((B, T, F))).jaxpr
    gathers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    assert X.shape in [eqn.outvars[0].aval.shape for eqn in gathers]


def test_rematerialised_values_that_only_w_reads_are_computed_in_b():
    def step(x, w):
        return x + (jnp.tanh(x @ w["up"]) @ w["square"]) @ w["down"], None  # B does not need what `down` multiplies

    params = PARAMS | {"square": normal(4, L, F, F)}
    _, _, (_, _, w) = check(lambda params, x: lax.scan(jax.checkpoint(step), x, params)[0], params, X)
    assert w == 2 * B * T * (2 * D * F + F * F) * L


def test_a_value_that_all_iterations_read_is_saved_once():
    def stage(params, x):
        total = jnp.cumsum(x, 1)
        step = jax.checkpoint(lambda x, w: (x + jnp.tanh(total[..., : D // 2] @ w), None))
        return lax.scan(step, x, params)[0]

    parts, residuals, _ = check(jax.checkpoint(stage), normal(0, L, D // 2, D), X)
    assert X.shape in [x.shape for x in parts.saved]
    assert (L, B, T, D // 2) not in [x.shape for x in (*residuals, *parts.saved)]


def test_a_gradient_from_values_that_others_need_too_is_computed_in_w():
    def step(x, w):
        return layer(w, x) + w["shift"], None

    params = PARAMS | {"shift": normal(4, L, B, T, D)}
    parts, *_ = check(lambda params, x: lax.scan(step, x, params)[0], params, X)
    assert parts.b_grads == ()
    assert len(parts.saved) == 2


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
    parts, *_ = check(stage, {"own": own, "shared": normal(2, D, D)}, X)
    assert (2, L, B, T, F) in [x.shape for x in parts.saved]


def test_conditionals_and_while_loops_are_in_b():
    def stage(params, x):
        x = lax.cond(x[0, 0, 0] > 0, lambda: layer(params, x), lambda: x)
        rows = lax.while_loop(lambda n: n < x[0, 0, 0], lambda n: n + 1, jnp.float32(0))
        return jnp.tanh(x @ params["up"]) * rows

    x = jnp.abs(X)
    _, _, (total, b, w) = check(stage, jax.tree.map(lambda w: w[0], PARAMS), x)
    assert w == 2 * B * T * D * F
    assert total == b + w


def test_named_values_and_a_custom_vjp():
    @jax.custom_vjp
    def rule(w, x):
        return x @ w

    def rule_bwd(residuals, g):
        return jnp.einsum("bti,bto->io", residuals[1], 2 * g), g @ residuals[0].T

    rule.defvjp(lambda w, x: (x @ w, (w, x)), rule_bwd)

    def step(x, w):
        return x + rule(w["down"], checkpoint_name(jax.nn.gelu(rule(w["up"], x)), "hidden")), None

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    check(lambda params, x: lax.scan(jax.checkpoint(step, policy=policy), x, params)[0], PARAMS, X)


def test_pullbacks_that_can_not_be_split_are_refused():
    ref = jax.new_ref(jnp.zeros(()))

    def counts(residuals, constants, dy):
        ref[...] += 1.0
        return dy, dy

    with pytest.raises(ValueError, match="must not use Refs"):
        split_backward(counts, [], (), X)

    def closes(x):
        split_backward(lambda residuals, constants, dy: (dy * x, dy), [], (), X)
        return x

    with pytest.raises(ValueError, match="closes over a traced value"):
        jax.jit(closes)(X)


MODEL = {"embed": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 48, "vocab": 67, "init_std": 0.2}
MOE = {"num_experts": 4, "top_k": 2}
CAPACITY = {"mlp": 24, "moe": MOE | {"capacity_factor": 2.0}}


def decoder(precision: str, remat: Any, sharder: Sharder | None = None, **options):
    """Returns (stage, its parameters, an input): the layers of a decoder, and the loss of its router if it has one."""
    cfg = Config(model=MODEL | options, precision=precision, step=remat_keys(remat))
    model_def = model_from_config(cfg, sharder or Sharder(), MODEL["vocab"])
    env = model_def.bind(model_def.params).env
    params, _ = model_def.init(jax.random.key(0))
    positions = jnp.tile(jnp.arange(16), (4, 1))
    segments = 1 + positions // 9
    period = cfg.model.sliding_window_pattern

    def stage(layers, x):
        model = model_def.bind(params | {"layers": layers})
        turn = rotation(positions, frequencies(8, 1e4, None))
        order = segments * 16 + positions

        def step(block, x, _, index):
            window = None if period > 1 and index == period - 1 else cfg.model.sliding_window
            x, _, load = block(x, turn, positions, segments, window, None, order)
            return x, load

        x, load = scan(model.layers, step, env.constrain(x, BATCH, SEQUENCE, None), env=env, group=period)
        return x if load is None else (x, router_z_loss(load, len(load.squares)))

    return stage, params["layers"], normal(1, 4, 16, 32, dtype=env.policy.compute)


@pytest.mark.parametrize("remat", REMATS, ids=str)
def test_a_decoder(remat: Any):
    stage, params, x = decoder("fp32", remat, layers=2)
    parts, residuals, (_, _, w) = check(stage, params, x)
    weights = [p for p in jax.tree.leaves(params) if p.ndim > 2]
    assert w == 2 * 4 * 16 * sum(p.size for p in weights)
    # Per token and layer: the inputs of 4 matmuls (or values that give them cheaply) and the cotangents of 7.
    theory = 2 * 4 * 16 * 4 * ((32 + 32 + 32 + 48) + (32 + 16 + 16) + 32 + (48 + 48 + 32))
    assert theory <= nbytes([*(residuals[i] for i in parts.w_residuals), *parts.saved]) < 1.02 * theory
    assert [jax.tree.leaves(params)[i].ndim for i in parts.b_grads] == [2, 2]  # the norms' scales
    assert not {x.shape for x in parts.saved} & {p.shape for p in weights}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("precision", "remat", "options"), [
    ("bf16", "none", {"sliding_window": 4, "sliding_window_pattern": 2, "layers": 3, "biases": ["qkv"],
    "norm_placement": "sandwich"}),
    ("bf16", "full", {"mlp": 24, "moe": MOE, "layers": 2}),
    ("fp32", "none", {"mlp": 24, "moe": MOE | {"capacity_factor": 0.8, "shared_experts": 1}}),
], ids=["windows", "dropless", "capacity"])  # fmt: skip
def test_decoders(precision: str, remat: str, options: dict):
    check(*decoder(precision, remat, **options), 1e-6 if precision == "fp32" else 2**-8)


def in_ticks(mesh, stage, params, x, dy, actions, microbatch):
    """Returns the gradients of two stages, summed over microbatches, the gradients of their inputs, and the split.

    Both stages have the same inputs and cotangents [microbatches, ...]. `actions`, `microbatch` [ticks, stages]: F, B
    and W are 0, 1 and 2. Values that outlive a tick are in buffers with a slot for each microbatch.
    """
    unsplit, splits = StagePullback(stage), []

    def put(buffers, slot, values):
        return [buffer.at[slot].set(value) for buffer, value in zip(buffers, values, strict=True)]

    def accumulate(grads, some):
        return jax.tree.map(lambda total, g: total if g is None else total + g, grads, some)

    def run(params, x, dy):
        params = jax.tree.map(lambda p: p[0], params)
        _, residual_shapes = jax.eval_shape(unsplit.forward, params, x[0])
        parts = split_backward(unsplit.pullback, residual_shapes, params, dy[0])
        splits.append(parts)

        def tick(carry, now):
            action, slot = (row[lax.axis_index("pipeline")] for row in now)

            def forward(residuals, saved, dx, grads):
                return put(residuals, slot, unsplit.forward(params, x[slot])[1]), saved, dx, grads

            def backward(residuals, saved, dx, grads):
                inputs = [buffer[slot] for buffer in residuals]
                this_dx, values, b_grads = parts.backward_input(inputs, params, dy[slot])
                return residuals, put(saved, slot, values), dx.at[slot].set(this_dx), accumulate(grads, b_grads)

            def weight(residuals, saved, dx, grads):
                inputs = [b[slot] for b in residuals], params, [b[slot] for b in saved], dy[slot]
                return residuals, saved, dx, accumulate(grads, weight_part(parts)(*inputs))

            for number, run in enumerate((forward, backward, weight)):
                carry = run_if(run.__name__, action == number, partial(run, *carry), carry)
            return carry, None

        buffers = [
            [jnp.zeros((len(x), *s.shape), s.dtype) for s in shapes] for shapes in (residual_shapes, parts.saved)
        ]
        first = *buffers, jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, params)
        (_, _, dx, grads), _ = lax.scan(tick, first, (actions, microbatch))
        return jax.tree.map(lambda g: g[None], (grads, dx))

    stage_spec, replicated = PartitionSpec("pipeline"), PartitionSpec()
    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(stage_spec, replicated, replicated),
        out_specs=stage_spec,
        axis_names={"pipeline"},
        check_vma=False,
    )
    return jax.jit(mapped)(params, x, dy), splits[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, CAPACITY], ids=["dense", "experts"])
def test_b_and_w_in_different_ticks_on_a_mesh(options: dict):
    """Two stages of two microbatches, each on a mesh of four devices; experts on several are in a shard_map."""
    mesh = jax.make_mesh((2, 2, 2), ("pipeline", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    rules = {
        "batch": ("data",), "embed": () if options else ("data",), "expert": ("data",), "heads": ("model",),
        "kv_heads": ("model",), "mlp": ("model",), "sequence": ("model",),
    }  # fmt: skip
    plain, layers, _ = decoder("fp32", "full", layers=2, **options)
    placed, _, _ = decoder("fp32", "full", Sharder(mesh, rules).without_axis("pipeline"), layers=2, **options)
    only = (lambda stage: lambda params, x: stage(params, x)[0]) if options else (lambda stage: stage)
    params = jax.tree.map(lambda p: jnp.stack([p, -p]), layers)
    x, dy = normal(5, 2, 4, 16, 32), normal(6, 2, 4, 16, 32)
    actions = np.array([[0, 0, 1, 1, 2, 2], [0, 1, 0, 2, 1, 2]], np.int32).T
    microbatch = np.array([[0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 1, 1]], np.int32).T
    actual, parts = in_ticks(mesh, only(placed), params, x, dy, actions, microbatch)

    def unsharded(params):
        grads, dx = zip(*(jax.vjp(only(plain), params, x[i])[1](dy[i]) for i in range(2)))
        return jax.tree.map(jnp.add, *grads), jnp.stack(dx)

    compare(actual, jax.jit(lambda params: lax.map(unsharded, params))(params), 1e-5)
    # [layers, devices, experts of a device, rows, half of the width]: the cotangents of hidden activations.
    assert ((2, 4, 2, 64, 12) in [x.shape for x in parts.saved]) == bool(options)


def test_the_minimum_cut():
    rng = np.random.default_rng(0)
    for _ in range(40):
        nodes, graph = 7, Graph()
        for _ in range(nodes - 2):
            graph.add_node()
        edges = [(*rng.choice(nodes, 2, replace=False).tolist(), int(rng.integers(1, 9))) for _ in range(16)]
        for edge in edges:
            graph.add_edge(*edge)

        def cost(sinks, edges=edges):
            return sum(c for start, end, c in edges if start not in sinks and end in sinks)

        free = [n for n in range(nodes) if n not in (SOURCE, SINK)]
        sides = [{SINK, *(n for n, is_in in zip(free, bits) if is_in)} for bits in product((0, 1), repeat=len(free))]
        least = min(map(cost, sides))
        best = [side for side in sides if cost(side) == least]
        assert graph.sink_side() == min(best, key=len)
