"""Precision policies: the dtype of each kind of tensor."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Policy:
    """Dtypes of one run.

    params: stored parameters and their gradients; compute: weights in use, activations and their cotangents;
    state: optimizer moments; matmul: precision of float32 matmuls where the chip has several. Softmax, norms, loss
    sums, gradient norm and accumulation are float32 always. `scales`: the loss is scaled, because gradients would
    fall below the smallest numbers of `compute`.
    """

    params: jnp.dtype
    compute: jnp.dtype
    state: jnp.dtype
    matmul: str = "default"
    scales: bool = False


_F32, _BF16, _F16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)

POLICIES = {
    "fp32": Policy(params=_F32, compute=_F32, state=_F32, matmul="highest"),
    "bf16": Policy(params=_F32, compute=_BF16, state=_F32),
    "fp16": Policy(params=_F32, compute=_F16, state=_F32, scales=True),
    "bf16_pure": Policy(params=_BF16, compute=_BF16, state=_BF16),
}
