"""Plain Flax modules: the same on every layout, after a resume, and in a loop of flax and optax alone."""

from __future__ import annotations

import zlib
from functools import cache

import conformance
import jax
import jax.numpy as jnp
import linen_modules
import nnx_modules
import numpy as np
import optax
import pytest
from conformance import FUNCTION, LAYOUTS, MODULES
from flax import nnx
from selection import one_in

STEPS = 20
CASES = {"ddp": 2, "fsdp": 1, "zero1": 2, "zero2": 1, "zero3": 2, "hsdp": 1}  # layout -> microbatches


@cache
def one_device(name: str, microbatches: int):
    options = ("layout=ddp", f"step.microbatches={microbatches}", *MODULES[name])
    return conformance.train(conformance.program(name, *options, devices=1), STEPS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "layout"), one_in(3, MODULES, CASES))
def test_the_layout_never_changes_the_result(name: str, layout: str):
    microbatches = CASES[layout]
    expected, metrics = one_device(name, microbatches)
    options = (f"step.microbatches={microbatches}", *LAYOUTS[layout], *MODULES[name])
    state, found = conformance.train(conformance.program(name, *options), STEPS)
    for key in ("loss", "grad_norm"):
        np.testing.assert_allclose([m[key] for m in found], [m[key] for m in metrics], rtol=2e-5)
    difference, path = conformance.largest_difference(expected, state)
    assert difference < 1e-5, path


def with_adam(name: str, *options: str):
    """Yields (last state, metrics) of one device, then of every layout. All start from one state."""
    adam = ("optimizer.name=adamw", "optimizer.lr=0.01", *options, *MODULES[name])
    built = conformance.program(name, *adam, "layout=ddp", devices=1)
    start = jax.tree.map(np.asarray, built.init())
    yield conformance.train(built, STEPS)
    for layout in ("ddp", "fsdp"):
        built = conformance.program(name, *adam, *LAYOUTS[layout])
        yield conformance.train(built, STEPS, conformance.copied(start, built))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", one_in(2, MODULES))
def test_adam_gives_the_same_on_every_layout(name: str):
    """With an epsilon of 1e-3, against which the rounding of a gradient that is zero is small."""
    (expected, _), *found = with_adam(name, "optimizer.epsilon=1e-3", "step.microbatches=2")
    for state, _ in found:
        difference, path = conformance.largest_difference(expected, state)
        assert difference < 1e-5, path


@pytest.mark.parametrize("name", ["VisionTransformer", "LinenConvNet", "Centered"])
def test_adam_with_its_own_epsilon_gives_the_same_losses(name: str):
    """At 1e-8 rounding decides the direction of a gradient that is zero, such as that of an attention's key bias."""
    (_, expected), *found = with_adam(name)
    for _, metrics in found:
        np.testing.assert_allclose([m["loss"] for m in metrics], [m["loss"] for m in expected], rtol=1e-4)


def test_a_function_that_returns_a_module_is_its_class():
    expected, found = (
        conformance.train(conformance.program(name, "layout=fsdp", FUNCTION), 3)[0]
        for name in ("ConvNet", "make_convnet")
    )
    assert conformance.largest_difference(expected, found)[0] == 0.0


@pytest.mark.parametrize("name", ["NamedMLP", "VisionTransformer", "GPT"])
def test_tensor_parallelism_by_names(name: str):
    """Names come from the module, or from patterns of paths where it has none."""
    rules = (
        "rules={batch: [data], embed: [], mlp: [model], heads: [model], '.*/up/kernel': [embed, mlp], "
        "'.*/(query|key|value)/kernel': [embed, heads, null]}"
    )
    expected, _ = one_device(name, 1)
    built = conformance.program(name, "layout=ddp", "mesh={data: 4, model: 2}", rules, *MODULES[name])
    sharded = [leaf for leaf in jax.tree.leaves(built.state["params"]) if "model" in str(leaf.sharding.spec)]
    assert sharded
    difference, path = conformance.largest_difference(expected, conformance.train(built, STEPS)[0])
    assert difference < 1e-5, path


@pytest.mark.parametrize("name", ["LinenConvNet", "LinenMLP", "LinenTransformer", "LinenLSTM", "LinenScanned"])
def test_a_linen_module_equals_a_loop_of_linen_and_optax_alone(name: str):
    _, metrics = one_device(name, 1)
    key = jax.random.key(0)
    built = conformance.program(name, "layout=ddp", *MODULES[name], devices=1)
    start, model = built.init(), getattr(linen_modules, name)()
    params, stats = start["params"], start.get("mutable", {})
    tx = optax.sgd(built.config.optimizer.lr, momentum=built.config.optimizer.betas[0])
    opt_state = tx.init(params)

    @jax.jit
    def step(params, stats, opt_state, batch, key):
        stream = jax.random.fold_in(key, zlib.crc32(b"to_nnx__rngs/default/key"))

        def loss(params):
            variables = {"params": params, "batch_stats": stats} if stats else {"params": params}
            logits, new = model.apply(
                variables, batch["image"], train=True, rngs={"params": jax.random.fold_in(stream, 0)},
                mutable=["batch_stats"],
            )  # fmt: skip
            nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            return jnp.sum(nats * batch["weight"]) / jnp.sum(batch["weight"]), new.get("batch_stats", {})

        (value, stats_after), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats_after, opt_state, value

    losses = []
    for index in range(STEPS):
        step_key = jax.random.fold_in(jax.random.fold_in(key, 1), index)
        params, stats, opt_state, value = step(params, stats, opt_state, conformance.batch(index), step_key)
        losses.append(float(value))
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=2e-6)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", [n for n, options in MODULES.items() if n[:5] != "Linen" and "frozen" not in str(options)]
)
def test_the_loss_equals_that_of_flax_and_optax_alone(name: str):
    """A loop as users write it, with random streams set by the rule that jaxtrain documents."""
    state, metrics = one_device(name, 1)
    key = jax.random.key(0)
    built = conformance.program(name, "layout=ddp", *MODULES[name], devices=1)
    with nnx.use_eager_sharding(False):
        model = getattr(nnx_modules, name)(rngs=nnx.Rngs(jax.random.fold_in(key, 0)))
    lr = built.config.optimizer.lr
    tx = optax.sgd(lr, momentum=built.config.optimizer.betas[0])
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, rest, opt_state, batch, key):
        def loss(params):
            model = nnx.merge(graphdef, params, _with_streams(jax.tree.map(lambda x: x, rest), key))
            if hasattr(model, "loss"):
                takes_key = "key" in model.loss.__code__.co_varnames[: model.loss.__code__.co_argcount]
                terms = model.loss(batch, key) if takes_key else model.loss(batch)
            else:
                terms = nnx_modules.weighted_cross_entropy(model, batch, key)
            terms = terms[0] if isinstance(terms, tuple) else terms
            value = sum(s / w for s, w in terms.values()) if isinstance(terms, dict) else terms
            return value, nnx.state(model, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, value

    losses = []
    for index in range(STEPS):
        batch = conformance.batch(index)
        step_key = jax.random.fold_in(jax.random.fold_in(key, 1), index)
        params, rest, opt_state, value = step(params, rest, opt_state, batch, step_key)
        losses.append(float(value))
    np.testing.assert_allclose([m["loss"] for m in metrics], losses, rtol=2e-6)
    found = conformance.variables(state)
    for path, variable in nnx.to_flat_state(params):
        value = found["params/" + "/".join(map(str, path))]
        difference = np.linalg.norm(value - np.asarray(variable.get_raw_value()))
        assert difference < max(2e-6 * np.linalg.norm(value), 1e-7), path


def _with_streams(rest: nnx.State, key: jax.Array) -> nnx.State:
    """Sets every random key to `key` folded with the CRC-32 of its path, split if it is several, and counts to 0."""
    for path, variable in nnx.to_flat_state(rest):
        if isinstance(variable, nnx.RngKey):
            stream = jax.random.fold_in(key, zlib.crc32("/".join(map(str, path)).encode()))
            shape = variable.get_raw_value().shape
            variable.set_raw_value(jax.random.split(stream, shape) if shape else stream)
        elif isinstance(variable, nnx.RngCount):
            variable.set_raw_value(jnp.zeros_like(variable.get_raw_value()))
    return rest


@pytest.mark.parametrize("name", ["ConvNet", "VisionTransformer", "ScannedMLP", "Centered"])
def test_memory_falls_by_the_number_of_shards(name: str):
    """Without any names; but for the listed leaves, which eight shards do not divide."""
    built = conformance.program(name, "layout=fsdp", *MODULES[name])
    whole = ("attention/query/bias", "attention/key/bias", "attention/value/bias")  # [4, 4]
    count = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(built.state):
        name_of = jax.tree_util.keystr(path, simple=True, separator="/")
        if leaf.size >= 8 and not name_of.endswith(whole):
            assert leaf.size == 8 * np.prod(leaf.sharding.shard_shape(leaf.shape)), name_of
            count += 1
    assert count >= 4


def test_shared_and_nested_parameters_are_held_once():
    tied = conformance.program("TiedLanguageModel", "layout=fsdp", *MODULES["TiedLanguageModel"]).state["params"]
    assert {name: set(tree) for name, tree in tied.items()} == {"embed": {"embedding"}, "mix": {"bias", "kernel"}}
    low = conformance.program("LowRank", "layout=fsdp", *MODULES["LowRank"]).state
    assert set(low["params"]["adapted"]) == {"lora_a", "lora_b"}
    assert set(low["frozen"]["adapted"]) == {"base_module"}


def test_every_collection_is_in_the_state_and_goes_on():
    built = conformance.program("LinenCollections", "layout=fsdp", "step.microbatches=2", *MODULES["LinenCollections"])
    state, _ = conformance.train(built, 2)
    found = conformance.variables(state)
    assert found["mutable/passes"] == 4  # microbatches
    means = [name for name in found if name.startswith("mutable/") and found[name].ndim]
    assert len(means) >= 4  # mean and variance of batches, u of the spectral norm, center
    for name in means:
        assert np.abs(found[name]).max() > 0, name


def test_the_stack_of_a_scanned_linen_module_keeps_its_names():
    built = conformance.program("LinenScanned", "layout=fsdp", *MODULES["LinenScanned"])
    names = {path: names for path, (_, names) in built.model_def.tensors().items() if len(names) == 3}
    assert set(names.values()) == {("layers", "embed", "mlp")}


@pytest.mark.parametrize("name", ["ConvNet", "GPT", "Centered"])
def test_a_run_goes_on_bitwise_from_its_state_alone(name: str):
    """Random streams are set from (seed, step, microbatch): nothing of them is in the state."""
    built = conformance.program(name, "layout=fsdp", "step.microbatches=2", *MODULES[name])
    expected, _ = conformance.train(built, 6)
    half, _ = conformance.train(built, 3)
    found, _ = conformance.train(built, 3, conformance.copied(half, built), first=3)
    assert conformance.largest_difference(expected, found)[0] == 0.0


def test_evaluation_has_no_dropout_and_does_not_change_statistics():
    built = conformance.program("NamedMLP", "layout=ddp", "model.options.rate=0.5", *MODULES["NamedMLP"])
    state, batch = built.init(), conformance.batch(0)
    terms = [built.evaluate(state["params"], batch)[0]["cross_entropy"][0] for _ in range(2)]
    without = conformance.program("NamedMLP", "layout=ddp", *MODULES["NamedMLP"])
    assert terms[0] == terms[1] == without.evaluate(without.init()["params"], batch)[0]["cross_entropy"][0]


def test_a_skipped_step_changes_no_mutable_variable():
    faults = "debug.faults=[{kind: nan, step: 2}]"
    built = conformance.program("ConvNet", "layout=fsdp", faults, *MODULES["ConvNet"])
    state, _ = conformance.train(built, 1)
    before = conformance.variables(state)
    after, metrics = conformance.train(built, 1, state, first=1)
    assert metrics[0]["skipped"] == 1
    for path, value in conformance.variables(after).items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state():
    built = conformance.program("FrozenBackbone", "layout=fsdp", *MODULES["FrozenBackbone"])
    assert set(built.state["params"]) == {"adapter"}
    assert set(built.state["frozen"]) == {"backbone"}
    moments = jax.tree.leaves(built.state["opt_state"])
    assert sum(leaf.size for leaf in moments if leaf.ndim) == sum(
        leaf.size for leaf in jax.tree.leaves(built.state["params"])
    )
    state, _ = conformance.train(built, 3)
    start = built.init()
    for a, b in zip(jax.tree.leaves(start["frozen"]), jax.tree.leaves(state["frozen"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_metrics_of_a_model_are_means():
    built = conformance.program("VAE", "layout=fsdp", "step.microbatches=2", *MODULES["VAE"])
    _, metrics = conformance.train(built, 1)
    image = conformance.batch(0)["image"].reshape(conformance.ROWS, -1)
    assert metrics[0]["spread"] == pytest.approx(np.std(image, -1).mean(), rel=1e-5)
