"""A pull-back in two parts: the same gradients, no work twice, and no more kept between them than theory says."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from jaxtrain.config.schema import Config
from jaxtrain.kernels.moe.balance import router_z
from jaxtrain.mesh.rules import BATCH, SEQUENCE
from jaxtrain.mesh.sharding import Sharder
from jaxtrain.models.define import define, make_env
from jaxtrain.nn.env import Env
from jaxtrain.nn.rope import frequencies, rotation
from jaxtrain.nn.stack import scan
from jaxtrain.pipeline.cut import SINK, SOURCE, Graph
from jaxtrain.pipeline.split import split

B, T, D, F, L = 2, 8, 16, 32, 3
REMATS = ("none", "full", "dots", ("attention", "residual"))


def taken(stage, params, x):
    """A stage's pull-back as (pull, kept, given, dy): of its residuals those are given that are parameters."""
    y, pull = jax.vjp(stage, params, x)
    leaves, tree = jax.tree.flatten(pull)
    known = jax.tree.leaves(params)
    source = [next((i for i, own in enumerate(known) if own is leaf), None) for leaf in leaves]

    def rebuilt(kept, given, dy):
        rest, known = iter(kept), jax.tree.leaves(given)
        return jax.tree.unflatten(tree, [next(rest) if i is None else known[i] for i in source])(dy)

    keys = iter(jax.random.split(jax.random.key(9), len(jax.tree.leaves(y))))
    dy = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape, leaf.dtype), y)
    return rebuilt, [leaf for leaf, i in zip(leaves, source) if i is None], params, dy


def parts(pull, kept, given, dy):
    """The split, and functions of the same arguments: B's results, and W's from them."""
    cut = split(pull, kept, given, dy)

    def weights(kept, given, between, dy):
        return cut.w([kept[i] for i in cut.kept], given, between, [jax.tree.leaves(dy)[i] for i in cut.dy])

    return cut, weights


def check(stage, params, x, exact: bool = True):
    """That B and W, compiled apart, give what the pull-back gives, with the same matmuls. Returns the split."""
    case = taken(stage, params, x)
    pull, kept, given, dy = case
    cut, weights = parts(*case)
    dw, dx = jax.jit(pull)(kept, given, dy)
    own_dx, between = jax.jit(cut.b)(kept, given, dy)
    own_dw = jax.jit(weights)(kept, given, between, dy)
    assert [(x.shape, x.dtype) for x in between] == [(x.shape, x.dtype) for x in cut.between]
    for own, whole in zip(jax.tree.leaves((own_dw, own_dx)), jax.tree.leaves((dw, dx)), strict=True):
        assert own.dtype == whole.dtype
        own, whole = np.asarray(own, np.float64), np.asarray(whole, np.float64)
        tight = 1e-6 * np.abs(whole).max() if exact else 2**-8 * np.abs(whole).max()
        np.testing.assert_allclose(own, whole, rtol=0, atol=tight)
    flops = [matmuls(fn, *args) for fn, args in (
        (pull, (kept, given, dy)), (cut.b, (kept, given, dy)), (weights, (kept, given, between, dy))
    )]  # fmt: skip
    assert flops[1] + flops[2] == flops[0]
    return cut, case, flops


def matmuls(fn, *args) -> int:
    """FLOPs of all matmuls of a function whose results are all wanted, loops' as often as they run."""

    def of(jaxpr: Any) -> int:
        total = 0
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                (contracted, _), _ = eqn.params["dimension_numbers"]
                left = eqn.invars[0].aval.shape
                total += 2 * eqn.outvars[0].aval.size * int(np.prod([left[dim] for dim in contracted]))
            for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(inner, "eqns"):
                    total += of(inner) * eqn.params.get("length", 1)
        return total

    return of(jax.make_jaxpr(fn)(*args))


def normal(seed: int, *shape: int, dtype: Any = jnp.float32):
    return 0.3 * jax.random.normal(jax.random.key(seed), shape, dtype)


def layer(weights, x):
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def two_matmuls(remat: str | None):
    """Layers of two matmuls in a scan, under a policy of `jax.checkpoint`."""
    policy = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}

    def stage(params, x):
        step = lambda x, w: (layer(w, x), None)  # noqa: E731
        return lax.scan(step if remat is None else jax.checkpoint(step, policy=policy[remat]), x, params)[0]

    return stage, {"up": normal(0, L, D, F), "down": normal(1, L, F, D)}, normal(2, B, T, D)


def nbytes(shapes) -> int:
    return sum(x.size * x.dtype.itemsize for x in shapes)
