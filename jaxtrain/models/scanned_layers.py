"""Detection of stacked layers: parameters of a plain model that its loss reads layer by layer in a `lax.scan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Literal, primitives

from jaxtrain.losses.functions import LossFunction
from jaxtrain.models.flax_module import Path, Preparation, variables

# Operations of one input after which a parameter is still the same, dim by dim.
SAME = {"convert_element_type", "sharding_constraint", "copy", "stop_gradient", "reduce_precision"}
BODIES = {"jaxpr", "call_jaxpr", "body_jaxpr", "branches"}  # parameters of calls and loops


def scanned_dims(
    module: nnx.Module,
    preparations: Mapping[Path, Preparation],
    loss: LossFunction,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[Path, int]:
    """Traces the loss of a module. Returns path of a variable -> number of its leading dims over which loops run.

    Args:
        module: adapted, of abstract arrays; it is not changed.
        preparations: path of a parameter -> its preparation in front of a pass.
        loss: called with the module, a batch and a random key.
        batch: shapes of a batch.
    """
    graphdef, state = nnx.split(module)
    (leaves, treedef), paths = jax.tree.flatten(state), list(variables(module))

    def run(leaves: list[Any], batch: Mapping[str, Any], key: jax.Array) -> None:
        used = [x.astype(preparations[p].dtype) if p in preparations else x for p, x in zip(paths, leaves)]
        loss(nnx.merge(graphdef, jax.tree.unflatten(treedef, used)), batch, key)

    found = _scanned_inputs(jax.make_jaxpr(run)(leaves, batch, jax.random.key(0)).jaxpr)
    return {path: found[index] for index, path in enumerate(paths) if index in found}


def _scanned_inputs(jaxpr: Any) -> dict[int, int]:
    """Returns position of an input -> number of its leading dims over which loops run, for those with any."""
    found: dict[int, int] = {}
    source = {variable: index for index, variable in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        inputs = [None if isinstance(v, Literal) else source.get(v) for v in eqn.invars]
        if eqn.primitive.name in SAME and inputs[0] is not None:
            source[eqn.outvars[0]] = inputs[0]
        sliced = len(inputs) - _sliced_operands(eqn)
        inner: dict[int, int] = dict.fromkeys(range(sliced, len(inputs)), 0)
        for body, skipped in _bodies(eqn):
            inner |= {index + skipped: dims for index, dims in _scanned_inputs(body).items()}
        for index, dims in inner.items():
            at = inputs[index]
            if at is not None:
                found[at] = max(found.get(at, 0), dims + (index >= sliced))
    return found


def _sliced_operands(eqn: Any) -> int:
    """Returns the number of last operands of which a loop reads one slice in each iteration."""
    if eqn.primitive is not primitives.scan_p:
        return 0
    # The rank tells: these have one dim more outside of the body. The parameters that count them depend on the version.
    (body, _), *_ = _bodies(eqn)
    return sum(outer.aval.ndim > inner.aval.ndim for outer, inner in zip(eqn.invars, body.invars, strict=True))


def _bodies(eqn: Any) -> Iterator[tuple[Any, int]]:
    """Yields the jaxprs that an operation runs, each with the number of operands in front of its inputs."""
    for name in BODIES & eqn.params.keys():
        bodies = eqn.params[name]
        for body in bodies if isinstance(bodies, tuple) else (bodies,):
            jaxpr = getattr(body, "jaxpr", body)
            yield jaxpr, len(eqn.invars) - len(jaxpr.invars)
