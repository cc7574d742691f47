"""Values on their way: parts of servers, and pieces of every sharding to every other one."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.islands.partition import Part, Spec, partition
from jaxtrain.islands.pieces import TensorPiece, assemble, pieces_of, place_tree

SPECS = {
    ("params", "embed"): Spec((64, 16), jnp.float32, ("vocab", "embed")),
    ("params", "stack", "w"): Spec((6, 16, 24), jnp.float32, ("layers", "embed", "mlp")),
    ("params", "stack", "norm"): Spec((6, 16), jnp.bfloat16, ("layers", "embed")),
    ("params", "scale"): Spec((), jnp.float32, ()),
}
SHARDINGS = {
    "fsdp 4": ({"fsdp": 4}, P("fsdp"), P(None, "fsdp")),
    "tensor 2": ({"model": 2}, P(None, "model"), P(None, None, "model")),
    "fsdp 2 tensor 2": ({"fsdp": 2, "model": 2}, P("fsdp", "model"), P(None, "fsdp", "model")),
    "pipeline 2": ({"pipeline": 2}, P(), P("pipeline")),
    "one": ({"data": 1}, P(), P()),
}


def like(name: str, first: int) -> dict:
    """Abstract arrays of a sharding on its devices."""
    sizes, table, stack = SHARDINGS[name]
    count = int(np.prod(list(sizes.values())))
    devices = np.array(jax.devices()[first : first + count]).reshape(list(sizes.values()))
    mesh = jax.sharding.Mesh(devices, tuple(sizes))
    specs = {("params", "embed"): table, ("params", "stack", "w"): stack}
    return {
        path: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=NamedSharding(mesh, specs.get(path, P()))
        )
        for path, spec in SPECS.items()
    }  # fmt: skip


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(("before", "after"), list(itertools.product(SHARDINGS, SHARDINGS)))
def test_every_sharding_arrives_in_every_other_one(before: str, after: str, servers: int) -> None:
    rng = np.random.default_rng(0)
    values = {path: rng.normal(size=spec.shape).astype(spec.dtype) for path, spec in SPECS.items()}
    sent, wanted = like(before, 0), like(after, 4)
    arrays = {path: jax.device_put(values[path], leaf.sharding) for path, leaf in sent.items()}
    shares = partition(SPECS, servers)
    given = []
    for parts in shares:
        pieces = pieces_of(arrays, parts)
        largest = max((piece.values.size for each in pieces.values() for piece in each), default=0)
        assert largest <= max(shard.data.size for x in arrays.values() for shard in x.addressable_shards)
        given.append((parts, assemble(pieces, {path: part.spec(SPECS[path]) for path, part in parts.items()})))
    for path, array in place_tree(given, wanted).items():
        assert array.sharding == wanted[path].sharding
        assert array.dtype == SPECS[path].dtype
        np.testing.assert_array_equal(np.asarray(array), values[path])


def test_servers_hold_equal_shares_of_the_bytes_in_whole_layers() -> None:
    specs = {("params", name): Spec((8, 100, 10), jnp.float32, ("layers", "embed", "mlp")) for name in ("a", "b", "c")}
    shares = partition(specs, 4)
    held = [sum(part.spec(specs[path]).nbytes for path, part in parts.items()) for parts in shares]
    assert held == [24_000, 24_000, 24_000, 24_000]
    for path in specs:
        layers = [layer for parts in shares if path in parts for layer in range(8)[parts[path].layers]]
        assert sorted(layers) == list(range(8))
    whole = {("params", "t"): Spec((100, 10), jnp.float32, ("embed", "mlp"))}
    assert partition(whole, 2)[0] == {} or partition(whole, 2)[1] == {}  # a tensor is not cut


def test_pieces_with_holes_or_of_another_shape_are_refused() -> None:
    spec = {("a",): Spec((4, 2), np.float32)}
    half = np.zeros((2, 2), np.float32)
    with pytest.raises(ValueError, match="pieces of 4 values; expected 8"):
        assemble({("a",): [TensorPiece((0, 0), half)]}, spec)
    with pytest.raises(ValueError, match="expected one of"):
        assemble({("a",): [TensorPiece((3, 0), half), TensorPiece((0, 0), half)]}, spec)
    with pytest.raises(ValueError, match="pieces of 0 values"):
        assemble({}, spec)
    assert Part(1, 3).spec(Spec((4, 2), np.float32)).shape == (2, 2)
