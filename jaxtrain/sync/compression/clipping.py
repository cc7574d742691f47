"""Clipping of the gradients of each replica, before what they make of them is sent."""

from __future__ import annotations

from typing import Any

import jax

from jaxtrain.optim.optimizers import clip_by_global_norm

Tree = Any


def clip_replicas(grads: Tree, max_norm: float | None, names: Tree) -> tuple[Tree, jax.Array]:
    """Returns gradients [replicas, ...] scaled to a norm of at most `max_norm` sqrt(replicas), and norms [replicas].

    With independent noise the mean of so many gradients has a norm that is sqrt(replicas) times smaller. In Lin et al.
    2018 (arXiv 1712.01887), whose gradients of replicas are summed, that is `max_norm` / sqrt(replicas).

    Args:
        grads: of each replica; their mean is that of the batch.
        max_norm: of the gradient of the batch; None: no clipping.
        names: logical names of the dims of the parameters.
    """
    replicas = len(jax.tree.leaves(grads)[0])
    limit = None if max_norm is None else max_norm * replicas**0.5
    return jax.vmap(lambda grads: clip_by_global_norm(grads, limit, names))(grads)
