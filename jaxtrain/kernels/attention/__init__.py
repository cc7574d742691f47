"""Attention: one entry, several kernels that agree.

`reference` is plain float32; `xla` runs anywhere in linear memory; `cudnn` and `splash` are the fast ones on
NVIDIA GPUs and TPUs. Under `jax.checkpoint`, `save_only_these_names(RESIDUALS)` keeps what these two need for their
backward pass, so that a rematerialised layer does not run its attention twice. Where the rules shard the sequence
(`context`), `context.py` runs one of them, or its own, across the shards.

tests/kernels/test_attention.py runs every kernel on every case against the reference.
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
from jaxtrain.kernels.attention import context_parallel as contexts
from jaxtrain.kernels.attention import cudnn, reference, splash, xla
from jaxtrain.kernels.attention.spec import RESIDUALS, Case, TokenOrder
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
    """Softmax attention of queries to keys and values of (possibly fewer) heads.

    Args:
        q_BTHD: queries [batch, time, heads, head_dim].
        k_BSKD: keys [batch, source, kv_heads, head_dim]; heads is a multiple of kv_heads (GQA, MQA).
        v_BSKD: values, as the keys.
        segments_BT: int document ids; a token sees only its own document. 0 is padding: it sees nothing, its
            output is 0, and nothing sees it. Runs of equal ids must be contiguous in a row.
        positions_BT: int positions of the queries. Without `kv_positions_BS` they must rise along each
            document of a row, so that the order is that of the array, which is what every kernel then tests; under
            `context_parallel="ring"` they must be given, and rise along each document in its natural order.
        kv_segments_BS: document ids of the keys where they are not the queries' own (a KV cache; 0 marks the
            slots that are empty). Default: `segments_BT`.
        kv_positions_BS: int positions of the keys (a KV cache, permuted rows): causality and window are then
            tested by position. Only `reference` and `xla` can.
        causal: a token sees no later one.
        window: tokens seen on the left, the token itself included; without `causal` as many on the right. An
            int, or for `reference` and `xla` a traced int32 scalar (2**30 sees everything).
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118).
        scale: factor of the scores; default head_dim ** -0.5.
        kernel: one of `KERNELS`, or `auto`: the fastest that can do the case on the platform of the mesh.
        context_parallel: how self-attention crosses the shards of a sequence: `gather`, `ulysses`, `ring`, or `auto`
            (see `context_parallel.choose`). `ring` needs rows in the order of `sharding.context_parallel.zigzag`, which
            the host gives them. No effect if the rules do not shard `context`.
        sharder: `cudnn` and `splash` run on the shards of batch, heads and kv_heads that its rules give. Segments
            and positions are best whole on all shards of a sequence, or every layer gathers them.

    Returns:
        [batch, time, heads, head_dim] in the dtype of `q_BTHD`; softmax is in float32.

    Raises:
        ValueError: shapes that do not fit, an unknown kernel, or one that can not do the case.
    """
    _check(q_BTHD, k_BSKD, v_BSKD, causal, window, positions_BT, kv_positions_BS)
    case = Case(causal, window, softcap, q_BTHD.shape[-1] ** -0.5 if scale is None else scale)
    by_position = kv_positions_BS is not None
    own = kv_segments_BS is None and not by_position
    tokens = TokenOrder(
        segments_BT,
        segments_BT if kv_segments_BS is None else kv_segments_BS,
        positions_BT if by_position else None,
        kv_positions_BS,
    )
    sharder = sharder or Sharder()
    device = jax.devices()[0] if sharder.mesh is None else sharder.mesh.devices.flat[0]
    if own and sharder.size(CONTEXT) > 1:
        tokens = TokenOrder(segments_BT, segments_BT, positions_BT, positions_BT)
        return _on_context(kernel, context_parallel, case, tokens, sharder, device, q_BTHD, k_BSKD, v_BSKD)
    kernel = _choose(kernel, case, own, q_BTHD, k_BSKD, device)
    with jax.named_scope(f"attention_{kernel}"):
        if kernel in ("cudnn", "splash"):
            return _on_shards(_self(kernel, case, device), sharder, q_BTHD, k_BSKD, v_BSKD, segments_BT)
        return _plain(kernel, case, device, q_BTHD, k_BSKD, v_BSKD, tokens)


def _plain(kernel: str, case: Case, device: Any, q: Array, k: Array, v: Array, tokens: TokenOrder) -> Array:
    """The kernels that the partitioner can take apart."""
    if kernel == "reference":
        return checkpoint_name(reference.attention(q, k, v, case, tokens), RESIDUALS)
    return checkpoint_name(xla.attention(q, k, v, case, tokens, _block(device)), RESIDUALS)


def _self(kernel: str, case: Case, device: Any) -> Callable[..., Any]:
    """Self-attention in array order of q, k, v and segments, on one shard."""
    if kernel == "cudnn":
        return partial(cudnn.attention, case=case, hopper=_capability(device) >= cudnn.HOPPER)
    if kernel == "splash":
        return partial(splash.attention, case=case, interpret=device.platform == "cpu")
    return lambda q, k, v, segments: _plain(kernel, case, device, q, k, v, TokenOrder(segments, segments))


def _block(device: Any) -> int:
    return xla.CPU_BLOCK if device.platform == "cpu" else xla.BLOCK


def _on_context(
    kernel: str,
    context_parallel: str,
    case: Case,
    tokens: TokenOrder,
    sharder: Sharder,
    device: Any,
    q: Array,
    k: Array,
    v: Array,
) -> Array:
    """Attention across the shards of a sequence."""
    queries, keys = _specs(sharder, q, k, CONTEXT)
    shards = contexts.Shards(sharder, queries, keys, _axes(sharder, CONTEXT))

    def local(q: Array, k: Array) -> Callable:
        return _self(_choose(kernel, case, True, q, k, device), case, device)

    return contexts.attention(
        q,
        k,
        v,
        case,
        tokens,
        formulation=context_parallel,
        kernel=kernel,
        local=local,
        block=_block(device),
        shards=shards,
    )


def _axes(sharder: Sharder, name: str) -> tuple[str, ...]:
    """Mesh axes of several devices that shard a logical name."""
    return tuple(a for a in sharder.axes(name) if sharder.mesh is not None and sharder.mesh.shape[a] > 1)


def _check(q: Array, k: Array, v: Array, causal: bool, window: Any, positions: Any, kv_positions: Any) -> None:
    if q.ndim != 4 or k.ndim != 4 or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise UserError(f"attention: q {q.shape}, k {k.shape}, v {v.shape} are not [batch, time, heads, head_dim]")
    if q.shape[-1] != k.shape[-1] or q.shape[2] % k.shape[2]:
        raise UserError(f"attention: q {q.shape} needs k {k.shape} of its head_dim and of heads that divide its own")
    if kv_positions is not None and positions is None:
        raise UserError("attention: kv_positions_BS needs positions_BT")
    if (causal or window is not None) and kv_positions is None and q.shape[1] != k.shape[1]:
        raise UserError(
            f"attention: {q.shape[1]} queries and {k.shape[1]} keys have no common order: "
            "give positions_BT and kv_positions_BS"
        )
    if isinstance(window, int) and window < 1:
        raise UserError(f"attention: window is {window}; at least 1")


def _choose(kernel: str, case: Case, own: bool, q: Array, k: Array, device: Any) -> str:
    """The kernel to run: the asked one if it can, or for `auto` the platform's own if it can, else `xla`."""
    if kernel not in (*KERNELS, "auto"):
        raise UserError(f"attention: no kernel `{kernel}`; there are auto, {', '.join(KERNELS)}")
    wanted = kernel
    if kernel == "auto":
        wanted = {"gpu": "cudnn", "cuda": "cudnn", "tpu": "splash"}.get(device.platform, "xla")
    reason = _refusal(wanted, case, own, q, k, device)
    if reason is None:
        return wanted
    if kernel == "auto":
        return "xla"
    raise UserError(f"attention: kernel `{kernel}` {reason}; `xla` and `reference` can do it")


def _refusal(kernel: str, case: Case, own: bool, q: Array, k: Array, device: Any) -> str | None:
    if kernel in ("reference", "xla"):
        return None
    if not own:
        return "does self-attention in array order, not kv_segments_BS or kv_positions_BS"
    if q.shape[-1] != k.shape[-1]:
        return "needs one head_dim"
    if kernel == "splash":
        if device.platform not in ("tpu", "cpu"):
            return f"runs on TPU (and, interpreted, on CPU), not on {device.platform}"
        return splash.refusal(case, q.shape, k.shape)
    if not _capability(device):
        return f"runs on NVIDIA GPUs, not on {device.platform}"
    return cudnn.refusal(case, q.shape, k.shape, q.dtype, _capability(device) >= cudnn.HOPPER)


def _capability(device: Any) -> tuple[int, ...]:
    """CUDA compute capability, e.g. (9, 0); () for anything but an NVIDIA GPU."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    return tuple(map(int, parts)) if device.platform in ("gpu", "cuda") and all(p.isdigit() for p in parts) else ()


def _on_shards(run: Any, sharder: Sharder, q: Array, k: Array, v: Array, segments: Array | None) -> Array:
    """`run` on each device's own batch rows and heads, with every mesh axis manual: kernels can not be partitioned.

    check_vma=False, which they need too; so never differentiate inside.
    """
    if sharder.mesh is None or sharder.mesh.size == 1:
        return run(q, k, v, segments)
    queries, keys = _specs(sharder, q, k, None)
    specs = (queries, keys, keys, None if segments is None else sharder.spec((BATCH, None)))
    return sharder.shard_map(run, specs, queries)(q, k, v, segments)


def _specs(sharder: Sharder, q: Array, k: Array, time: str | None) -> tuple[PartitionSpec, PartitionSpec]:
    """Places of the queries and of the keys, whose tokens have the logical name `time`."""
    kv_heads = None if k.shape[2] == 1 else "kv_heads"
    for name, size in ((BATCH, q.shape[0]), ("heads", q.shape[2]), (kv_heads, k.shape[2])):
        if size % sharder.size(name):
            raise UserError(f"attention: {size} {name} over {sharder.size(name)} shards of {sharder.axes(name)}")
    if kv_heads and _axes(sharder, "heads") != _axes(sharder, "kv_heads"):
        raise UserError(
            f"attention: heads lie on {sharder.axes('heads')} and kv_heads on {sharder.axes('kv_heads')}; "
            "shard both alike, or repeat the key and value weights up to the axis"
        )
    return sharder.spec((BATCH, time, "heads", None)), sharder.spec((BATCH, time, kv_heads, None))
