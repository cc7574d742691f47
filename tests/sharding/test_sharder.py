"""Axes, device order and placement by logical names."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.config.schema import MeshConfig
from jaxtrain.sharding.axes import AXES, infer_sizes
from jaxtrain.sharding.devices import make_mesh
from jaxtrain.sharding.layout import Layout, resolve_layout
from jaxtrain.sharding.rules import compute_dims, dims_to_axes, storage_axes, storage_dims
from jaxtrain.sharding.sharder import Sharder

RULES = {"batch": ("data", "fsdp"), "embed": ("fsdp",), "mlp": ("model",), "sequence": ("model",)}


def sharder(**sizes: int) -> Sharder:
    layout = resolve_layout("test", MeshConfig(**sizes), RULES, int(np.prod(list(sizes.values()))))
    return Sharder(make_mesh(layout, jax.devices()[: int(np.prod(list(sizes.values())))]), layout.rules)


def test_fill_gives_minus_one_what_is_left():
    assert infer_sizes({"data": 2, "fsdp": -1}, 8) == dict.fromkeys(AXES, 1) | {"data": 2, "fsdp": 4}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [({"data": -1, "fsdp": -1}, "only one"), ({"data": 3, "fsdp": -1}, "multiple of 3"), ({"data": 4}, "4 places"),
     ({"data": 0}, "positive")],
)  # fmt: skip
def test_fill_says_what_is_wrong(sizes: dict, said: str):
    with pytest.raises(ValueError, match=said):
        infer_sizes(sizes, 8)


def test_an_axis_twice_on_a_tensor_is_refused_by_name():
    with pytest.raises(ValueError, match=r"axis `model` is used twice.*`mlp` and `heads`"):
        dims_to_axes(("mlp", "heads"), {"mlp": ("model",), "heads": ("model",)})


def test_inner_axes_hold_neighbouring_devices():
    mesh = sharder(data=2, fsdp=2, model=2).mesh
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids[0, 0], [0, 1])  # `model` is the fastest
    np.testing.assert_array_equal(ids[:, 0, 0], [0, 4])  # `data` the slowest


def test_dcn_part_of_an_axis_spans_the_slow_network():
    """data 4 of which 2 across islands of 4 devices: inside an island, data and model neighbours stay together."""
    sizes = dict.fromkeys(AXES, 1) | {"data": 4, "model": 2}
    mesh = make_mesh(Layout("x", sizes, {}, {"data": 2}), jax.devices())
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    np.testing.assert_array_equal(ids // 4, [[0, 0], [0, 0], [1, 1], [1, 1]])
    with pytest.raises(ValueError, match=r"mesh\.dcn\.data: 3"):
        make_mesh(Layout("x", sizes, {}, {"data": 3}), jax.devices())


def test_specs_follow_the_rules():
    s = sharder(data=2, fsdp=2, model=2)
    assert s.spec(("batch", "sequence", None)) == P(("data", "fsdp"), ("model",), None)
    assert s.spec(("unknown", "embed")) == P(None, ("fsdp",))
    assert s.size("batch") == 4
    assert s.size(None) == 1


def test_the_axes_of_the_experts_are_theirs_alone_in_their_own_tensors():
    rules = {"batch": ("fsdp", "expert"), "embed": ("fsdp", "expert"), "mlp": ("model",), "expert": ("expert",)}
    assert dims_to_axes(("embed", "mlp"), rules) == (("fsdp", "expert"), ("model",))
    assert dims_to_axes(("expert", "embed", "mlp"), rules) == (("expert",), ("fsdp",), ("model",))
    assert storage_axes(rules, ("embed", "mlp")) == {"fsdp", "expert"}
    assert storage_axes(rules, ("expert", "embed", "mlp")) == {"fsdp"}
    with pytest.raises(ValueError, match="`model` is used twice"):
        dims_to_axes(("expert", "embed", "mlp"), rules | {"expert": ("model",)})


def test_a_stored_weight_is_gathered_in_the_compute_dtype_and_its_gradient_lands_in_the_shards():
    s = sharder(fsdp=4, model=2)
    w = jax.device_put(jnp.arange(128.0).reshape(16, 8), s.sharding(("embed", "mlp")))
    x = jax.device_put(jnp.arange(64, dtype=jnp.bfloat16).reshape(4, 16) / 64, s.sharding(("batch", None)))

    def loss(w, x):
        y = x @ s.gather_weight(w, ("embed", "mlp"), jnp.bfloat16)
        return jnp.sum(y.astype(jnp.float32) ** 2), y.dtype

    compiled = jax.jit(jax.grad(lambda w, x: loss(w, x)[0])).lower(w, x).compile()
    gradient = compiled(w, x)
    assert gradient.dtype == jnp.float32
    assert gradient.sharding.is_equivalent_to(w.sharding, 2)
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert gathers
    # The CPU backend computes bfloat16 in float32, but what is gathered must have been bfloat16 before.
    expected = jax.grad(lambda w, x: jnp.sum((x @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2))(
        np.asarray(w), np.asarray(x)
    )
    np.testing.assert_allclose(gradient, expected, rtol=2e-2, atol=1)


def test_layers_that_stages_do_not_divide_lie_in_shares_of_another_dim():
    rules = {"layers": ("pipeline",), "embed": ("fsdp",), "batch": ("data",), "mlp": ("model",)}
    sizes = {"pipeline": 4, "fsdp": 2, "data": 2, "model": 2}
    names = ("layers", "embed", "mlp")
    assert compute_dims(names, (8, 16, 64), rules, sizes) == (("pipeline",), ("fsdp",), ("model",))
    assert compute_dims(names, (6, 16, 64), rules, sizes) == ((), ("fsdp", "pipeline"), ("model",))
    assert compute_dims(names, (6, 4, 64), rules, sizes) == ((), ("fsdp",), ("model", "pipeline"))
    assert compute_dims(("layers", "embed"), (6, 6), rules, sizes) == ((), ("fsdp",))
    assert storage_dims(names, (6, 16, 64), rules, sizes, 1) == ((), ("fsdp", "pipeline", "data"), ("model",))


def test_boundary_places_forward_and_backward_differently():
    s = sharder(data=2, model=4)
    x = jax.device_put(jnp.ones((4, 8, 3)), s.sharding(("batch", None, None)))

    def forward(x):
        return s.reshard(x, [("batch", "sequence", None)], [("batch", None, None)])

    out, pull = jax.vjp(jax.jit(forward), x)
    assert out.sharding.is_equivalent_to(s.sharding(("batch", "sequence", None)), 3)
    (cotangent,) = pull(out)
    assert cotangent.sharding.is_equivalent_to(s.sharding(("batch", None, None)), 3)


def test_without_a_mesh_nothing_is_placed():
    x = jnp.ones((2, 3))
    assert Sharder().constrain(x, "batch", None) is x
    with pytest.raises(ValueError, match="needs a mesh"):
        Sharder().sharding(("batch",))
