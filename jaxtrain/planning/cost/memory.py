"""Bytes on a device: the train state by its shardings, and what the compiler plans for a step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from jaxtrain.hlo.parse import Instruction, Module


def state_bytes(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes that one device holds of each part of an abstract train state: `params`, `opt_state`, `ema`, ...

    Exact for device 0: a dim that its axes do not divide counts as padded up, which is what the largest shard takes.

    Args:
        state: `Program.state`, nested trees with leaves of shape, dtype and a NamedSharding (or None: replicated).
    """
    return {part: sum(leaf_bytes(leaf) for leaf in _leaves(tree)) for part, tree in state.items()}


def leaf_bytes(leaf: Any) -> int:
    """Bytes of the largest shard of an array or ShapeDtypeStruct."""
    sharding = getattr(leaf, "sharding", None)
    shards = [1] * len(leaf.shape)
    if sharding is not None:
        for dim, axes in enumerate(sharding.spec):
            shards[dim] = prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
    return shard_size(leaf.shape, shards) * leaf.dtype.itemsize


def shard_size(shape: Sequence[int], shards: Sequence[int]) -> int:
    """Elements of the largest shard of a tensor whose dims are cut into so many."""
    return prod(ceil(size / count) for size, count in zip(shape, shards))


def largest(state: Mapping[str, Any], count: int = 8) -> list[tuple[str, int]]:
    """The tensors of an abstract train state of which a device holds most: (`params/layers/mlp/up`, bytes)."""
    found: dict[str, int] = {}
    for path, leaf in _named(state, ()):
        name = "/".join(path)
        found[name] = found.get(name, 0) + leaf_bytes(leaf)
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def _named(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, array) of a tree; what has no name of its own goes by that of its container."""
    if hasattr(tree, "dtype"):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _named(branch, (*path, str(name)))
    elif isinstance(tree, (tuple, list)):
        names = getattr(tree, "_fields", None) or [""] * len(tree)
        for name, branch in zip(names, tree):
            yield from _named(branch, (*path, name) if name in ("mu", "nu", "trace") else path)


def _leaves(tree: Any) -> Iterator[Any]:
    """Arrays of a tree of dicts, lists and (named) tuples."""
    if hasattr(tree, "dtype"):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _leaves(branch)
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from _leaves(branch)


@dataclass(frozen=True)
class Memory:
    """Bytes per device that the compiler plans for a step.

    Args:
        arguments: state and batch.
        outputs: new state and metrics.
        aliased: outputs that take the place of donated arguments.
        temporaries: activations, gathered weights, buffers; the most that lives at once, fragmentation included.
        peak: the most in use at any time, in the compiler's words (CPU leaves temporaries out); beside the arguments
            that is of the device or of the host, whichever is more. `total` where it does not say.
        host: bytes of the host's memory that the step keeps values in.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int = 0

    @property
    def total(self) -> int:
        """Arguments, outputs that take no argument's place, and temporaries: the device must have this much."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def peak_is_the_hosts(self) -> bool:
        """The host keeps more than temporaries take of the device, of which `peak` then tells nothing."""
        return self.peak <= self.arguments + self.host

    def with_state(self, more: int) -> Memory:
        """Adds bytes (or fewer) of train state, which a step takes and gives back in its place."""
        return replace(
            self, arguments=self.arguments + more, outputs=self.outputs + more, aliased=self.aliased + more,
            peak=self.peak + more,
        )  # fmt: skip


def compiled_memory(compiled: Any) -> Memory:
    """Memory of a compiled step (`jax.stages.Compiled`). TPU arrays count with the padding of their tiles."""
    stats = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp")
    arguments, outputs, aliased, temporaries = (int(getattr(stats, f"{name}_size_in_bytes")) for name in fields)
    total = arguments + outputs - aliased + temporaries
    peak, host = (int(getattr(stats, f"{name}_in_bytes", 0)) for name in ("peak_memory", "host_temp_size"))
    return Memory(arguments, outputs, aliased, temporaries, peak or total, host)


def workspace(module: Module) -> int:
    """Bytes that attention kernels use besides, where the compiler leaves it to the GPU to say: an absent one's.

    cuDNN's backward kernel (9.19, Hopper) adds up the gradient of the queries in float32, and a packed row has a place
    of full length for every document that it may hold. Kernels take turns, so that the largest counts.
    """
    return max((_workspace(one) for part in module.computations.values() for one in part.values()), default=0)


def _workspace(instruction: Instruction) -> int:
    is_backward = instruction.op == "custom-call" and re.fullmatch(r"__cudnn\$fmha\w+Backward", instruction.target)
    if not is_backward or instruction.shape.leaves[-1].bytes:  # of a GPU that is here it is the last result
        return 0
    slots = re.search(r'"max_seg_per_batch":\s*"?(\d+)', instruction.attributes)
    return 4 * instruction.shape.leaves[0].elements * (int(slots[1]) if slots else 1)
