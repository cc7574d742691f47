"""Precision policies: the dtype of each kind of tensor."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp


@dataclass(frozen=True)
class Policy:
    """Dtypes of a run. Softmax, norms, loss sums, gradient norm and accumulation are always float32.

    Attributes:
        params: stored parameters and their gradients.
        compute: weights in use, activations and their cotangents.
        state: optimizer moments.
        matmul: precision of float32 matmuls on chips that have several.
        scales_loss: the loss is scaled, because gradients would underflow in `compute`.
    """

    params: jnp.dtype
    compute: jnp.dtype
    state: jnp.dtype
    matmul: str = "default"
    scales_loss: bool = False


_F32, _BF16, _F16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)

POLICIES = {
    "fp32": Policy(params=_F32, compute=_F32, state=_F32, matmul="highest"),
    "bf16": Policy(params=_F32, compute=_BF16, state=_F32),
    "fp16": Policy(params=_F32, compute=_F16, state=_F32, scales_loss=True),
    "bf16_pure": Policy(params=_BF16, compute=_BF16, state=_BF16),
}
