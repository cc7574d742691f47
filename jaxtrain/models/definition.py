"""Model definitions from configs: pure functions on a plain tree of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtrain.config.schema import Config
from jaxtrain.config.user_class import load_class
from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Decoder
from jaxtrain.nn.env import Env
from jaxtrain.nn.param import Param, plain
from jaxtrain.precision.policy import POLICIES
from jaxtrain.sharding.rules import Names

Tree = dict[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Definition:
    """A model taken apart once.

    params: nested dict of ShapeDtypeStruct; names: the same tree with the logical names of every dim; travels: with
    the dtype in which a parameter may be gathered, since the model uses it in no wider one.
    """

    params: Tree
    names: Tree
    travels: Tree
    _make: Callable[[nnx.Rngs], nnx.Module]
    _graphdef: Any
    _paths: list[Path]
    _foreign: frozenset[Path]  # of parameters that are not `nn.param.Param`
    _treedef: Any

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters. Pure: jit it with output shardings and nothing is materialised unsharded."""
        return _to_dict(nnx.state(self._make(nnx.Rngs(key))))

    def bind(self, params: Tree) -> Any:
        """The module with these parameters, arrays or `Apart`; call its methods at once, inside the same trace."""
        leaves = [_get(params, path) for path in self._paths]
        leaves = [plain(leaf) if path in self._foreign else leaf for path, leaf in zip(self._paths, leaves)]
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def tensors(self) -> dict[str, tuple[tuple[int, ...], Names]]:
        """`a/b/c` -> (shape, logical names) of every parameter."""
        return {"/".join(path): (_get(self.params, path).shape, _get(self.names, path)) for path in sorted(self._paths)}


def define(config: Config, env: Env, vocab: int | None) -> Definition:
    """The model of a config; `vocab` is the decoder's vocabulary size, unused by a user's own model.

    Raises:
        ValueError: the user's class cannot be found or made, or keeps state other than parameters.
    """
    make = _maker(config, env, vocab)
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graphdef, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    for path, variable in flat:
        if not isinstance(variable, nnx.Param):
            raise UserError(
                f"model.type {config.model.type}: {'.'.join(map(str, path))} is a {type(variable).__name__}; "
                "a model holds nnx.Param only (draw dropout from the key given to `loss`)"
            )
    names: Tree = {}
    travels: Tree = {}
    for path, param in flat:
        marks, value = param.get_metadata(), param.get_value()
        _set(names, _text(path), marks.get("names") or (None,) * len(value.shape))
        _set(travels, _text(path), marks.get("travels", value.dtype))
    paths = [_text(path) for path, _ in flat]
    foreign = frozenset(path for path, (_, param) in zip(paths, flat) if not isinstance(param, Param))
    return Definition(_to_dict(state), names, travels, make, graphdef, paths, foreign, jax.tree.structure(state))


def make_env(config: Config, sharder: Any) -> Env:
    """The surroundings that a config gives its model on a mesh."""
    return Env(
        sharder,
        POLICIES[config.precision],
        config.step.attention,
        config.context_parallel,
        config.step.remat_policy,
        config.step.offloaded,
        config.step.unroll,
    )


def _maker(config: Config, env: Env, vocab: int | None) -> Callable[[nnx.Rngs], nnx.Module]:
    if config.model.type == "decoder":
        if vocab is None:
            raise UserError("model.vocab: the data has no vocabulary, so the decoder's size must be given")
        return lambda rngs: Decoder(config.model, config.loss, vocab, env=env, rngs=rngs)
    user_class = load_class(config.model.type, "model.type")
    try:
        # Of __init__, because the class itself shows only its metaclass's *args.
        inspect.signature(user_class.__init__).bind(None, **config.model.options, env=env, rngs=None)
    except TypeError as error:
        raise UserError(f"model.options: {config.model.type} does not take them: {error}") from error
    return lambda rngs: user_class(**config.model.options, env=env, rngs=rngs)


def _text(path: tuple) -> Path:
    return tuple(str(part) for part in path)


def _to_dict(state: nnx.State) -> Tree:
    tree: Tree = {}
    for path, param in nnx.to_flat_state(state):
        _set(tree, _text(path), param.get_value())
    return tree


def _get(tree: Mapping, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _set(tree: Tree, path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
