"""Rematerialisation of single submodules of a plain Flax module, chosen by their paths."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError, join_words
from jaxtrain.models.flax_module import Path, text_path, variables
from jaxtrain.models.linen_module import LinenModule


def checkpoint_submodules(module: nnx.Module, patterns: Sequence[str], policy: Any) -> None:
    """Makes calls of submodules keep their inputs alone for the backward pass, which runs them again. In place.

    Parameters are read, so for FSDP gathered, in the recomputation again.

    Args:
        module: the whole module. Submodules of Linen have the paths that they have in its variables.
        patterns: regular expressions of whole paths such as `blocks/3`.
        policy: of `jax.checkpoint`: the values that are kept in addition.

    Raises:
        UserError: a pattern matches no submodule.
    """
    if isinstance(module, LinenModule):
        calls = module.to_nnx__calls
        calls.patterns, calls.policy = patterns, policy
        paths = [path for path in calls.has_dtype if path]
    else:
        nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(module)}
        paths = [path for path, node in nodes.items() if path and isinstance(node, nnx.Module) and callable(node)]
        for path in paths:
            if any(re.fullmatch(pattern, path) for pattern in patterns):
                nodes[path].__class__ = _checkpointed_type(type(nodes[path]), policy)
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            known = join_words(sorted(paths)[:5], "and") or "none"
            raise UserError(f"step.remat_modules: no submodule matches `{pattern}`; the model's are {known}")


def checkpoint_layers(module: nnx.Module, stacked: Collection[Path], policy: Any) -> bool:
    """Does the same for layers that a loop runs: the outermost submodules all of whose parameters are stacked.

    Rematerialisation of the whole pass would recompute the loop at once, and keep what all layers need.

    Args:
        module: the whole module.
        stacked: paths of parameters of stacked layers.
        policy: of `jax.checkpoint`.

    Returns:
        True if there are such layers.
    """
    nodes: dict[Path, Any] = {}
    for path, node in sorted(
        ((text_path(path), node) for path, node in nnx.iter_graph(module)), key=lambda item: item[0]
    ):
        is_inner = any(path[: len(outer)] == outer for outer in nodes)
        if path and not is_inner and isinstance(node, nnx.Module) and callable(node):
            own = [(*path, *inner) for inner, v in variables(node).items() if isinstance(v, nnx.Param)]
            if own and all(each in stacked for each in own):
                nodes[path] = node
    for node in nodes.values():
        node.__class__ = _checkpointed_type(type(node), policy)
    return bool(nodes)


@cache
def _checkpointed_type(module_type: Any, policy: Any) -> Any:
    """Returns a subclass whose call is rematerialised."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}
        # Modules and random streams among the arguments are split with the module, so that shared ones stay shared.
        nodes = [self, *(leaf for leaf in leaves if _is_node(leaf))]
        graphdef, state = nnx.split(nodes)

        def run(state: Any, arrays: dict[int, Any]) -> Any:
            nodes = nnx.merge(graphdef, state)
            module, *others = nodes
            rest = iter(others)
            values = [next(rest) if _is_node(leaf) else arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(treedef, values)
            outputs = module_type.__call__(module, *args, **kwargs)
            return outputs, nnx.state(nodes, nnx.Not(nnx.Param))

        outputs, changed = jax.checkpoint(run, policy=policy)(state, arrays)
        nnx.update(nodes, changed)
        return outputs

    return type(module_type.__name__, (module_type,), {"__call__": call})


def _is_node(leaf: Any) -> bool:
    """Returns whether this is a module or random streams, which a call shares with its caller."""
    return isinstance(leaf, (nnx.Module, nnx.Rngs, nnx.RngStream))
