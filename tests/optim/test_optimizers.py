"""Every optimizer on stacked parameters against NumPy float64 on each layer by itself."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_optim as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.schema import OptimizerConfig, ScheduleConfig
from jaxtrain.errors import UserError
from jaxtrain.optim.adafactor import scale_by_adafactor
from jaxtrain.optim.optimizers import (
    clip_by_global_norm,
    ema_init,
    ema_update,
    make_optimizer,
    uses_muon,
    with_float32_arithmetic,
)
from jaxtrain.optim.param_dims import is_matrix, matrix_dims, num_stacked_dims
from jaxtrain.optim.schedules import make_schedule

L, D, H, K, F, V = 3, 128, 2, 16, 160, 130
TREE = {
    "embed": {"table": (("vocab", "embed"), (V, D))},
    "layers": {
        "norm": (("layers", None), (L, D)),
        "query": (("layers", "embed", "heads", "head_dim"), (L, D, H, K)),
        "query_bias": (("layers", "heads", "head_dim"), (L, H, K)),
        "out": (("layers", "heads", "head_dim", "embed"), (L, H, K, D)),
        "up": (("layers", "embed", "mlp"), (L, D, F)),
        "experts": (("layers", "expert", "mlp", "embed"), (L, 2, F, D)),
    },
    "head": (("embed", "vocab"), (D, V)),
}
IS_ENTRY = lambda x: isinstance(x, tuple)  # noqa: E731
NAMES = jax.tree.map(lambda e: e[0], TREE, is_leaf=IS_ENTRY)
SHAPES = jax.tree.map(lambda e: jax.ShapeDtypeStruct(e[1], jnp.float32), TREE, is_leaf=IS_ENTRY)
MATRICES = {"query", "out", "up", "experts", "head"}
AS_MATRIX = {"query": (D, H * K), "out": (H * K, D), "up": (D, F), "experts": (F, D)}


def random_tree(seed: int, scale: float = 1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: (scale * rng.standard_normal(s.shape)).astype(np.float32), SHAPES)


def config(name: str, **kwargs) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=0.01, weight_decay=0.3, epsilon=1e-6, betas=(0.9, 0.98), **kwargs)


def rate(steps: int):
    return make_schedule(0.01, ScheduleConfig(warmup_steps=2), steps)


def run(tx, params, grads):
    state = tx.init(params)
    step = jax.jit(lambda p, s, g: (lambda u, s: (optax.apply_updates(p, u), s))(*tx.update(g, s, p)))
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def expected(cfg, name, names, p, grads, steps):
    """The reference applied to each unstacked parameter in float64."""
    leading = num_stacked_dims(names)
    rule = getattr(reference, cfg.name)
    if cfg.name == "muon":
        rule = partial(rule, matrix=AS_MATRIX[name]) if name in AS_MATRIX else reference.adamw
    wd = cfg.weight_decay if cfg.decay_all_parameters or name in MATRICES else 0.0
    lr = lambda t: float(rate(steps)(t))  # noqa: E731
    out = np.empty(p.shape)
    for index in np.ndindex(p.shape[:leading]):
        one = [g[index].astype(np.float64) for g in grads]
        out[index] = rule(p[index].astype(np.float64), one, lr, *cfg.betas, cfg.epsilon, wd)
    return out


@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_against_numpy(name, decay_all):
    cfg, steps = config(name, decay_all_parameters=decay_all), 5
    params, grads = random_tree(0, 0.5), [random_tree(i + 1, 10.0 ** (i - 2)) for i in range(steps)]
    actual, _ = run(make_optimizer(cfg, rate(steps), NAMES, SHAPES), params, grads)
    atol = 2e-5 if name == "muon" else 2e-6  # five Newton-Schulz steps multiply rounding errors
    for path, names in jax.tree_util.tree_leaves_with_path(NAMES, is_leaf=IS_ENTRY):
        leaf = lambda tree, path=path: np.asarray(dict(jax.tree_util.tree_leaves_with_path(tree))[path])  # noqa: E731
        wanted = expected(cfg, path[-1].key, names, leaf(params), [leaf(g) for g in grads], steps)
        np.testing.assert_allclose(leaf(actual), wanted, rtol=2e-5, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_adafactor_with_more_layers_than_width_factors_within_layers():
    names, shape = {"w": ("layers", "embed", "mlp")}, (40, 8, 12)
    rng = np.random.default_rng(0)
    grads = [{"w": rng.standard_normal(shape).astype(np.float32)} for _ in range(3)]
    stacked, single = scale_by_adafactor(names, minimum=4), scale_by_adafactor({"w": names["w"][1:]}, minimum=4)
    state = stacked.init(grads[0])
    assert state.v_row["w"].shape == (40, 8)
    assert state.v_col["w"].shape == (40, 12)
    assert state.v["w"].shape == (40, 1)
    states = [single.init(jax.tree.map(lambda x, i=i: x[i], grads[0])) for i in range(40)]
    for g in grads:
        scaled, state = stacked.update(g, state)
        for i in (0, 7, 39):
            one, states[i] = single.update({"w": g["w"][i]}, states[i])
            np.testing.assert_allclose(scaled["w"][i], one["w"], rtol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd", "muon"])
def test_bf16_pure_stores_bf16_and_computes_in_float32(name):
    """Parameters, moments and gradients in bfloat16; one step rounds once, from a float32 result."""
    cfg = config(name)
    to = lambda dtype, tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)  # noqa: E731
    params, grads = to(jnp.bfloat16, random_tree(0, 0.5)), to(jnp.bfloat16, random_tree(1))
    tx = make_optimizer(cfg, rate(10), NAMES, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    state = tx.init(params)
    moments = [x for x in jax.tree.leaves(state) if x.size > 3]
    assert moments
    assert all(x.dtype == jnp.bfloat16 for x in moments)
    update = jax.jit(tx.update)
    updates, after = update(grads, state, params)
    assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]
    full, _ = update(to(jnp.float32, grads), tx.init(to(jnp.float32, params)), to(jnp.float32, params))
    new, wanted = optax.apply_updates(params, updates), optax.apply_updates(to(jnp.float32, params), full)
    for actual, exact in zip(jax.tree.leaves(new), jax.tree.leaves(wanted)):
        assert actual.dtype == jnp.bfloat16
        np.testing.assert_array_equal(
            np.asarray(actual, np.float32), np.asarray(exact.astype(jnp.bfloat16), np.float32)
        )


def test_float32_arithmetic_changes_nothing_in_float32():
    params, grads = random_tree(0), random_tree(1)
    plain = optax.adam(1e-3)
    for a, b in zip(
        jax.tree.leaves(run(plain, params, [grads])),
        jax.tree.leaves(run(with_float32_arithmetic(plain), params, [grads])),
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("names", "matrix", "orthogonal", "sides"),
    [
        (("layers", "embed", "heads", "head_dim"), True, True, ((1,), (2, 3))),
        (("layers", "embed", "kv_heads", "head_dim"), True, True, ((1,), (2, 3))),
        (("layers", "heads", "head_dim", "embed"), True, True, ((1, 2), (3,))),
        (("layers", "embed", "mlp"), True, True, ((1,), (2,))),
        (("layers", "expert", "embed", "mlp"), True, True, ((2,), (3,))),
        (("layers", "embed", "expert"), True, True, ((1,), (2,))),
        (("embed", None, "mlp"), True, True, ((0,), (1, 2))),
        ((None, None, None, "out"), True, True, ((0, 1, 2), (3,))),
        (("embed", "vocab"), True, False, ((0,), (1,))),
        (("vocab", "embed"), False, False, None),
        ((None, "table"), False, False, None),
        (("layers", "heads", "head_dim"), False, False, None),
        (("layers", "expert", "mlp"), False, False, None),
        (("layers", None), False, False, None),
        ((), False, False, None),
    ],
)
def test_roles_of_dims(names, matrix, orthogonal, sides):
    assert is_matrix(names) == matrix
    assert uses_muon(names) == orthogonal
    if sides:
        assert matrix_dims(names) == sides


def test_names_of_the_wrong_length():
    with pytest.raises(ValueError, match=r"parameter a\.b: 1 logical names \('embed',\) for shape \(2, 3\)"):
        make_optimizer(
            config("adamw"), rate(1), {"a": {"b": ("embed",)}}, {"a": {"b": jax.ShapeDtypeStruct((2, 3), jnp.float32)}}
        )


@settings(max_examples=50)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 100))
def test_clip(scale, limit, seed):
    grads = random_tree(seed, scale)
    small = {"a": jnp.asarray(grads["layers"]["norm"], jnp.bfloat16), "b": jnp.asarray(grads["head"])}
    clipped, norm = clip_by_global_norm(small, limit)
    flat = np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(small)])
    true = np.linalg.norm(flat)
    assert norm.dtype == jnp.float32
    assert float(norm) == pytest.approx(true, rel=1e-5)
    for x, y in zip(jax.tree.leaves(small), jax.tree.leaves(clipped)):
        assert x.dtype == y.dtype
        wanted = np.asarray(x, np.float64) * min(1, limit / true)
        np.testing.assert_allclose(np.asarray(y, np.float64), wanted, rtol=2**-8 if x.dtype == jnp.bfloat16 else 1e-5)


def test_clip_below_the_limit_is_exact_and_none_only_measures():
    grads = {"w": jnp.array([0.3, -0.4])}
    np.testing.assert_array_equal(clip_by_global_norm(grads, 0.6)[0]["w"], grads["w"])
    same, norm = clip_by_global_norm(grads, None)
    assert same["w"] is grads["w"]
    assert float(norm) == pytest.approx(0.5)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_clip_shows_a_norm_that_is_not_finite(bad):
    clipped, norm = clip_by_global_norm({"w": jnp.array([1.0, bad])}, 1.0)
    assert not np.isfinite(norm)
    assert np.isnan(clipped["w"]).all()


def test_ema():
    params = {"w": jnp.asarray([1.0, 2.0], jnp.bfloat16)}
    ema, wanted = ema_init(params), np.array([1.0, 2.0])
    assert ema["w"].dtype == jnp.float32
    for k in range(200):
        new = np.array([1.5, -k % 3], np.float64)
        ema = ema_update(ema, {"w": jnp.asarray(new, jnp.bfloat16)}, 0.999)
        wanted = 0.999 * wanted + 0.001 * new
    np.testing.assert_allclose(ema["w"], wanted, rtol=1e-5)


def test_groups_have_their_learning_rate_and_decay():
    groups = ({"match": ["vocab"], "lr_factor": 0.1, "weight_decay": 0.7}, {"match": [".*/norm"], "weight_decay": 0.2})
    cfg, plain = config("adamw", groups=groups), config("adamw")
    params, grads = random_tree(0, 0.5), [random_tree(1)]
    got, base = (run(make_optimizer(c, rate(1), NAMES, SHAPES), params, grads)[0] for c in (cfg, plain))
    lr = float(rate(1)(0))
    for path, names in jax.tree_util.tree_leaves_with_path(NAMES, is_leaf=IS_ENTRY):
        p, g, b = (dict(jax.tree_util.tree_leaves_with_path(tree))[path] for tree in (params, got, base))
        decay = plain.weight_decay if path[-1].key in MATRICES else 0.0
        direction = (p - b) / lr - decay * p
        factor, own = (0.1, 0.7) if "vocab" in names else (1.0, 0.2 if path[-1].key == "norm" else decay)
        np.testing.assert_allclose(g, p - factor * lr * (direction + own * p), rtol=1e-5, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize("match", [["nothing"], []])
def test_a_group_without_parameters(match):
    with pytest.raises(UserError, match=r"optimizer\.groups\.0\.match: .*such as embed.*or a logical name, such as "):
        make_optimizer(config("adamw", groups=({"match": match},)), rate(1), NAMES, SHAPES)
