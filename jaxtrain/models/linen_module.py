"""Linen modules as NNX modules, through Flax's bridge."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

from jaxtrain.losses.functions import LossFunction


def cast_floats(tree: Any, dtype: Any) -> Any:
    """Returns a tree with all arrays of floats in `dtype`; other leaves are unchanged."""

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, (jax.Array, np.ndarray)) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(dtype) if is_float else leaf

    return jax.tree.map(cast, tree)


def _without_self(method: Callable) -> inspect.Signature:
    return inspect.Signature(list(inspect.signature(method).parameters.values())[1:])


class SubmoduleCalls:
    """Interceptor of the calls of Linen submodules: casts inputs, and rematerialises those with chosen paths.

    Attributes:
        has_dtype: path of a submodule that was called -> True if it was given a `dtype`.
        patterns: regular expressions of the paths of submodules that are rematerialised.
        policy: of `jax.checkpoint`.
    """

    def __init__(self, dtype: Any):
        """Creates the interceptor. `dtype` is that of the computation of submodules without one of their own."""
        self.has_dtype: dict[str, bool] = {}
        self.patterns: Sequence[str] = ()
        self.policy: Any = None
        self._dtype, self._running = dtype, ""

    def __call__(self, call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        """Calls a method of a submodule, which casts to the widest of inputs and parameters.

        The module itself, and submodules whose `dtype` is None, get inputs in the dtype of the computation.
        """
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        path, dtype = "/".join(context.module.path), getattr(context.module, "dtype", self)
        self.has_dtype[path] = dtype is not None and dtype is not self
        if dtype is None or (dtype is self and not path):
            args, kwargs = cast_floats((args, kwargs), self._dtype)
        if path != self._running and any(re.fullmatch(pattern, path) for pattern in self.patterns):
            return self._recomputed(context.module, path, args, kwargs)
        return call(*args, **kwargs)

    def _recomputed(self, module: linen.Module, path: str, args: Any, kwargs: Any) -> Any:
        """Calls a submodule under Linen's own transformation, so that its variables and random streams are known."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))}

        def run(module: linen.Module, arrays: dict[int, Any]) -> Any:
            args, kwargs = jax.tree.unflatten(treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
            outer, self._running = self._running, path
            try:
                return module(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            finally:
                self._running = outer

        return linen.remat(run, policy=self.policy)(module, arrays)


class LinenModule(nnx.bridge.ToNNX):
    """A Linen module that keeps the collections which a pass changes, such as batch statistics, while it trains.

    Random numbers of all streams come from one stream, by the rule of Linen for streams that are not given.
    """

    def __init__(self, module: Any, rngs: nnx.Rngs, dtype: Any):
        """Wraps a module.

        Args:
            module: the Linen module.
            rngs: source of the initial values.
            dtype: of the computation of submodules without a `dtype`.
        """
        super().__init__(module, rngs=rngs)
        self.to_nnx__is_training = True  # of this prefix are attributes that are no variables
        self.to_nnx__calls = SubmoduleCalls(jnp.dtype(dtype))

    def train(self, **attributes: Any) -> None:
        """Lets a pass change the mutable collections."""
        del attributes
        self.to_nnx__is_training = True

    def eval(self, **attributes: Any) -> None:
        """Lets a pass only read the mutable collections."""
        del attributes
        self.to_nnx__is_training = False

    def __call__(self, *args: Any, mutable: Any = None, **kwargs: Any) -> Any:
        """Calls the Linen module, or its method `method`. `mutable` adds nothing: collections are known."""
        kept = (
            variable for _, variable in nnx.to_flat_state(nnx.state(self)) if not isinstance(variable, nnx.RngState)
        )
        collections = {nnx.variable_name_from_type(type(variable)) for variable in kept} - {"params"}
        is_changed = self.to_nnx__is_training and collections
        with linen.intercept_methods(self.to_nnx__calls):
            outputs = super().__call__(*args, mutable=sorted(collections) if is_changed else None, **kwargs)
        return cast_floats(outputs, jnp.float32)

    def with_own_dtype(self) -> list[nnx.Variable]:
        """Returns the parameters of submodules that were given a `dtype`, once the variables are created."""
        parameters = nnx.to_flat_state(nnx.state(self, nnx.Param))
        return [v for path, v in parameters if self.to_nnx__calls.has_dtype.get("/".join(map(str, path[:-1])))]

    @property
    def __signature__(self) -> inspect.Signature:
        """Arguments of a call."""
        return _without_self(type(self.to_nnx__module).__call__)

    def __getattr__(self, name: str) -> Any:
        """Returns a method of the Linen module, bound to its variables, with the arguments of that method."""
        function = None if name.startswith(("_", "to_nnx__")) else getattr(type(self.to_nnx__module), name, None)
        if not callable(function):
            return super().__getattr__(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self(*args, method=function, **kwargs)

        call.__signature__ = _without_self(function)  # pyright: ignore[reportFunctionMemberAccess]
        return call

    def create_variables(self, loss: LossFunction, batch: Mapping[str, jax.ShapeDtypeStruct], key: jax.Array) -> None:
        """Creates the variables in a pass of the loss on a batch of zeros, of which nothing else is used."""
        zeros = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in batch.items()}
        nnx.bridge.lazy_init(self._run, loss, zeros, key)

    def _run(self, loss: LossFunction, batch: Mapping[str, jax.Array], key: jax.Array) -> None:
        loss(self, batch, key)
