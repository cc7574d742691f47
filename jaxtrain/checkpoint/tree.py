"""The state as named tensors: flatten to names, compare with what is wanted, build it again.

Names are the paths of the pytree joined by "/" (`params/layers/attention/query`, `opt_state/0/mu/embed`). On disk the
state is a nested dict of those names, so that container types (optax named tuples) belong to the program alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint.files import CheckpointError

Tensors = dict[str, list[Any]]  # name -> [shape, dtype], as JSON keeps it


def named(tree: Any) -> dict[str, Any]:
    """{name: leaf} of a pytree, in its own order. Raises CheckpointError when two leaves get one name."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(names) != len(leaves):
        raise CheckpointError("two tensors of the state have the same name: keys must not contain '/'")
    return names


def named_arrays(state: Any) -> dict[str, jax.Array]:
    """`named`, with a check that every leaf is a jax.Array. Raises CheckpointError naming the leaf that is not."""
    flat = named(state)
    for name, leaf in flat.items():
        if not isinstance(leaf, jax.Array):
            raise CheckpointError(f"state {name} is a {type(leaf).__name__}: a checkpoint holds jax.Arrays only")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise CheckpointError(f"state {name} is a typed PRNG key: keep jax.random.key_data(key) in the state")
    return flat


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """Nested dict of {"a/b": leaf}."""
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        node = tree
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def unnest(tree: dict[str, Any], like: Any) -> Any:
    """The pytree of `like` with the leaves of a nested dict; the inverse of `nest(named(like))`."""
    flat = named(tree)
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name in named(like)])


def tensors(tree: Any) -> Tensors:
    """{name: [shape, dtype]} of a pytree of arrays or ShapeDtypeStructs."""
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in named(tree).items()}


def mismatch(saved: Tensors, wanted: Tensors, partial: bool = False) -> str | None:
    """How a checkpoint differs from the wanted state, naming tensors, in one line; None when it fits.

    Args:
      partial: tensors that are only in the checkpoint do not matter.
    """
    missing = [name for name in wanted if name not in saved]
    extra = [] if partial else [name for name in saved if name not in wanted]
    other = []
    for name in wanted:
        if name in saved and list(saved[name]) != list(wanted[name]):
            (old_shape, old_dtype), (shape, dtype) = saved[name], wanted[name]
            other.append(f"{name} is {old_dtype}{list(old_shape)} in the checkpoint, {dtype}{list(shape)} here")
    parts = []
    if missing:
        parts.append("not in the checkpoint: " + _some(missing, ", "))
    if extra:
        parts.append("only in the checkpoint: " + _some(extra, ", "))
    if other:
        parts.append(_some(other, "; "))
    return "; ".join(parts) or None


def _some(items: list[str], separator: str, most: int = 5) -> str:
    shown = separator.join(items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"
