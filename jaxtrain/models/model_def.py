"""Functional view of a Flax module: pure functions on plain trees of parameters and other variables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen, nnx

from jaxtrain.config.schema import LossConfig
from jaxtrain.config.sections.model import ModelConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.errors import UserError
from jaxtrain.losses.functions import LossFunction, loss_function
from jaxtrain.losses.terms import Terms, as_pairs, has_means, split_loss_output
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.flax_module import (
    Path,
    Preparation,
    adapt,
    has_plain_parameters,
    logical_names,
    name_arrays,
    rng_value,
    variables,
)
from jaxtrain.models.linen_module import LinenModule
from jaxtrain.models.scanned_layers import scanned_dims
from jaxtrain.models.spec import is_decoder
from jaxtrain.models.submodule_remat import checkpoint_layers, checkpoint_submodules
from jaxtrain.nn.env import Env
from jaxtrain.nn.param import Param, unwrap
from jaxtrain.nn.stack import checkpoint_policy, checkpointed
from jaxtrain.sharding.rules import Names
from jaxtrain.sharding.sharder import Sharder

Tree = dict[str, Any]


class NonTrainable(NamedTuple):
    """Variables of a model that are not differentiated, as nested dicts.

    Attributes:
        frozen: parameters that keep their values.
        mutable: variables that a forward pass changes, such as batch statistics.
    """

    frozen: Tree
    mutable: Tree


NOTHING = NonTrainable({}, {})


@dataclass(frozen=True, eq=False)
class ModelDef:
    """A model, split once into its graph definition and its variables.

    Attributes:
        params: nested dict of ShapeDtypeStruct: the parameters that are trained.
        names: the same tree, with the logical names of every dim.
        gather_dtypes: the same tree, with the widest dtype in which the model uses a parameter, so that it may be
            gathered in it.
        non_trainable: ShapeDtypeStruct of all other variables, without random streams, which are set in every pass.
        non_trainable_names: the same trees, with logical names.
        rows_are_independent: the model declares that no row of a batch changes what it computes for another one.
        instance: the module whose values are the initial ones, if the model was defined by one.
    """

    params: Tree
    names: Tree
    gather_dtypes: Tree
    non_trainable: NonTrainable
    non_trainable_names: NonTrainable
    rows_are_independent: bool
    instance: nnx.Module | None
    _make: Callable[[nnx.Rngs], nnx.Module]
    _loss: LossFunction
    _checkpointed: Callable[[Callable], Callable]  # rematerialises the whole pass of a model without `env`
    _type: str
    _kinds: dict[Path, str]  # in the order of the state: params, frozen, mutable, key or count
    _variables: dict[Path, nnx.Variable]
    _prepared: dict[Path, Preparation]
    _sharder: Sharder
    _train: Any  # graph definitions
    _evaluate: Any
    _treedef: Any

    @property
    def parameters(self) -> Tree:
        """Shapes and dtypes of all parameters, trained or frozen."""
        return merge_trees(self.params, self.non_trainable.frozen)

    def init(self, key: jax.Array) -> tuple[Tree, NonTrainable]:
        """Returns initial parameters and other variables.

        Jitted with output shardings, it creates every shard on its device. Those of an instance are zeros: its values
        take their place outside of the compiled program.
        """
        if self.instance is not None:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (self.params, self.non_trainable))
            return zeros
        with nnx.use_eager_sharding(False):
            values = {path: variable.get_raw_value() for path, variable in variables(self._make(nnx.Rngs(key))).items()}
        stored = jax.tree.map(lambda s, x: x.astype(s.dtype), self.params, self._tree(values, "params"))
        return stored, NonTrainable(self._tree(values, "frozen"), self._tree(values, "mutable"))

    def bind(
        self, params: Tree, other: NonTrainable = NOTHING, key: jax.Array | None = None, is_training: bool = True
    ) -> Any:
        """Returns the module with these variables, to be used within the same trace.

        Args:
            params: arrays or `SplitGrad`; may hold the frozen parameters, too (`merge_trees`).
            other: variables that are not trained; may be left out if there are none.
            key: random key of the pass; default: a fixed one.
            is_training: False for the module after `eval()`, without dropout and with running statistics.
        """
        leaves = [self._leaf(path, kind, params, other, key) for path, kind in self._kinds.items()]
        with nnx.use_eager_sharding(False):
            graphdef = self._train if is_training else self._evaluate
            return nnx.merge(graphdef, jax.tree.unflatten(self._treedef, leaves))

    def abstract(self) -> Any:
        """Returns the module with shapes instead of arrays, for methods that compute nothing with them."""
        return self.bind(self.params, self.non_trainable)

    def _leaf(self, path: Path, kind: str, params: Tree, other: NonTrainable, key: jax.Array | None) -> Any:
        variable = self._variables[path]
        if kind in ("key", "count"):
            like = variable.get_raw_value()
            return rng_value(path, like, kind == "key", jax.random.key(0) if key is None else key)
        value = _get(params if kind == "params" else getattr(other, kind) or params, path)
        preparation = self._prepared.get(path)
        if preparation is None or isinstance(value, jax.ShapeDtypeStruct):
            return value
        names = _get(self.names if kind == "params" else self.non_trainable_names.frozen, path)
        return self._sharder.gather_weight(unwrap(value), names, *preparation)

    def loss(
        self, params: Tree, other: NonTrainable, batch: Mapping[str, Any], key: jax.Array, is_training: bool = True
    ) -> tuple[Terms, Any, Tree]:
        """Runs the loss of a microbatch. Returns its terms, counts, and the mutable variables after it.

        See `losses.terms.split_loss_output` for terms and counts, and `bind` for the arguments.
        """

        def run(params: Tree, other: NonTrainable, batch: Mapping[str, Any], key: jax.Array) -> Any:
            module = self.bind(params, other, key, is_training)
            with nnx.use_eager_sharding(False):
                rows = len(next(iter(jax.tree.leaves({k: v for k, v in batch.items() if k != "statistics"}))))
                terms, counts = split_loss_output(self._loss(module, batch, key, is_training), rows)
                counts = counts if hasattr(module, "metrics") else as_pairs(counts, rows)
                return terms, counts, self._mutable(module)

        return self._checkpointed(run)(params, other, batch, key)

    def returns_mean(self, batch: Mapping[str, Any]) -> bool:
        """Returns whether the loss of such a batch is a mean, which is then weighted by the rows of a microbatch."""
        found = []

        def run(params: Tree, other: NonTrainable, batch: Mapping[str, Any], key: jax.Array) -> None:
            found.append(has_means(self._loss(self.bind(params, other, key), batch, key)))

        jax.eval_shape(run, self.params, self.non_trainable, batch, jax.random.key(0))
        return found[0]

    def _mutable(self, module: Any) -> Tree:
        """Returns the mutable variables of a module after a pass, to be used within the same trace.

        Raises:
            UserError: the pass removed a variable or changed its shape.
        """
        if not self.non_trainable.mutable:
            return {}
        after = variables(module)
        values: dict[Path, Any] = {}
        for path, kind in self._kinds.items():
            if kind == "mutable":
                before = self._variables[path].get_raw_value()
                value = after[path].get_raw_value() if path in after else None
                if value is None or jnp.shape(value) != before.shape:
                    found = "is gone" if value is None else f"has the shape {jnp.shape(value)}"
                    raise UserError(
                        f"model.type {self._type}: variable {'/'.join(path)} of shape {before.shape} {found} after the "
                        "loss; expected the same shape"
                    )
                if jnp.issubdtype(value.dtype, jnp.inexact) and not jnp.issubdtype(before.dtype, jnp.inexact):
                    raise UserError(
                        f"model.type {self._type}: variable {'/'.join(path)} of {before.dtype} has {value.dtype} "
                        f"after the loss; expected {before.dtype}, or create it with floats"
                    )
                values[path] = jnp.asarray(value, before.dtype)
        return self._tree(values, "mutable")

    def tensors(self) -> dict[str, tuple[tuple[int, ...], Names]]:
        """Returns `a/b/c` -> (shape, logical names) of every variable of the train state but the optimizer's."""
        trees = [(self.params, self.names), *zip(self.non_trainable, self.non_trainable_names)]
        paths = {kind: [p for p, k in self._kinds.items() if k == kind] for kind in ("params", "frozen", "mutable")}
        return {
            "/".join(path): (_get(shapes, path).shape, _get(names, path))
            for (shapes, names), members in zip(trees, paths.values())
            for path in sorted(members)
        }

    def _tree(self, values: Mapping[Path, Any], kind: str) -> Tree:
        return _nested({path: values[path] for path, of in self._kinds.items() if of == kind})


def define_model(
    model: ModelConfig,
    loss: LossConfig,
    env: Env,
    vocab: int | None,
    names_by_path: Mapping[str, Sequence[str | None]] | None = None,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    component: Any = None,
    loss_component: Callable[..., Any] | None = None,
) -> ModelDef:
    """Defines the model of a config without allocating it.

    Args:
        model: the `model` section.
        loss: the `loss` section, for the decoder.
        env: sharding and dtypes; a constructor that takes `env` gets it.
        vocab: vocabulary size of the decoder; not used for other models.
        names_by_path: pattern of a variable's path -> logical names of its dims.
        batch: shapes of a microbatch, from whose loss a Linen module is created.
        component: class, function or module in place of that of `model.type`; a module has its options already.
        loss_component: function in place of that of `loss.function`.

    Raises:
        UserError: the user's class or function cannot be found or called, or two variables have one path.
    """
    run_loss = loss_function(loss, loss_component)
    constructor = _load(model) if component is None else _as_constructor(component)
    takes_env = "env" in _signature(constructor).parameters
    wrap = lambda module, rngs: _create_linen(module, rngs, run_loss, batch, env)  # noqa: E731
    is_made = isinstance(component, (nnx.Module, linen.Module))
    options = {} if is_made else model.options
    make = _constructor(constructor, model.model_copy(update={"options": options}), loss, env, vocab, wrap)
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        preparations, found = adapt(module, env), variables(module)
        prepared = {path: preparations[id(v)] for path, v in found.items() if id(v) in preparations}
        stacked: Mapping[Path, int] = {}
        if batch is not None and has_plain_parameters(module):
            stacked = scanned_dims(module, prepared, run_loss, batch)
        has_parts = _checkpoint_parts(module, () if takes_env else stacked, env)
        is_whole = not (takes_env or has_parts or env.remat == "none")
        names = {
            path: logical_names(path, v, env.sharder, names_by_path or {}, stacked.get(path, 0))
            for path, v in found.items()
        }
        for path, variable in found.items():
            if isinstance(variable, nnx.Param) and path not in prepared:
                variable.set_metadata(names=names[path])
        kinds = {path: _kind(path, variable, names[path], model.frozen) for path, variable in found.items()}
        train, state = nnx.split(_set_mode(module, is_training=True))
        evaluate, _ = nnx.split(_set_mode(module, is_training=False))
    raw = {path: variable.get_raw_value() for path, variable in found.items()}
    used = {path: v.get_metadata().get("gather_dtype", raw[path].dtype) for path, v in found.items()}
    used |= {path: preparation.dtype for path, preparation in prepared.items()}
    shapes = {path: _stored(variable, used[path], env) for path, variable in found.items()}
    shapes_of, names_of = (_trees_by_kind(values, kinds) for values in (shapes, names))
    return ModelDef(
        shapes_of["params"], names_of["params"], _trees_by_kind(used, kinds)["params"],
        NonTrainable(shapes_of["frozen"], shapes_of["mutable"]), NonTrainable(names_of["frozen"], names_of["mutable"]),
        bool(getattr(module, "rows_are_independent", False)),
        component if isinstance(component, nnx.Module) else None, make, run_loss,
        checkpointed(env.remat, env.offload, in_scan=False) if is_whole else lambda run: run, model.type, kinds, found,
        prepared, env.sharder, train, evaluate,
        jax.tree.structure(state),
    )  # fmt: skip


def _checkpoint_parts(module: nnx.Module, stacked: Collection[Path], env: Env) -> bool:
    """Rematerialises submodules by path, else layers that a loop runs. Returns whether there are any."""
    policy = checkpoint_policy(env.remat, env.offload)
    if env.remat_modules:
        checkpoint_submodules(module, env.remat_modules, policy)
        return True
    return checkpoint_layers(module, stacked, policy)


def _kind(path: Path, variable: nnx.Variable, names: Names, frozen: Sequence[str]) -> str:
    """Returns `params`, `frozen`, `mutable`, `key` or `count`."""
    if isinstance(variable, nnx.RngKey):
        return "key"
    if isinstance(variable, nnx.RngCount):
        return "count"
    if not isinstance(variable, nnx.Param):
        return "mutable"
    is_frozen = any(re.fullmatch(pattern, "/".join(path)) or pattern in names for pattern in frozen)
    return "frozen" if is_frozen else "params"


def _stored(variable: nnx.Variable, used: Any, env: Env) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype in the train state: parameters of float32 have the policy's, unless used in float32."""
    value = variable.get_raw_value()
    is_plain = isinstance(variable, nnx.Param) and not isinstance(variable, Param)
    is_cast = is_plain and value.dtype == jnp.float32 and used != jnp.float32
    return jax.ShapeDtypeStruct(value.shape, env.policy.params if is_cast else value.dtype)


def _set_mode(module: nnx.Module, is_training: bool) -> nnx.Module:
    module.train() if is_training else module.eval()
    return module


def _create_linen(
    module: linen.Module, rngs: nnx.Rngs, loss: LossFunction, batch: Mapping[str, jax.ShapeDtypeStruct] | None, env: Env
) -> nnx.Module:
    """Returns a Linen module with its variables.

    Raises:
        UserError: no batch is known.
    """
    if batch is None:
        name = type(module).__name__
        raise UserError(f"model.type: the Linen module {name} is created from a batch; expected data with one")
    wrapped = LinenModule(module, rngs, env.policy.compute)
    wrapped.create_variables(loss, batch, rngs())
    return wrapped


def _load(model: ModelConfig) -> Any:
    """Returns the class of the model, or the function that creates it."""
    return Decoder if model.is_builtin else load_class(model.type, "model.type", "models")


def _as_constructor(component: Any) -> Callable[..., Any]:
    """Returns a class or function itself, and for a module a function that returns a copy with the same variables."""
    if isinstance(component, nnx.Module):
        graphdef, state = nnx.split(component)
        return lambda: nnx.merge(graphdef, state)
    if isinstance(component, linen.Module):
        return lambda: component
    if not callable(component):
        found = type(component).__name__
        raise UserError(f"model: expected a class, a function of `rngs` or a Flax module; found {found}")
    return component


def _signature(make: Any) -> inspect.Signature:
    # Of __init__, because the class itself shows only its metaclass's *args.
    if isinstance(make, partial) and isinstance(make.func, type):
        return inspect.signature(partial(make.func.__init__, None, *make.args, **make.keywords))
    return inspect.signature(make.__init__ if isinstance(make, type) else make)


def _constructor(
    make: Callable[..., Any],
    model: ModelConfig,
    loss: LossConfig,
    env: Env,
    vocab: int | None,
    wrap: Callable[[linen.Module, nnx.Rngs], nnx.Module],
) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns the constructor of the model, by calling a class or function with what it takes.

    `wrap` makes an NNX module of a Linen module, whose constructor takes no `rngs`.
    """
    signature = _signature(make)
    arguments: tuple = ()
    if is_decoder(model):
        if vocab is None:
            raise UserError("model.vocab: the data has no vocabulary; expected the size of the decoder's")
        arguments = (model, loss, vocab)
    takes_env = {"env": env} if "env" in signature.parameters else {}
    try:
        self = (None,) if isinstance(make, type) else ()
        is_linen = isinstance(make, type) and issubclass(make, linen.Module)
        takes_rngs = not is_linen and (isinstance(make, type) or "rngs" in signature.parameters)
        signature.bind(*self, *arguments, **model.options, **takes_env, **({"rngs": None} if takes_rngs else {}))
    except TypeError as error:
        raise UserError(f"model.options: {model.type} does not take them: {error}") from error

    def create(rngs: nnx.Rngs) -> nnx.Module:
        # Flax takes the arrays that a traced constructor creates for constants where `typing.Union` does not see that a
        # tracer is a jax.Array (Python 3.11).
        nnx.register_data_type(type(jnp.zeros(())))
        module = make(*arguments, **model.options, **takes_env, **({"rngs": rngs} if takes_rngs else {}))
        if isinstance(module, linen.Module):
            return wrap(module, rngs)
        if not isinstance(module, nnx.Module):
            raise UserError(f"model.type: {model.type} returned a {type(module).__name__}; expected a Flax module")
        name_arrays(module)
        return module

    return create


@contextmanager
def leaks_in_one_line(model: ModelConfig) -> Iterator[None]:
    """Makes one line of JAX's error about an array of one pass that another one uses.

    Yields:
        Nothing.

    Raises:
        UserError: the traced model has kept such an array.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        raise UserError(
            f"model.type {model.type}: the loss uses an array that it has kept from an earlier pass, in a global or an "
            "attribute; expected such state in an nnx.Variable, or a variable of a Linen collection"
        ) from error


def merge_trees(a: Tree, b: Tree) -> Tree:
    """Returns a nested dict with the leaves of two, which have no path in common."""
    both = {key: merge_trees(a[key], b[key]) for key in a.keys() & b.keys()}
    return {**a, **b, **both}


def select_paths(tree: Tree, like: Tree) -> Tree:
    """Returns the leaves of a nested dict at the paths of another one."""
    return {
        key: select_paths(tree[key], value) if isinstance(value, dict) else tree[key] for key, value in like.items()
    }


def _trees_by_kind(values: Mapping[Path, Any], kinds: Mapping[Path, str]) -> dict[str, Tree]:
    return {k: _nested({p: values[p] for p in kinds if kinds[p] == k}) for k in ("params", "frozen", "mutable")}


def _nested(values: Mapping[Path, Any]) -> Tree:
    tree: Tree = {}
    for path, value in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def _get(tree: Mapping, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree
