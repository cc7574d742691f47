"""Optimizer state has the logical names of its parameters and is sharded like them, on eight simulated devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxtrain.config.schema import OptimizerConfig
from jaxtrain.optim.adafactor import FactoredMoments
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.optim.param_dims import is_names, map_names
from jaxtrain.optim.state_sharding import state_names
from jaxtrain.sharding.sharder import Sharder

NAMES = {
    "embed": {"table": ("vocab", "embed")},
    "layers": {
        "norm": ("layers", None),
        "query": ("layers", "embed", "heads", "head_dim"),
        "square": ("layers", "embed", "mlp"),
        "up": ("layers", "embed", "mlp"),
    },
}
SHAPES = {
    "embed": {"table": (160, 128)},
    "layers": {"norm": (4, 128), "query": (4, 128, 4, 8), "square": (4, 128, 128), "up": (4, 128, 256)},
}
PARAMS = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
RULES = {"embed": ("fsdp",), "vocab": ("model",), "heads": ("model",), "mlp": ("model",)}
OPTIMIZERS = ["adamw", "adafactor", "lion", "sgd", "muon"]


def make(name):
    return make_optimizer(OptimizerConfig(name=name, lr=0.1), lambda step: 0.1, NAMES, PARAMS)


def sharder():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Auto,) * 3)
    return Sharder(mesh, RULES)


def values(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.standard_normal(s.shape).astype(np.float32), PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_leaf_is_named(name):
    tx = make(name)
    state, names = jax.eval_shape(tx.init, PARAMS), state_names(make(name), PARAMS, NAMES)
    assert jax.tree.structure(state) == jax.tree.structure(map_names(lambda n: 0, names))
    for leaf, n in zip(jax.tree.leaves(state), jax.tree.leaves(names, is_leaf=is_names)):
        assert len(n) == len(leaf.shape)
        assert leaf.size <= 4 or any(n)  # only scalars and placeholders are unnamed


def test_adam_moments_have_the_names_of_the_parameters():
    adam = state_names(make("adamw"), PARAMS, NAMES)[0]
    assert adam.mu == NAMES
    assert adam.nu == NAMES
    assert adam.count == ()


def test_muon_moments():
    names = state_names(make("muon"), PARAMS, NAMES)
    inner = names[0].inner_states
    muon, adam = inner["muon"].inner_state[0], inner["adam"].inner_state
    assert muon.mu["layers"]["query"] == NAMES["layers"]["query"]
    assert isinstance(muon.mu["embed"]["table"], optax.MaskedNode)
    assert adam.nu["embed"]["table"] == ("vocab", "embed")
    assert isinstance(adam.nu["layers"]["up"], optax.MaskedNode)


def test_factored_moments_drop_the_reduced_dim():
    state = state_names(make("adafactor"), PARAMS, NAMES)[0]
    assert isinstance(state, FactoredMoments)
    layers = "layers"
    assert state.v_row[layers]["up"] == (layers, "embed")
    assert state.v_col[layers]["up"] == (layers, "mlp")
    assert state.v[layers]["up"] == (layers, None)
    assert {state.v_row[layers]["square"], state.v_col[layers]["square"]} == {(layers, "embed"), (layers, "mlp")}
    assert state.v_row["embed"]["table"] == ("embed",)
    assert state.v_col["embed"]["table"] == ("vocab",)
    assert state.v[layers]["norm"] == (layers, None)
    assert state.v_row[layers]["query"] == (layers, None)  # no two dims of 128: kept whole
    assert state.v[layers]["query"] == NAMES[layers]["query"]


def test_square_factored_moments_follow_the_data():
    """Names alone can not tell rows from columns of a square matrix: check against the values."""
    grads = jax.tree.map(lambda s: jnp.ones(s.shape), PARAMS)
    grads["layers"]["square"] *= jnp.arange(1.0, 129.0)[:, None]  # varies along embed
    tx = make("adafactor")
    state = jax.jit(lambda g: tx.update(g, tx.init(g), g)[1][0])(grads)
    names = state_names(tx, PARAMS, NAMES)[0]
    for moment, n in [(state.v_row, names.v_row), (state.v_col, names.v_col)]:
        varies = float(jnp.std(moment["layers"]["square"][0])) > 1
        assert varies == (n["layers"]["square"] == ("layers", "embed"))


def test_any_optax_chain():
    tx = optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.ema(0.9))
    names = state_names(tx, PARAMS, NAMES)
    assert names[1][0].mu == NAMES
    assert names[2].ema == NAMES


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sharded_update_equals_single_device(name):
    tx, sh = make(name), sharder()
    place = map_names(sh.sharding, NAMES)
    place_state = map_names(sh.sharding, state_names(tx, PARAMS, NAMES))
    params, grads = values(0), values(1)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    want_params, want_state = jax.jit(step)(params, tx.init(params), grads)
    got = jax.device_put(params, place)
    state = jax.jit(tx.init, out_shardings=place_state)(got)
    got, state = jax.jit(step, out_shardings=(place, place_state))(got, state, jax.device_put(grads, place))
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state, place_state))
    big = [x for x in jax.tree.leaves(state) if x.size > 4 * 128]
    assert all(x.addressable_shards[0].data.size < x.size for x in big)
    tolerance = {"rtol": 1e-5, "atol": 2e-5 if name == "muon" else 1e-6}
    for a, b in zip(jax.tree.leaves((got, state)), jax.tree.leaves((want_params, want_state))):
        np.testing.assert_allclose(a, b, **tolerance)
