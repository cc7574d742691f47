"""Any optimizer on stacked parameters against plain optax on the parameters of single layers."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_optimizers
import pytest
from optax import contrib

from jaxtrain.config.schema import OptimizerConfig, ScheduleConfig
from jaxtrain.errors import UserError
from jaxtrain.optim.any_optax import evaluation_parameters, on_stacked_layers
from jaxtrain.optim.layer_stack import is_elementwise
from jaxtrain.optim.optimizers import make_optimizer
from jaxtrain.optim.param_dims import is_names, map_names
from jaxtrain.optim.schedules import make_schedule
from jaxtrain.optim.state_sharding import state_names

L = 3
NAMES = {
    "embed": {"table": ("vocab", "embed")},
    "layers": {"norm": ("layers", None), "up": ("layers", "embed", "mlp")},
}
SHAPES = {"embed": {"table": (12, 8)}, "layers": {"norm": (L, 8), "up": (L, 8, 16)}}
PARAMS = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
IS_STACKED = map_names(lambda n: n[0] == "layers", NAMES)


def matrices_only(params):
    """The usual mask of weight decay, by the number of dims."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


WHOLE = {  # treat elements one by one
    "adam": optax.adam(1e-2), "adamw": optax.adamw(1e-2), "yogi": optax.yogi(1e-2), "lion": optax.lion(1e-2),
    "rmsprop": optax.rmsprop(1e-2), "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 4), momentum=0.9),
    "ademamix": contrib.ademamix(1e-2), "adopt": contrib.adopt(1e-2),
    "schedule_free": contrib.schedule_free_adamw(1e-2, warmup_steps=2),
}  # fmt: skip
APART = {
    "lamb": optax.lamb(1e-2, weight_decay=0.1), "lars": optax.lars(1e-2), "adafactor": optax.adafactor(1e-2),
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=8), "novograd": optax.novograd(1e-2),
    "prodigy": contrib.prodigy(1.0), "dadapt": contrib.dadapt_adamw(1.0), "muon": contrib.muon(1e-2),
    "momo": contrib.momo(1.0), "dog": contrib.dog(1.0), "sm3": optax.sm3(1e-2),
    "masked": optax.adamw(1e-2, weight_decay=0.5, mask=matrices_only),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "plateau": optax.chain(optax.sgd(1e-2), contrib.reduce_on_plateau(patience=1, cooldown=0)),
    "own factored": own_optimizers.factored(1e-2), "kronecker": own_optimizers.kronecker(1e-2),
    "norms": own_optimizers.norm_scaled(1e-2),
}  # fmt: skip


def values(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape), jnp.float32), PARAMS)


def unstacked(tree):
    layers = {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], tree["layers"]) for i in range(L)}
    return {"embed": tree["embed"], **layers}


def stacked(tree):
    layers = [tree[f"layer_{i}"] for i in range(L)]
    return {"embed": tree["embed"], "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers)}


def trained(tx, params, take, steps=5):
    """Parameters after some steps, and the state."""
    tx = optax.with_extra_args_support(tx)

    @jax.jit
    def step(params, state, grads, loss):
        updates, state = tx.update(grads, state, params, value=loss, grad=grads)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for i in range(steps):
        params, state = step(params, state, take(values(10 + i)), jnp.float32(3.0 - 0.1 * (i % 2)))
    return params, state


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*WHOLE, *APART])
def test_stacked_layers_train_as_single_ones(name):
    tx = {**WHOLE, **APART}[name]
    want, _ = trained(tx, unstacked(values(0)), unstacked)
    wrapped = on_stacked_layers(tx, NAMES, PARAMS)
    got, state = trained(wrapped, values(0), lambda grads: grads)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(stacked(want))):
        np.testing.assert_allclose(a, b, rtol=2e-4 if name in ("muon", "kronecker") else 2e-6, atol=1e-6)
    moved = [float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(values(0)))]
    assert min(moved) > 1e-6
    abstract = jax.eval_shape(wrapped.init, PARAMS)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    names = jax.tree.leaves(state_names(wrapped, PARAMS, NAMES), is_leaf=is_names)
    assert [len(n) for n in names] == [x.ndim for x in jax.tree.leaves(state)]


def test_only_those_that_need_it_are_taken_apart():
    found = {name: is_elementwise(optax.with_extra_args_support(tx), IS_STACKED, PARAMS)
             for name, tx in {**WHOLE, **APART}.items()}  # fmt: skip
    assert found == {**dict.fromkeys(WHOLE, True), **dict.fromkeys(APART, False)}


def test_a_constant_made_of_the_shape_is_seen():
    by_width = optax.stateless(lambda updates, _: jax.tree.map(lambda g: g / g.shape[0], updates))
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    for tx in (by_width, noise):
        assert not is_elementwise(optax.with_extra_args_support(tx), IS_STACKED, PARAMS)


def test_stored_state_is_stacked_and_named():
    names = state_names(on_stacked_layers(APART["kronecker"], NAMES, PARAMS), PARAMS, NAMES)
    assert names["layers"]["up"] == [("layers", "inferred", None), ("layers", "inferred", None)]
    assert names["embed"]["table"] == [("inferred", None), ("inferred", None)]
    lamb = state_names(on_stacked_layers(APART["lamb"], NAMES, PARAMS), PARAMS, NAMES)
    assert lamb[0].mu == NAMES
    norms = on_stacked_layers(APART["norms"], NAMES, PARAMS)
    assert len(jax.eval_shape(norms.init, PARAMS).norms) == 1 + 2 * L


def test_schedule_free_weights_are_those_of_optax():
    tx = optax.chain(optax.clip_by_global_norm(1.0), WHOLE["schedule_free"])
    params, state = trained(tx, unstacked(values(0)), unstacked)
    want = contrib.schedule_free_eval_params(state[1], params)
    got_params, got_state = trained(on_stacked_layers(tx, NAMES, PARAMS), values(0), lambda grads: grads)
    got = evaluation_parameters(got_state, got_params)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(stacked(want))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert evaluation_parameters((), got_params) is got_params


def make(name, lr=0.01, **options):
    config = OptimizerConfig(name=name, lr=lr, options=options)
    return make_optimizer(config, make_schedule(lr, ScheduleConfig(name="constant"), 10), NAMES, PARAMS)


def test_by_name():
    want, _ = trained(optax.lamb(0.01, b1=0.8), unstacked(values(0)), unstacked)
    got, _ = trained(make("optax.lamb", b1=0.8), values(0), lambda grads: grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, stacked(want))
    want, _ = trained(contrib.prodigy(0.5), unstacked(values(0)), unstacked)
    got, _ = trained(make("optax.contrib.prodigy", learning_rate=0.5), values(0), lambda grads: grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), got, stacked(want))
    make("own_optimizers:kronecker", learning_rate=0.1)


def returning(init=lambda params: (), update=lambda grads, state, params=None: (grads, state)):
    return lambda: optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
    ("make_one", "said"),
    [
        (lambda: optax.lbfgs(), "optimizer: its `update` fails: it searches along a line, which needs the loss as a "),
        (returning(init=lambda params: {"name": "mine"}), r"optimizer: its state\['name'\] is str; expected a tree of"),
        (returning(init=lambda params: {}["rate"]), "optimizer: its `init` fails: KeyError: 'rate'"),
        (returning(update=lambda g, s, p=None: (g["embed"], s)), "optimizer: its update returns updates of another"),
        (returning(update=lambda g, s, p=None: (jax.tree.map(jnp.sum, g), s)), r"of shape \(\); expected \(12, 8\)"),
        (lambda: 3.0, "optimizer.name: wrong:make returns float; expected a GradientTransformation"),
    ],
)
def test_wrong_ones_are_refused_in_one_line(monkeypatch, make_one, said):
    monkeypatch.setitem(sys.modules, "wrong", SimpleNamespace(make=make_one))
    with pytest.raises(UserError, match=said) as caught:
        make("wrong:make")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("optax.lam", {}, "optimizer.name: there is no `optax.lam` .did you mean `lamb`"),
        ("optax.contrib.nothing", {}, "optimizer.name: there is no `optax.contrib.nothing`"),
        ("optax.lamb", {"beta": 1}, "optimizer.options: optax.lamb fails: TypeError: .*'beta'"),
        ("nowhere:make", {}, "optimizer.name: nowhere:make: no module `nowhere`"),
        (
            "optax.adamw",
            {"mask": "matrices"},
            "optimizer.options.mask: expected a function of the parameters as `package.module:function`; found",
        ),
        ("optax.adamw", {"mask": "nowhere:mask"}, "optimizer.options.mask: nowhere:mask: no module `nowhere`"),
    ],
)
def test_wrong_names(name, options, said):
    with pytest.raises(UserError, match=said):
        make(name, **options)


def test_an_option_may_name_a_function(monkeypatch):
    """The mask of the weight decay is the named function; as a text, optax would decay everything."""
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(matrices=matrices_only))
    zeros = jax.tree.map(jnp.zeros_like, values(0))
    tx = make("optax.adamw", weight_decay=0.5, mask="mine:matrices")
    updates, _ = tx.update(zeros, tx.init(values(0)), values(0), value=jnp.float32(0), grad=zeros)
    assert not np.any(updates["layers"]["norm"])
    assert np.all(updates["layers"]["up"])


def test_schedules_by_name():
    options = {"init_value": 0.0, "peak_value": 0.1, "warmup_steps": 4, "decay_steps": 20}
    config = ScheduleConfig(name="optax.warmup_cosine_decay_schedule", options=options)
    want = optax.warmup_cosine_decay_schedule(**options)
    got = make_schedule(3e-4, config, 20)
    assert [float(got(step)) for step in range(20)] == [float(want(step)) for step in range(20)]


def test_a_schedule_that_returns_a_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "wrong", SimpleNamespace(make=lambda: lambda step: "fast"))
    with pytest.raises(UserError, match=r"schedule\.name: wrong:make fails at a step: TypeError"):
        make_schedule(1e-3, ScheduleConfig(name="wrong:make"), 10)
