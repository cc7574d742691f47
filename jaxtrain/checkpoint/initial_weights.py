"""Initial values of a model's variables from a folder that orbax wrote, or from the checkpoint of another run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint import orbax
from jaxtrain.interop.weight_matching import TRAIN_STATE, StoredName


class OrbaxWeights:
    """Arrays in a folder that orbax wrote, which are read directly into shards.

    Attributes:
        source: the folder.
        shapes: name -> shape.
    """

    def __init__(self, path: str):
        """Reads names and shapes.

        Raises:
            CheckpointError: not such a folder.
        """
        self.source = path
        arrays = orbax.stored_arrays(path)
        own = {name: leaf for name, leaf in arrays.items() if name.partition("/")[0] in TRAIN_STATE}
        is_own = (Path(path) / "jaxtrain.json").is_file()
        self.shapes = {name: leaf.shape for name, leaf in (own if is_own else arrays).items()}

    def load(
        self, found: Mapping[str, StoredName], variables: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Returns the variables, see `StoredWeights.load`."""
        wanted = {name: _stored(place, variables[path]) for path, place in found.items() for name in place.names}
        arrays = orbax.read_arrays(self.source, wanted)
        uses = Counter(name for place in found.values() for name in place.names)
        loaded = {}
        for path, place in found.items():
            loaded[path] = _assemble([arrays[name] for name in place.names], place, variables[path])
            uses.subtract(place.names)
            for name in {name for name in place.names if not uses[name]}:
                arrays.pop(name).delete()
        return loaded


def _stored(place: StoredName, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns shape and sharding of a stored array, sharded as the variable is."""
    shape = leaf.shape[place.is_stacked :]
    order = [place.dims.index(dim) for dim in range(len(shape))]
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *(None,) * len(leaf.shape))[place.is_stacked :]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[dim] for dim in order)))
    return jax.ShapeDtypeStruct([shape[dim] for dim in order], leaf.dtype, sharding=sharding)


def _assemble(arrays: list[jax.Array], place: StoredName, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a variable that owns its buffers: a step that donates its state reuses them."""
    if not place.is_stacked and place.dims == tuple(range(len(place.dims))):
        return jax.block_until_ready(jax.device_put(arrays[0], leaf.sharding, may_alias=False))

    def assemble(arrays: list[jax.Array]) -> jax.Array:
        values = [array.transpose(place.dims) for array in arrays]
        return jnp.stack(values) if place.is_stacked else values[0]

    return jax.block_until_ready(jax.jit(assemble, out_shardings=leaf.sharding)(arrays))
