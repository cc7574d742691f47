"""Memory of a device: bytes of the sharded train state, and of a compiled step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from jaxtrain.hlo.parse import Instruction, Module


def state_bytes(state: Mapping[str, Any]) -> dict[str, int]:
    """Bytes per device of each part of an abstract train state: `params`, `opt_state`, `ema`, ...

    Exact for device 0: a dim that its axes do not divide is padded up, which gives the largest shard.

    Args:
        state: `Program.state`, nested trees whose leaves have shape, dtype and a NamedSharding (or None: replicated).
    """
    return {part: sum(leaf_bytes(leaf) for _, leaf in _named_leaves(tree, ())) for part, tree in state.items()}


def leaf_bytes(leaf: Any) -> int:
    """Bytes of the largest shard of an array or ShapeDtypeStruct."""
    sharding = getattr(leaf, "sharding", None)
    shards = [1] * len(leaf.shape)
    if sharding is not None:
        for dim, axes in enumerate(sharding.spec):
            shards[dim] = prod(sharding.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))
    return shard_size(leaf.shape, shards) * leaf.dtype.itemsize


def shard_size(shape: Sequence[int], shards: Sequence[int]) -> int:
    """Elements of the largest shard of a tensor; `shards` is the number of shards along each dim."""
    return prod(ceil(size / count) for size, count in zip(shape, shards))


def largest_tensors(state: Mapping[str, Any], count: int = 8) -> list[tuple[str, int]]:
    """Tensors of an abstract train state that take most of a device: (`params/layers/mlp/up`, bytes)."""
    sizes: dict[str, int] = {}
    for path, leaf in _named_leaves(state, ()):
        name = "/".join(path)
        sizes[name] = sizes.get(name, 0) + leaf_bytes(leaf)
    return sorted(sizes.items(), key=lambda item: -item[1])[:count]


def _named_leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, array) of a tree of dicts, lists and (named) tuples; an unnamed array has the path of its container."""
    if hasattr(tree, "dtype"):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, branch in tree.items():
            yield from _named_leaves(branch, (*path, str(name)))
    elif isinstance(tree, (tuple, list)):
        names = getattr(tree, "_fields", None) or [""] * len(tree)
        for name, branch in zip(names, tree):
            yield from _named_leaves(branch, (*path, name) if name in ("mu", "nu", "trace") else path)


@dataclass(frozen=True)
class Memory:
    """Bytes per device that the compiler plans for a step.

    Args:
        arguments: state and batch.
        outputs: new state and metrics.
        aliased: outputs that reuse donated arguments.
        temporaries: activations, gathered weights, buffers; the most alive at once, fragmentation included.
        peak: the compiler's peak memory (on CPU without temporaries); besides the arguments it counts device or host
            memory, whichever is more. `total` if the compiler reports none.
        host: bytes of host memory that hold offloaded values.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    peak: int
    host: int = 0

    @property
    def total(self) -> int:
        """Arguments, outputs that reuse no argument, and temporaries: the memory that the device needs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def is_host_peak(self) -> bool:
        """True if offloaded values exceed the device's temporaries, so that `peak` is that of the host."""
        return self.peak <= self.arguments + self.host

    def add_state(self, size: int) -> Memory:
        """Adds bytes of train state (negative to remove), which a step donates and returns."""
        return replace(
            self, arguments=self.arguments + size, outputs=self.outputs + size, aliased=self.aliased + size,
            peak=self.peak + size,
        )  # fmt: skip


def compiled_memory(compiled: Any) -> Memory:
    """Memory of a compiled step (`jax.stages.Compiled`). TPU arrays include the padding of their tiles."""
    stats = compiled.memory_analysis()
    fields = ("argument", "output", "alias", "temp")
    arguments, outputs, aliased, temporaries = (int(getattr(stats, f"{name}_size_in_bytes")) for name in fields)
    total = arguments + outputs - aliased + temporaries
    peak, host = (int(getattr(stats, f"{name}_in_bytes", 0)) for name in ("peak_memory", "host_temp_size"))
    return Memory(arguments, outputs, aliased, temporaries, peak or total, host)


def attention_workspace(module: Module) -> int:
    """Bytes of workspace that cuDNN's attention needs on an absent GPU, which the compiler can not query.

    The backward kernel (9.19, Hopper) accumulates the gradient of the queries in float32, with a buffer of the full
    length for every document that a packed row may hold. Kernels run one after another, so the largest counts.
    """
    instructions = (one for computation in module.computations.values() for one in computation.values())
    return max(map(_workspace, instructions), default=0)


def _workspace(instruction: Instruction) -> int:
    is_backward = re.fullmatch(r"__cudnn\$fmha\w+Backward", instruction.custom_call_target)
    if not is_backward or instruction.shape.leaves[-1].bytes:  # on a present GPU it is the last result
        return 0
    slots = re.search(r'"max_seg_per_batch":\s*"?(\d+)', instruction.attributes)
    return 4 * instruction.shape.leaves[0].elements * (int(slots[1]) if slots else 1)
