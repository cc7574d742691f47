"""FLOPs of a train step, counted from the config.

Only matrix multiplications count, [m, k] x [k, n] as 2 m n k. Causal attention counts the keys that a query sees,
(T + 1) / 2 of a sequence of T on average, fewer with a window; packed sequences count as one document. The embedding
lookup is free, the head counts. Backward is twice forward. *Hardware* FLOPs add recomputation in the backward pass: by
rematerialisation, and of the logits, which the fused cross-entropy does not store. Recomputation inside an attention
kernel does not count. PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) defines MFU and HFU in this way, but
for causality.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.sections.model import ModelConfig

CONVENTION = "matmuls 2mnk, causal attention as causal, window respected, head counted, backward 2x forward"


@dataclass(frozen=True)
class Flops:
    """FLOPs per token (or per item): `model` for MFU, `hardware` for HFU, None if unknown."""

    model: float
    hardware: float | None
    convention: str = CONVENTION


def decoder_flops(
    model: ModelConfig, vocab: int, sequence: int, remat: str | tuple[str, ...] = "none", recomputes_logits: bool = True
) -> Flops:
    """Returns the FLOPs of a train step of the decoder, per token.

    Args:
        model: the `model` section.
        vocab: size of the head.
        sequence: tokens per sequence, T.
        remat: `none`, `full`, `dots`, or the names of saved values.
        recomputes_logits: whether the backward pass computes the logits again (see `kernels.cross_entropy`).
    """
    head = 2 * model.embed * vocab
    forward, again = float(head), float(recomputes_logits * head)
    for layers, window in layer_windows(model):
        terms = layer_matmuls(model, attended(sequence, window))
        forward += layers * sum(terms.values())
        again += layers * sum(terms[name] for name in recomputed(model, remat))
    return Flops(3 * forward, 3 * forward + again)


def layer_windows(model: ModelConfig) -> list[tuple[int, int | None]]:
    """Returns (number of layers, their window) pairs; the last layer of every `sliding_window_pattern` is global."""
    everywhere = 0 if model.sliding_window_pattern == 1 else model.layers // model.sliding_window_pattern
    return [(model.layers - everywhere, model.sliding_window), (everywhere, None)]


def attended(sequence: int, window: int | None) -> float:
    """Returns the keys that a query sees, averaged over the positions of a sequence."""
    near = min(window or sequence, sequence)
    return (near * (near + 1) / 2 + (sequence - near) * near) / sequence


def mean_attended(model: ModelConfig, sequence: int) -> float:
    """Returns `attended`, averaged over the layers."""
    return sum(layers * attended(sequence, window) for layers, window in layer_windows(model)) / model.layers


def layer_matmuls(model: ModelConfig, keys: float) -> dict[str, float]:
    """Returns the forward FLOPs per token of each matrix multiplication of one layer, at `keys` keys per query.

    Only the experts of a token count, whatever their capacity.
    """
    moe = model.moe
    head_dim = model.head_dim or model.embed // model.heads
    queries, kv = model.heads * head_dim, (model.kv_heads or model.heads) * head_dim
    terms = {
        "q": 2.0 * model.embed * queries,
        "k": 2.0 * model.embed * kv,
        "v": 2.0 * model.embed * kv,
        "scores": 2.0 * queries * keys,
        "attention": 2.0 * queries * keys,
        "o": 2.0 * queries * model.embed,
    }
    terms |= _feed_forward(model, model.mlp if moe is None else moe.shared_experts * model.mlp)
    if moe is None:
        return terms
    routed = _feed_forward(model, moe.top_k * model.mlp)
    return terms | {"router": 2.0 * model.embed * moe.num_experts} | {f"experts_{k}": v for k, v in routed.items()}


def _feed_forward(model: ModelConfig, width: int) -> dict[str, float]:
    """Returns the matrix multiplications of a feed-forward layer of this width; `gelu` has no gate."""
    inner = ("up",) if model.activation == "gelu" else ("gate", "up")
    return dict.fromkeys((*inner, "down"), 2.0 * model.embed * width)


def recomputed(model: ModelConfig, remat: str | tuple[str, ...]) -> set[str]:
    """Returns the matrix multiplications of a layer that the backward pass recomputes.

    These are the ones it needs and that are not saved. Outputs of o and down are needed only by a norm that follows
    (the second residual of a layer is the next layer's input, which the scan saves), those of q and k before a norm.
    """
    # Dropless experts always recompute their hidden activations, experts with a capacity only under remat.
    inner = {"experts_up"} if model.activation == "gelu" else {"experts_gate", "experts_up"}
    if remat == "none":
        return inner if model.moe is not None and model.moe.capacity_factor is None else set()
    experts = set() if model.moe is None else {*inner, "experts_down"}
    if remat == "dots":  # matmuls with batch dims are not saved
        return {"scores", "attention"} | experts
    saved = set() if remat == "full" else set(remat)
    needed = {"q", "k", "v", "scores", "attention", "o", "up"} | experts | ({"router"} if experts else set())
    if model.activation != "gelu":
        needed.add("gate")
    needed -= saved - ({"q", "k"} if model.qk_norm != "none" else set())
    if "attention" in saved:
        needed.discard("scores")
    if model.norm_placement != "pre":
        return needed | {"o", "down"}
    return needed - {"o"} if "residual" in saved else needed


def user_flops(model: Any, shapes: Mapping[str, tuple[int, ...]], items: int) -> Flops | None:
    """Returns the FLOPs of a user's model, if it counts them (see `models.protocols.CountsFlops`), else None.

    Args:
        model: the module.
        shapes: batch key -> shape of a global batch.
        items: tokens or items of the global batch.
    """
    if not hasattr(model, "flops"):  # not isinstance of `CountsFlops`, whose module imports JAX
        return None
    return Flops(float(model.flops(dict(shapes))) / items, None, "as counted by the model")


def utilization(flops_per_token: float | None, tokens_per_sec: float, peak_flops: float | None) -> float | None:
    """Returns the share of the peak in use, 0 to 1, for a rate and a peak of one device; None if either is unknown."""
    if flops_per_token is None or not peak_flops:
        return None
    return flops_per_token * tokens_per_sec / peak_flops
