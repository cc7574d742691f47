"""The decoder written again in NumPy float64, token by token and head by head: the reference of the tests."""

from __future__ import annotations

import math

import numpy as np

from jaxtrain.config.sections.model import ModelConfig


def logits(
    params: dict, model: ModelConfig, tokens: np.ndarray, positions: np.ndarray, segments: np.ndarray
) -> np.ndarray:
    """float64 logits [B, T, V]."""
    params = _float64(params)
    return np.stack([_row(params, model, *row) for row in zip(tokens, positions, segments)])


def _float64(tree):
    return {k: _float64(v) for k, v in tree.items()} if isinstance(tree, dict) else np.asarray(tree, np.float64)


def _row(params, model, tokens, positions, segments):
    x = params["embed"]["table"][tokens]
    x = x * model.embed_multiplier
    if "positions" in params:
        x = x + params["positions"]["table"][positions]
    for layer in range(model.layers):
        weights = _slice(params["layers"], layer)
        is_global = (
            model.sliding_window_pattern > 1
            and layer % model.sliding_window_pattern == model.sliding_window_pattern - 1
        )
        window = None if is_global else model.sliding_window
        normed = x if model.norm_placement == "post" else _norm(x, weights["attention_norm"], model)
        branch = _attention(weights["attention"], model, normed, positions, segments, window)
        branch = _norm(branch, weights["attention_post_norm"], model) if model.norm_placement != "pre" else branch
        x = x + model.residual_multiplier * branch
        normed = x if model.norm_placement == "post" else _norm(x, weights["mlp_norm"], model)
        branch = _feed_forward(weights, model, normed, segments)
        branch = _norm(branch, weights["mlp_post_norm"], model) if model.norm_placement != "pre" else branch
        x = x + model.residual_multiplier * branch
    x = _norm(x, params["final_norm"], model)
    out = 1 / model.logits_divisor * x @ (params["embed"]["table"].T if model.tie_embeddings else params["head"])
    cap = model.logits_softcap
    return out if cap is None else cap * np.tanh(out / cap)


def _slice(tree, layer):
    return {k: _slice(v, layer) for k, v in tree.items()} if isinstance(tree, dict) else tree[layer]


def _norm(x, weights, model):
    if model.norm == "layernorm":
        deviation = np.sqrt(x.var(-1, keepdims=True) + model.norm_epsilon)
        return (x - x.mean(-1, keepdims=True)) / deviation * weights["scale"] + weights["bias"]
    scale = weights["scale"] + (1.0 if model.norm == "gemma_rmsnorm" else 0.0)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_epsilon) * scale


def _rope(x, position, model, window):
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        is_own = window is not None and model.sliding_window_rope_theta is not None
        frequency = (model.sliding_window_rope_theta if is_own else model.rope_theta) ** (-2 * i / len(x))
        scaling = None if is_own else model.rope_scaling
        if scaling is not None and scaling.type == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / frequency
            if wavelength > scaling.original_length / scaling.low_freq_factor:
                frequency /= scaling.factor
            elif wavelength > scaling.original_length / scaling.high_freq_factor:
                smooth = scaling.original_length / wavelength - scaling.low_freq_factor
                smooth /= scaling.high_freq_factor - scaling.low_freq_factor
                frequency = (1 - smooth) * frequency / scaling.factor + smooth * frequency
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def _attention(weights, model, x, positions, segments, window):
    heads, kv_heads = model.heads, model.kv_heads or model.heads

    def project(name, head):
        out = x @ weights[name][:, head]
        return out + weights[f"{name}_bias"][head] if f"{name}_bias" in weights else out

    def turned(name, head):
        out = project(name, head)
        if model.qk_norm == "full":
            norm = weights[f"{name}_norm"]
            shape = norm["scale"].shape
            together = np.concatenate([project(name, one) for one in range(shape[0])], -1)
            flat = {part: value.reshape(-1) for part, value in norm.items()}
            out = _norm(together, flat, model).reshape(len(x), *shape)[:, head]
        elif model.qk_norm == "per_head":
            out = _norm(out, weights[f"{name}_norm"], model)
        if model.learned_positions is not None:
            return out
        return np.stack([_rope(row, position, model, window) for row, position in zip(out, positions)])

    total = np.zeros_like(x)
    for head in range(heads):
        q, k, v = turned("q", head), turned("k", head * kv_heads // heads), project("v", head * kv_heads // heads)
        scores = q @ k.T * (model.attention_scale or q.shape[-1] ** -0.5)
        if model.attention_softcap:
            scores = model.attention_softcap * np.tanh(scores / model.attention_softcap)
        for t in range(len(x)):
            seen = [
                s for s in range(t + 1) if segments[s] == segments[t] > 0 and (window is None or t - s < window)
            ]  # fmt: skip
            if seen:
                p = np.exp(scores[t, seen] - scores[t, seen].max())
                total[t] += (p / p.sum()) @ v[seen] @ weights["o"][:, head].T
    return total + weights["o_bias"] if "o_bias" in weights else total


def _feed_forward(weights, model, x, segments):
    if model.moe is None:
        return _mlp(weights["mlp"], model, x)
    weights, moe = weights["moe"], model.moe
    out = _mlp(weights["shared"], model, x) if moe.shared_experts else np.zeros_like(x)
    z = x @ weights["router"]
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    chosen = np.argsort(-(p + weights.get("bias", 0.0)), -1, kind="stable")[:, : moe.top_k]
    even = len(x) * moe.top_k / moe.num_experts
    room = {
        expert: len(x) if moe.capacity_factor is None else math.ceil(moe.capacity_factor * even)
        for expert in range(moe.num_experts)
    }
    is_normalized = moe.top_k > 1 if moe.normalize_gates is None else moe.normalize_gates
    for choice in range(moe.top_k):
        for t in np.flatnonzero(segments):
            expert = chosen[t, choice]
            room[expert] -= 1
            if room[expert] >= 0:
                gate = p[t, expert] / (p[t, chosen[t]].sum() if is_normalized else 1.0)
                own = {name: weights[name][expert] for name in ("gate", "up", "down") if name in weights}
                own["down"] = own["down"].T  # an expert's is stored the other way round
                out[t] += gate * _mlp(own, model, x[t])
    return out


def _mlp(weights, model, x):
    def up(name):
        return x @ weights[name] + weights.get(f"{name}_bias", 0.0)

    def gelu(z):
        return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    if model.activation == "swiglu":
        hidden = up("gate") / (1 + np.exp(-up("gate"))) * up("up")
    elif model.activation == "geglu":
        hidden = gelu(up("gate")) * up("up")
    else:
        hidden = gelu(up("up"))
    return hidden @ weights["down"].T + weights.get("down_bias", 0.0)
