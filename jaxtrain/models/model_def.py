"""Functional view of an NNX model: pure functions on a plain tree of parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtrain.config.schema import LossConfig, ModelConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.errors import UserError
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.spec import is_decoder
from jaxtrain.nn.env import Env
from jaxtrain.nn.param import Param, unwrap
from jaxtrain.sharding.rules import Names

Tree = dict[str, Any]
Path = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ModelDef:
    """A model, split once into its graph definition and its parameters.

    Attributes:
        params: nested dict of ShapeDtypeStruct.
        names: the same tree, with the logical names of every dim.
        gather_dtypes: the same tree, with the widest dtype in which the model uses a parameter, so that it may be
            gathered in it.
    """

    params: Tree
    names: Tree
    gather_dtypes: Tree
    _make: Callable[[nnx.Rngs], nnx.Module]
    _graphdef: Any
    _paths: list[Path]
    _plain_params: frozenset[Path]  # parameters that are not `nn.param.Param`
    _treedef: Any

    def init(self, key: jax.Array) -> Tree:
        """Returns initial parameters. Jitted with output shardings, it creates every shard on its device."""
        return _to_dict(nnx.state(self._make(nnx.Rngs(key))))

    def bind(self, params: Tree) -> Any:
        """Returns the module with these parameters (arrays or `SplitGrad`), to be used within the same trace."""
        leaves = [_get(params, path) for path in self._paths]
        leaves = [unwrap(leaf) if path in self._plain_params else leaf for path, leaf in zip(self._paths, leaves)]
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def tensors(self) -> dict[str, tuple[tuple[int, ...], Names]]:
        """Returns `a/b/c` -> (shape, logical names) of every parameter."""
        return {"/".join(path): (_get(self.params, path).shape, _get(self.names, path)) for path in sorted(self._paths)}


def define_model(model: ModelConfig, loss: LossConfig, env: Env, vocab: int | None) -> ModelDef:
    """Defines the model of a config without allocating it.

    Args:
        model: the `model` section.
        loss: the `loss` section, for the decoder.
        env: sharding and dtypes, given to the model's constructor.
        vocab: vocabulary size of the decoder; not used for other models.

    Raises:
        UserError: the user's class cannot be found or created, or holds state other than parameters.
    """
    make = _constructor(model, loss, env, vocab)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    names: Tree = {}
    gather_dtypes: Tree = {}
    paths, plain_params = [], set()
    for path, param in nnx.to_flat_state(state):
        if not isinstance(param, nnx.Param):
            message = f"{'.'.join(map(str, path))} is a {type(param).__name__}; a model holds nnx.Param only"
            raise UserError(f"model.type {model.type}: {message} (draw dropout from the key given to `loss`)")
        metadata, value, path = param.get_metadata(), param.get_value(), _as_text(path)
        _set(names, path, metadata.get("names") or (None,) * len(value.shape))
        _set(gather_dtypes, path, metadata.get("gather_dtype", value.dtype))
        paths.append(path)
        if not isinstance(param, Param):
            plain_params.add(path)
    treedef = jax.tree.structure(state)
    return ModelDef(
        _to_dict(state), names, gather_dtypes, make, graphdef, paths, frozenset(plain_params), treedef
    )  # fmt: skip


def _constructor(model: ModelConfig, loss: LossConfig, env: Env, vocab: int | None) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns the constructor of the model: the factory of built-in and users' classes."""
    model_class = Decoder if model.is_builtin else load_class(model.type, "model.type")
    arguments: tuple = ()
    if is_decoder(model):
        if vocab is None:
            raise UserError("model.vocab: the data has no vocabulary; expected the size of the decoder's")
        arguments = (model, loss, vocab)
    try:
        # Of __init__, because the class itself shows only its metaclass's *args.
        inspect.signature(model_class.__init__).bind(None, *arguments, **model.options, env=env, rngs=None)
    except TypeError as error:
        raise UserError(f"model.options: {model.type} does not take them: {error}") from error
    return lambda rngs: model_class(*arguments, **model.options, env=env, rngs=rngs)


def _as_text(path: tuple) -> Path:
    return tuple(str(part) for part in path)


def _to_dict(state: nnx.State) -> Tree:
    tree: Tree = {}
    for path, param in nnx.to_flat_state(state):
        _set(tree, _as_text(path), param.get_value())
    return tree


def _get(tree: Mapping, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _set(tree: Tree, path: Path, value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value
