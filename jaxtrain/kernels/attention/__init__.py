"""Attention: one function, several kernels with equal results.

`reference` is plain float32; `xla` runs anywhere in linear memory; `cudnn` and `splash` are the fast kernels of NVIDIA
GPUs and TPUs. Under `jax.checkpoint`, `save_only_these_names(RESIDUALS)` saves the residuals of these two, so that a
rematerialised layer does not run its attention twice. If the rules shard the sequence (`context`), `context_parallel`
runs one of the kernels, or its own, across the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtrain.errors import UserError
from jaxtrain.kernels.attention import context_parallel as cp
from jaxtrain.kernels.attention import cudnn, reference, splash, xla
from jaxtrain.kernels.attention.spec import RESIDUALS, AttnSpec, TokenOrder
from jaxtrain.sharding.rules import BATCH, CONTEXT
from jaxtrain.sharding.sharder import Sharder

__all__ = ["KERNELS", "RESIDUALS", "attention"]

KERNELS = ("reference", "xla", "cudnn", "splash")


def attention(
    q_BTHD: Array,
    k_BSKD: Array,
    v_BSKD: Array,
    *,
    segments_BT: Array | None = None,
    positions_BT: Array | None = None,
    kv_segments_BS: Array | None = None,
    kv_positions_BS: Array | None = None,
    causal: bool = True,
    window: int | Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    context_parallel: str = "auto",
    sharder: Sharder | None = None,
) -> Array:
    """Computes softmax attention of queries to keys and values of (possibly fewer) heads.

    Args:
        q_BTHD: queries [batch, time, heads, head_dim].
        k_BSKD: keys [batch, source, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA).
        v_BSKD: values, as the keys.
        segments_BT: int document ids; a token attends only to its own document. 0 is padding: it attends to nothing,
            its output is 0, and nothing attends to it. Equal ids must be contiguous in a row.
        positions_BT: int positions of the queries. Without `kv_positions_BS` they must increase along each document of
            a row, because kernels then test the order in the array; under `context_parallel="ring"` they are required,
            and must increase along each document in its natural order.
        kv_segments_BS: document ids of the keys if these are not the queries' tokens (a KV cache; 0 marks empty slots).
            Default: `segments_BT`.
        kv_positions_BS: int positions of the keys (a KV cache, permuted rows): causality and window are then tested by
            position. Supported by `reference` and `xla` only.
        causal: a token does not attend to later ones.
        window: tokens visible on the left, including the token itself; without `causal` as many on the right. An int,
            or for `reference` and `xla` a traced int32 scalar (2**30 for no window).
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118).
        scale: factor of the scores; default head_dim ** -0.5.
        kernel: one of `KERNELS`, or `auto`: the fastest that supports the options on the platform of the mesh.
        context_parallel: method for a sharded sequence: `gather`, `ulysses`, `ring`, or `auto` (see
            `context_parallel.choose_method`). `ring` needs rows in the order of `sharding.context_parallel.zigzag`. No
            effect if the rules do not shard `context`.
        sharder: mesh and rules; `cudnn` and `splash` run on the shards of batch, heads and kv_heads. Segments and
            positions should be replicated over the shards of a sequence, else every layer gathers them.

    Returns:
        [batch, time, heads, head_dim] in the dtype of `q_BTHD`; softmax is in float32.

    Raises:
        ValueError: shapes do not fit, the kernel is unknown, or it does not support the options.
    """
    _check_shapes(q_BTHD, k_BSKD, v_BSKD, causal, window, positions_BT, kv_positions_BS)
    spec = AttnSpec(causal, window, softcap, q_BTHD.shape[-1] ** -0.5 if scale is None else scale)
    is_self = kv_segments_BS is None and kv_positions_BS is None
    kv_segments_BS = segments_BT if kv_segments_BS is None else kv_segments_BS
    order_BT = None if kv_positions_BS is None else positions_BT
    tokens = TokenOrder(segments_BT, kv_segments_BS, order_BT, kv_positions_BS)
    sharder = sharder or Sharder()
    device = jax.devices()[0] if sharder.mesh is None else sharder.mesh.devices.flat[0]
    if is_self and sharder.size(CONTEXT) > 1:
        tokens = TokenOrder(segments_BT, segments_BT, positions_BT, positions_BT)
        return _context_parallel(kernel, context_parallel, spec, tokens, sharder, device, q_BTHD, k_BSKD, v_BSKD)
    kernel = _choose(kernel, spec, is_self, q_BTHD, k_BSKD, device)
    with jax.named_scope(f"attention_{kernel}"):
        if kernel in ("cudnn", "splash"):
            return _sharded(_self_attention(kernel, spec, device), sharder, q_BTHD, k_BSKD, v_BSKD, segments_BT)
        return _partitionable(kernel, spec, device, q_BTHD, k_BSKD, v_BSKD, tokens)


def _partitionable(kernel: str, spec: AttnSpec, device: Any, q: Array, k: Array, v: Array, tokens: TokenOrder) -> Array:
    """Runs a kernel of plain XLA operations, which the partitioner can shard."""
    if kernel == "reference":
        return checkpoint_name(reference.attention(q, k, v, spec, tokens), RESIDUALS)
    return checkpoint_name(xla.attention(q, k, v, spec, tokens, _block(device)), RESIDUALS)


def _self_attention(kernel: str, spec: AttnSpec, device: Any) -> Callable[..., Any]:
    """Returns self-attention in array order, a function of q, k, v and segments of one shard."""
    if kernel == "cudnn":
        return partial(cudnn.attention, spec=spec, hopper=_capability(device) >= cudnn.HOPPER)
    if kernel == "splash":
        return partial(splash.attention, spec=spec, interpret=device.platform == "cpu")
    return lambda q, k, v, segments: _partitionable(kernel, spec, device, q, k, v, TokenOrder(segments, segments))


def _block(device: Any) -> int:
    """Returns the queries per block of the XLA kernel."""
    return xla.CPU_BLOCK if device.platform == "cpu" else xla.BLOCK


def _context_parallel(
    kernel: str,
    context_parallel: str,
    spec: AttnSpec,
    tokens: TokenOrder,
    sharder: Sharder,
    device: Any,
    q: Array,
    k: Array,
    v: Array,
) -> Array:
    """Runs attention across the shards of a sequence."""
    queries, keys = _specs(sharder, q, k, CONTEXT)
    shards = cp.Shards(sharder, queries, keys, _axes(sharder, CONTEXT))

    def local(q: Array, k: Array) -> Callable:
        return _self_attention(_choose(kernel, spec, True, q, k, device), spec, device)

    block = _block(device)
    return cp.attention(
        q, k, v, spec, tokens, method=context_parallel, kernel=kernel, local=local, block=block, shards=shards
    )


def _axes(sharder: Sharder, name: str) -> tuple[str, ...]:
    """Returns the mesh axes with several devices that shard a logical name."""
    return tuple(a for a in sharder.axes(name) if sharder.mesh is not None and sharder.mesh.shape[a] > 1)


def _check_shapes(q: Array, k: Array, v: Array, causal: bool, window: Any, positions: Any, kv_positions: Any) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise UserError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} are not [batch, time, heads, head_dim]")
    if q.shape[-1] != k.shape[-1] or q.shape[2] % k.shape[2]:
        raise UserError(f"attention: q {q.shape} and k {k.shape} need equal head_dim, and heads a multiple of kv_heads")
    if kv_positions is not None and positions is None:
        raise UserError("attention: kv_positions_BS needs positions_BT")
    if (causal or window is not None) and kv_positions is None and q.shape[1] != k.shape[1]:
        raise UserError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys have no common order; "
            "expected positions_BT and kv_positions_BS"
        )
    if isinstance(window, int) and window < 1:
        raise UserError(f"attention: window is {window}; expected at least 1")


def _choose(kernel: str, spec: AttnSpec, is_self: bool, q: Array, k: Array, device: Any) -> str:
    """Returns the kernel to run; for `auto` that of the platform if it supports the options, else `xla`."""
    if kernel not in (*KERNELS, "auto"):
        raise UserError(f"attention: no kernel `{kernel}`; expected auto, {', '.join(KERNELS)}")
    of_platform = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(device.platform, "xla")
    chosen = of_platform if kernel == "auto" else kernel
    reason = _unsupported_reason(chosen, spec, is_self, q, k, device)
    if reason is None:
        return chosen
    if kernel == "auto":
        return "xla"
    raise UserError(f"attention: kernel `{kernel}` {reason}; `xla` and `reference` support it")


def _unsupported_reason(kernel: str, spec: AttnSpec, is_self: bool, q: Array, k: Array, device: Any) -> str | None:
    if kernel in ("reference", "xla"):
        return None
    if not is_self:
        return "supports self-attention in array order, not kv_segments_BS or kv_positions_BS"
    if q.shape[-1] != k.shape[-1]:
        return "needs one head_dim"
    if kernel == "splash":
        if device.platform not in ("tpu", "cpu"):
            return f"runs on TPU (and, interpreted, on CPU), not on {device.platform}"
        return splash.unsupported_reason(spec, q.shape, k.shape)
    if not _capability(device):
        return f"runs on NVIDIA GPUs, not on {device.platform}"
    return cudnn.unsupported_reason(spec, q.shape, k.shape, q.dtype, _capability(device) >= cudnn.HOPPER)


def _capability(device: Any) -> tuple[int, ...]:
    """Returns the CUDA compute capability, e.g. (9, 0); () for other devices than NVIDIA GPUs."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, parts)) if device.platform in ("gpu", "cuda") and all(p.isdigit() for p in parts) else ()


def _sharded(run: Any, sharder: Sharder, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    """Runs `run` on the batch rows and heads of each device in a shard_map, since kernels can not be partitioned."""
    if sharder.mesh is None or sharder.mesh.size == 1:
        return run(q, k, v, segments)
    queries, keys = _specs(sharder, q, k, None)
    specs = (queries, keys, keys, None if segments is None else sharder.spec((BATCH, None)))
    return sharder.shard_map(run, specs, queries)(q, k, v, segments)


def _specs(sharder: Sharder, q: Array, k: Array, time: str | None) -> tuple[PartitionSpec, PartitionSpec]:
    """Returns the PartitionSpecs of queries and keys, whose tokens have the logical name `time`."""
    kv_heads = None if k.shape[2] == 1 else "kv_heads"
    for name, size in ((BATCH, q.shape[0]), ("heads", q.shape[2]), (kv_heads, k.shape[2])):
        if size % sharder.size(name):
            raise UserError(
                f"attention: {size} {name} are not divisible by {sharder.size(name)} shards of {sharder.axes(name)}"
            )
    if kv_heads and _axes(sharder, "heads") != _axes(sharder, "kv_heads"):
        raise UserError(
            f"attention: heads are sharded over {sharder.axes('heads')}, kv_heads over {sharder.axes('kv_heads')}; "
            "expected the same axes, or key and value weights repeated up to the axis"
        )
    return sharder.spec((BATCH, time, "heads", None)), sharder.spec((BATCH, time, kv_heads, None))
