"""Adaptation of a plain Flax module: its dtypes, the names of its variables, and gathered parameters.

A module that creates its parameters with `Env.param` does all of this itself and is left as it is.
"""

from __future__ import annotations

import functools
import inspect
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.models.linen_module import LinenModule, cast_floats
from jaxtrain.nn.env import Env
from jaxtrain.nn.param import Param, unwrap
from jaxtrain.sharding.rules import INFERRED, LAYERS, Names
from jaxtrain.sharding.sharder import Sharder

Path = tuple[str, ...]


def text_path(path: Sequence[Any]) -> Path:
    """Returns a path of NNX with its indices as text, as it stands in the train state."""
    return tuple(str(part) for part in path)


class PlainArray(nnx.Variable):
    """An array that a module holds without a variable: its state, which is not differentiated."""


def variables(module: nnx.Module) -> dict[Path, nnx.Variable]:
    """Returns path -> variable, sorted as NNX sorts a state. A variable that has several paths has its first one.

    Raises:
        UserError: two variables have the same path as text, such as `a/b` by a name with a slash.
    """
    out: dict[Path, nnx.Variable] = {}
    texts: set[str] = set()
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        text = "/".join(text_path(path))
        if text in texts:
            raise UserError(f"model.type: two variables have the path {text}; expected one")
        texts.add(text)
        out[text_path(path)] = variable if isinstance(variable, nnx.Variable) else PlainArray(variable)
    return out


def name_arrays(module: nnx.Module) -> None:
    """Makes variables of the arrays in a module's dicts and lists, such as the scales of `nnx.WeightNorm`. In place.

    Flax takes the shapes that stand for them in an abstract module for constants.
    """
    for _, node in list(nnx.iter_graph(module)):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(items):
            if isinstance(value, jax.Array):
                node[key] = PlainArray(value)


class Preparation(NamedTuple):
    """Preparation of a parameter in front of a pass: a cast, and for FSDP a gather."""

    dtype: Any
    gathers: bool


def adapt(module: nnx.Module, env: Env) -> dict[int, Preparation]:
    """Prepares an abstract module for training, in place.

    Submodules without a `dtype` of their own compute in the compute dtype of the policy. A parameter is cast to it and
    gathered over the axes that only store it in shards (FSDP) where the module reads it. Those of `nnx.RNN`, which
    reads them in a loop over time, and of `nnx.SpectralNorm` and `nnx.WeightNorm`, which assign to them for the pass,
    are gathered in front of the pass; those of Linen modules are cast there, and XLA gathers them. A call of the module
    itself casts float inputs to the compute dtype, and float outputs to float32.

    Args:
        module: of abstract arrays.
        env: sharding and dtypes.

    Returns:
        id of a parameter -> its preparation, for those that are prepared in front of the pass.
    """
    exact = {id(variable) for variable in _with_own_dtype(module)}
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.Module) and hasattr(node, "dtype") and _own_dtype(node) is None:
            node.dtype = env.policy.compute  # pyright: ignore[reportAttributeAccessIssue]
    early, linen = (
        {id(v) for _, node in nnx.iter_graph(module) if isinstance(node, kinds) for v in _parameters(node)}
        for kinds in ((nnx.RNN, nnx.SpectralNorm, nnx.WeightNorm), nnx.bridge.ToNNX)
    )
    prepared: dict[int, Preparation] = {}
    for variable in _parameters(module):
        if isinstance(variable, Param):
            continue
        stored = variable.get_raw_value().dtype
        is_narrow = not jnp.issubdtype(stored, jnp.floating) or stored.itemsize <= env.policy.compute.itemsize
        dtype = stored if is_narrow or id(variable) in exact else env.policy.compute
        if id(variable) in early | linen:
            prepared[id(variable)] = Preparation(dtype, id(variable) in early)
            continue
        shape = variable.get_raw_value().shape
        variable.set_metadata(gather_dtype=dtype, full_shape=shape, sharder=env.sharder, names=None)
        # The class says how a parameter is read. It is changed in place, because a tied one has several owners.
        variable.__class__ = _gathered_type(type(variable))  # pyright: ignore[reportAttributeAccessIssue]
    if callable(module) and env.policy.compute != jnp.float32 and not isinstance(module, nnx.bridge.ToNNX):
        module.__class__ = _float32_outputs(type(module), env.policy.compute)
    return prepared


@functools.cache
def _float32_outputs(module_type: Any, compute: Any) -> Any:
    """Returns a subclass whose call casts float inputs to the compute dtype, and float outputs to float32."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_floats((args, kwargs), compute)
        return cast_floats(module_type.__call__(self, *args, **kwargs), jnp.float32)

    call.__signature__ = inspect.signature(module_type.__call__)  # pyright: ignore[reportFunctionMemberAccess]
    return type(module_type.__name__, (module_type,), {"__call__": call})


def _parameters(module: nnx.Module) -> Iterator[nnx.Param]:
    return (node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Param))


def has_plain_parameters(module: nnx.Module) -> bool:
    """Returns whether a parameter was not created by `Env.param`."""
    return any(not isinstance(parameter, Param) for parameter in _parameters(module))


def _own_dtype(module: nnx.Module) -> Any:
    """Returns the `dtype` that a submodule was given; None without one.

    `nnx.Embed` that is given none has the dtype of its table, so that this one counts as none, even if it was given.
    """
    dtype = getattr(module, "dtype", None)
    return None if isinstance(module, nnx.Embed) and dtype == module.param_dtype else dtype


def _with_own_dtype(module: nnx.Module) -> Iterator[nnx.Variable]:
    """Yields the variables of submodules that were given a `dtype`."""
    for _, node in nnx.iter_graph(module):
        if isinstance(node, LinenModule):
            yield from node.with_own_dtype()
        elif isinstance(node, nnx.Module) and _own_dtype(node) is not None:
            yield from (value for value in vars(node).values() if isinstance(value, nnx.Variable))


@functools.cache
def _gathered_type(variable_type: type[nnx.Variable]) -> type[nnx.Variable]:
    """Returns a subclass whose value is cast and gathered when it is read, and which cannot be assigned."""

    def get_value(self: Any, **index: Any) -> Any:
        value = _gather(self, unwrap(self.get_raw_value()))
        at = index.get("index", ...)
        return value if at is ... else value[at]

    def set_value(self: Any, value: Any, **index: Any) -> None:
        raise UserError(
            "model.type: the loss assigns to a parameter; expected a variable of another type than nnx.Param"
        )

    methods = {"get_value": get_value, "set_value": set_value}
    return type(f"Gathered{variable_type.__name__}", (variable_type,), methods)


def _gather(variable: Any, value: jax.Array) -> jax.Array:
    """Returns the value of a parameter for use.

    Within a loop over stacked modules `value` is the slice of one of them. Other parts of it are only cast, and so are
    parameters whose names are not known yet.
    """
    full_shape, names = variable.full_shape, variable.names
    if names and value.ndim and full_shape[-value.ndim :] == value.shape:
        return variable.sharder.gather_weight(value, names[-value.ndim :], variable.gather_dtype, of_layer=True)
    return value.astype(variable.gather_dtype)


def logical_names(
    path: Path,
    variable: nnx.Variable,
    sharder: Sharder,
    names_by_path: Mapping[str, Sequence[str | None]],
    stacked: int = 0,
) -> Names:
    """Returns the logical name of every dim of a variable.

    They come from the first pattern that matches the whole path, else from Flax's metadata: `names` of `Env.param`, or
    what `nnx.with_partitioning` has set. Without any, a large dim that the `fsdp` axis divides is `inferred`. The
    dim of stacked layers that has no other name is `layers`.

    Args:
        path: of the variable.
        variable: whose value has a shape.
        sharder: mesh and rules.
        names_by_path: regular expression of `a/b/c` -> names.
        stacked: leading dims of stacked layers. Names of the other dims alone do not count them: `nnx.vmap` adds no
            name to those of a layer.

    Raises:
        UserError: more names than dims, or a name that is no text.
    """
    shape = tuple(variable.get_raw_value().shape)
    found = next((names for pattern, names in names_by_path.items() if re.fullmatch(pattern, "/".join(path))), None)
    if found is None:
        metadata = variable.get_metadata()
        found = metadata.get("names") or metadata.get("out_sharding") or metadata.get("sharding_names")
    stack = (LAYERS, *(None,) * (stacked - 1)) if stacked else ()
    if found is None:
        return (*stack, *_inferred_names(shape[stacked:], sharder.size(INFERRED)))
    names = (found,) if isinstance(found, str) else tuple(found)
    are_text = not isinstance(found, str) and all(name is None or isinstance(name, str) for name in names)
    if len(names) > len(shape) or not are_text:
        message = f"names {found!r} of a variable of shape {shape}; expected a list of one text or None a dim"
        raise UserError(f"model.type: {'/'.join(path)} has the {message}")
    if stacked and len(names) == len(shape) - stacked:
        return (*stack, *names)
    names = (*names, *(None,) * (len(shape) - len(names)))
    return (LAYERS, *names[1:]) if stacked and names[0] is None else names


def _inferred_names(shape: tuple[int, ...], shards: int) -> Names:
    """Names the first dim that splits into `shards` and is at least a quarter of the largest one.

    Shards of the first dim are gathered and reduced in place; those of others are transposed, too.
    """
    dims = [d for d, size in enumerate(shape) if size and size % shards == 0]
    largest = max((shape[d] for d in dims), default=0)
    inferred = next((d for d in dims if 4 * shape[d] >= largest), None)
    return tuple(INFERRED if d == inferred else None for d in range(len(shape)))


def rng_value(path: Path, like: Any, is_key: bool, key: jax.Array) -> jax.Array:
    """Returns the value of a random stream's key or count in a forward pass.

    Streams are set, not threaded: a key is `key` folded with the CRC-32 of the path, and depends on nothing else.
    """
    if not is_key:
        return jnp.zeros(like.shape, like.dtype)
    stream = jax.random.fold_in(key, zlib.crc32("/".join(path).encode()))
    return jax.random.split(stream, like.shape) if like.shape else stream
