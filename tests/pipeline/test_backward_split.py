"""A pull-back in two parts: the same gradients, no work twice, and no more kept between them than theory says."""

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

from jaxtrain.config.schema import Config
from jaxtrain.losses.load_balancing import router_z_loss
from jaxtrain.models.model_def import define_model, make_env
from jaxtrain.nn.rope import frequencies, rotation
from jaxtrain.nn.stack import scan
from jaxtrain.pipeline.backward_split import SplitBackward, split
from jaxtrain.pipeline.min_cut import SINK, SOURCE, Graph
from jaxtrain.pipeline.stage import once
from jaxtrain.sharding.rules import BATCH, SEQUENCE
from jaxtrain.sharding.sharder import Sharder

B, T, D, F, L = 2, 8, 16, 32, 3
REMATS = ("none", "full", "dots", ("attention", "residual"))


class Taken:
    """A stage's derivative taken apart: residuals that are parameters are given, the others kept."""

    def __init__(self, stage):
        self.stage = stage

    def forward(self, params, x):
        """(y, kept)"""
        y, pull = jax.vjp(self.stage, params, x)
        leaves, self.tree = jax.tree.flatten(pull)
        known = jax.tree.leaves(params)
        self.source = [next((i for i, own in enumerate(known) if own is leaf), None) for leaf in leaves]
        return y, [leaf for leaf, i in zip(leaves, self.source) if i is None]

    def pull(self, kept, given, dy):
        rest, known = iter(kept), jax.tree.leaves(given)
        return jax.tree.unflatten(self.tree, [next(rest) if i is None else known[i] for i in self.source])(dy)


def weights_of(cut: SplitBackward):
    """W as a function of all that is there."""

    def weights(kept, given, between, dy):
        return cut.w([kept[i] for i in cut.kept], given, between, [jax.tree.leaves(dy)[i] for i in cut.dy])

    return weights


def check(stage, params, x, tight: float = 1e-6):
    """That B and W, compiled apart, give what the pull-back gives, by the same matmuls.

    Returns the split, what the forward pass keeps, and FLOPs of all matmuls, of those of B, and of those of W.
    """
    taken = Taken(stage)
    y, kept = jax.jit(taken.forward)(params, x)
    keys = iter(jax.random.split(jax.random.key(9), 9))
    dy = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), y)
    cut = split(taken.pull, kept, params, dy)
    dx, between, early = jax.jit(cut.b)(kept, params, dy)
    late = jax.jit(weights_of(cut))(kept, params, between, dy)
    own = jax.tree.map(lambda _, *two: next(x for x in two if x is not None), params, early, late), dx
    assert [(x.shape, x.dtype) for x in between] == [(x.shape, x.dtype) for x in cut.between]
    compare(own, jax.jit(taken.pull)(kept, params, dy), tight)
    whole, b = (matmuls(fn, kept, params, dy) for fn in (taken.pull, cut.b))
    w = matmuls(weights_of(cut), kept, params, between, dy)
    assert b + w == whole
    return cut, kept, (whole, b, w)


def compare(own: Any, expected: Any, tight: float):
    for one, other in zip(jax.tree.leaves(own), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, rtol=0, atol=tight * np.abs(other).max())


def matmuls(fn, *args) -> int:
    """FLOPs of a function's matmuls, those of a loop as often as it runs, those of a map on one device."""

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
def test_a_layer_keeps_the_inputs_of_its_matmuls_and_their_cotangents_and_nothing_else(remat: str):
    policies = jax.checkpoint_policies
    policy = {"none": policies.everything_saveable, "dots": policies.dots_with_no_batch_dims_saveable, "full": None}
    step = jax.checkpoint(lambda x, w: (layer(w, x), None), policy=policy[remat])
    cut, kept, (whole, b, w) = check(lambda params, x: lax.scan(step, x, params)[0], PARAMS, X)
    forward = 2 * 2 * B * T * D * F * L
    assert w == forward  # the weights' gradients alone
    assert b == whole - w == forward * (1.5 if remat == "full" else 1)
    ends, inner = L * B * T * D * 4, L * B * T * F * 4  # bytes of x, or of hidden values, in all layers
    assert nbytes([*(kept[i] for i in cut.kept), *cut.between]) == 2 * ends + 2 * inner
    # What F keeps is not copied: x, and the hidden values unless they are computed again.
    assert nbytes(cut.between) == ends + inner * (2 if remat == "full" else 1)
    assert cut.dy == ()


def test_layers_in_a_python_loop_take_the_cotangent_from_the_caller():
    def stage(params, x):
        for index in range(L):
            x = layer(jax.tree.map(lambda w, i=index: w[i], params), x)
        return x

    cut, *_ = check(stage, PARAMS, X)
    assert cut.dy == (0,)
    assert nbytes(cut.between) == (L - 1) * X.nbytes + L * B * T * F * 4


def test_casts_of_weights_are_done_again_and_sums_are_done_early():
    def norm(x, scale):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * scale

    def step(x, w):
        up, down = (w[name].astype(jnp.bfloat16) for name in ("up", "down"))
        return x + jax.nn.silu(norm(x, w["scale"]).astype(jnp.bfloat16) @ up) @ down, None

    params = PARAMS | {"scale": 1 + normal(3, L, D)}
    x = X.astype(jnp.bfloat16)
    cut, *_ = check(lambda params, x: lax.scan(jax.checkpoint(step), x, params)[0], params, x, 2**-8)
    # Not the cotangent behind the norm, which is as big as x: B makes the scale's gradient of it.
    assert cut.early == (1,)
    assert sorted(x.shape[-1] for x in cut.between) == [D, D, F, F]
    assert {x.dtype.name for x in cut.between} == {"bfloat16"}


def test_what_is_gathered_is_kept_before_that():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    places = [NamedSharding(mesh, PartitionSpec(None, axis)) for axis in ("model", None)]

    def stage(w, x):
        step = jax.checkpoint(lambda w, x: lax.with_sharding_constraint(jnp.cumsum(x, -1), places[1]) @ w)
        return lax.with_sharding_constraint(step(w, x), places[0])

    x = jax.device_put(X, places[0])
    cut, kept, _ = check(stage, normal(0, D, F), x)
    jaxpr = jax.make_jaxpr(weights_of(cut))(kept, PARAMS["up"][0], cut.between, jnp.zeros((B, T, F))).jaxpr
    gathers = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]
    assert X.shape in [eqn.outvars[0].aval.shape for eqn in gathers]


def test_what_only_w_needs_of_the_forward_pass_is_computed_again_in_b():
    def step(x, w):
        return x + (jnp.tanh(x @ w["up"]) @ w["square"]) @ w["down"], None  # B does not need what `down` multiplies

    params = PARAMS | {"square": normal(4, L, F, F)}
    _, _, (_, _, w) = check(lambda params, x: lax.scan(jax.checkpoint(step), x, params)[0], params, X)
    assert w == 2 * B * T * (2 * D * F + F * F) * L


def test_what_all_iterations_read_is_kept_once():
    def stage(params, x):
        total = jnp.cumsum(x, 1)
        step = jax.checkpoint(lambda x, w: (x + jnp.tanh(total[..., : D // 2] @ w), None))
        return lax.scan(step, x, params)[0]

    cut, kept, _ = check(jax.checkpoint(stage), normal(0, L, D // 2, D), X)
    assert X.shape in [x.shape for x in cut.between]
    assert (L, B, T, D // 2) not in [x.shape for x in (*kept, *cut.between)]


def test_a_gradient_that_is_kept_for_another_one_too_is_not_handed_out_early():
    def step(x, w):
        return layer(w, x) + w["shift"], None

    params = PARAMS | {"shift": normal(4, L, B, T, D)}
    cut, *_ = check(lambda params, x: lax.scan(step, x, params)[0], params, X)
    assert cut.early == ()
    assert len(cut.between) == 2


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
    cut, *_ = check(stage, {"own": own, "shared": normal(2, D, D)}, X)
    assert (2, L, B, T, F) in [x.shape for x in cut.between]


def test_branches_and_loops_without_a_length_are_in_b():
    def stage(params, x):
        x = lax.cond(x[0, 0, 0] > 0, lambda: layer(params, x), lambda: x)
        rows = lax.while_loop(lambda n: n < x[0, 0, 0], lambda n: n + 1, jnp.float32(0))
        return jnp.tanh(x @ params["up"]) * rows

    x = jnp.abs(X)
    _, _, (whole, b, w) = check(stage, jax.tree.map(lambda w: w[0], PARAMS), x)
    assert w == 2 * B * T * D * F
    assert whole == b + w


def test_named_values_and_a_custom_rule():
    @jax.custom_vjp
    def rule(w, x):
        return x @ w

    def back(kept, g):
        return jnp.einsum("bti,bto->io", kept[1], 2 * g), g @ kept[0].T

    rule.defvjp(lambda w, x: (x @ w, (w, x)), back)

    def step(x, w):
        return x + rule(w["down"], checkpoint_name(jax.nn.gelu(rule(w["up"], x)), "hidden")), None

    policy = jax.checkpoint_policies.save_only_these_names("hidden")
    check(lambda params, x: lax.scan(jax.checkpoint(step, policy=policy), x, params)[0], PARAMS, X)


def test_what_cannot_be_split_is_said():
    ref = jax.new_ref(jnp.zeros(()))

    def counts(kept, given, dy):
        ref[...] += 1.0
        return dy, dy

    with pytest.raises(ValueError, match="must not use Refs"):
        split(counts, [], (), X)

    def closes(x):
        split(lambda kept, given, dy: (dy * x, dy), [], (), X)
        return x

    with pytest.raises(ValueError, match="closes over a traced value"):
        jax.jit(closes)(X)


MODEL = {"embed": 32, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 48, "vocab": 67, "init_std": 0.2}
MOE = {"num_experts": 4, "top_k": 2, "mlp": 24}
CAPACITY = {"moe": MOE | {"capacity_factor": 2.0}}


def decoder(precision: str, remat: Any, sharder: Sharder | None = None, **options):
    """(stage, its parameters, an input): the layers of a decoder, and the router's loss where it has one."""
    cfg = Config(model=MODEL | options, precision=precision, step={"remat": remat})
    env = make_env(cfg, sharder or Sharder())
    model_def = define_model(cfg, env, MODEL["vocab"])
    params = model_def.init(jax.random.key(0))
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
    cut, kept, (_, _, w) = check(stage, params, x)
    weights = [p for p in jax.tree.leaves(params) if p.ndim > 2]
    assert w == 2 * 4 * 16 * sum(p.size for p in weights)
    # Per token and layer: the inputs of 4 matmuls (or what they are cheaply made of) and the cotangents of 7.
    theory = 2 * 4 * 16 * 4 * ((32 + 32 + 32 + 48) + (32 + 16 + 16) + 32 + (48 + 48 + 32))
    assert theory <= nbytes([*(kept[i] for i in cut.kept), *cut.between]) < 1.02 * theory
    assert [jax.tree.leaves(params)[i].ndim for i in cut.early] == [2, 2]  # the norms' scales
    assert not {x.shape for x in cut.between} & {p.shape for p in weights}


@pytest.mark.parametrize(("precision", "remat", "options"), [
    ("bf16", "none", {"sliding_window": 4, "sliding_window_pattern": 2, "layers": 3, "biases": ["qkv"],
    "norm_placement": "sandwich"}),
    ("bf16", "full", {"moe": MOE, "layers": 2}), ("fp32", "none", {"moe": MOE | {"capacity_factor": 0.8,
    "shared_experts": 1}}),
], ids=["windows", "dropless", "capacity"])  # fmt: skip
def test_decoders(precision: str, remat: str, options: dict):
    check(*decoder(precision, remat, **options), 1e-6 if precision == "fp32" else 2**-8)


def in_ticks(mesh, stage, params, x, dy, actions, microbatch):
    """Gradients of each of two stages, added up over microbatches, and of their inputs; and how it was split.

    Both stages see the same inputs and cotangents [microbatches, ...]. `actions`, `microbatch` [ticks, stages]: F, B
    and W are 0, 1 and 2. What lives longer than a tick is in buffers with a slot for each microbatch.
    """
    taken, cuts = Taken(stage), []

    def put(buffers, slot, values):
        return [buffer.at[slot].set(value) for buffer, value in zip(buffers, values, strict=True)]

    def plus(grads, some):
        return jax.tree.map(lambda total, own: total if own is None else total + own, grads, some)

    def run(params, x, dy):
        params = jax.tree.map(lambda p: p[0], params)
        _, kept = jax.eval_shape(taken.forward, params, x[0])
        cut = split(taken.pull, kept, params, dy[0])
        cuts.append(cut)

        def tick(carry, now):
            action, slot = (row[lax.axis_index("pipeline")] for row in now)

            def forward(kept, between, dx, grads):
                return put(kept, slot, taken.forward(params, x[slot])[1]), between, dx, grads

            def backward(kept, between, dx, grads):
                own, values, early = cut.b([buffer[slot] for buffer in kept], params, dy[slot])
                return kept, put(between, slot, values), dx.at[slot].set(own), plus(grads, early)

            def weight(kept, between, dx, grads):
                own = weights_of(cut)([b[slot] for b in kept], params, [b[slot] for b in between], dy[slot])
                return kept, between, dx, plus(grads, own)

            for number, run in enumerate((forward, backward, weight)):
                carry = once(run.__name__, action == number, partial(run, *carry), carry)
            return carry, None

        buffers = [[jnp.zeros((len(x), *s.shape), s.dtype) for s in shapes] for shapes in (kept, cut.between)]
        first = *buffers, jnp.zeros_like(x), jax.tree.map(jnp.zeros_like, params)
        (_, _, dx, grads), _ = lax.scan(tick, first, (actions, microbatch))
        return jax.tree.map(lambda g: g[None], (grads, dx))

    of_stage, none = PartitionSpec("pipeline"), PartitionSpec()
    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(of_stage, none, none), out_specs=of_stage, axis_names={"pipeline"}, check_vma=False
    )
    return jax.jit(mapped)(params, x, dy), cuts[0]


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
    own, cut = in_ticks(mesh, only(placed), params, x, dy, actions, microbatch)

    def alone(params):
        grads, dx = zip(*(jax.vjp(only(plain), params, x[i])[1](dy[i]) for i in range(2)))
        return jax.tree.map(jnp.add, *grads), jnp.stack(dx)

    compare(own, jax.jit(lambda params: lax.map(alone, params))(params), 1e-5)
    # Of layers, devices, a device's experts, rows: the cotangents of hidden activations on half of the width.
    assert ((2, 4, 2, 64, 12) in [x.shape for x in cut.between]) == bool(options)


def test_the_cheapest_cut():
    rng = np.random.default_rng(0)
    for _ in range(40):
        nodes, graph = 7, Graph()
        for _ in range(nodes - 2):
            graph.node()
        edges = [(*rng.choice(nodes, 2, replace=False).tolist(), int(rng.integers(1, 9))) for _ in range(16)]
        for edge in edges:
            graph.edge(*edge)

        def cost(sinks, edges=edges):
            return sum(c for start, end, c in edges if start not in sinks and end in sinks)

        free = [n for n in range(nodes) if n not in (SOURCE, SINK)]
        sides = [{SINK, *(n for n, is_in in zip(free, bits) if is_in)} for bits in product((0, 1), repeat=len(free))]
        least = min(map(cost, sides))
        best = [side for side in sides if cost(side) == least]
        assert graph.sinks() == min(best, key=len)
