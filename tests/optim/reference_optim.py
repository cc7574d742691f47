"""Optimizers written out in NumPy float64, one unstacked parameter at a time."""

import numpy as np

NS = (3.4445, -4.7750, 2.0315)  # Newton-Schulz coefficients of Jordan 2024


def adamw(p, grads, lr, b1, b2, eps, wd):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        p = p - lr(t - 1) * (m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps) + wd * p)
    return p


def lion(p, grads, lr, b1, b2, eps, wd):
    m = np.zeros_like(p)
    for t, g in enumerate(grads):
        u = np.sign(b1 * m + (1 - b1) * g)
        m = b2 * m + (1 - b2) * g
        p = p - lr(t) * (u + wd * p)
    return p


def sgd(p, grads, lr, b1, b2, eps, wd):
    m = np.zeros_like(p)
    for t, g in enumerate(grads):
        m = b1 * m + g
        p = p - lr(t) * (m + wd * p)
    return p


def adafactor(p, grads, lr, b1, b2, eps, wd, minimum=128):
    order = np.argsort(p.shape)
    factored = p.ndim >= 2 and p.shape[order[-2]] >= minimum
    row = col = v = 0.0
    for t, g in enumerate(grads):
        beta, sq = 1 - (t + 1.0) ** -0.8, g * g + 1e-30
        if factored:
            second, first = order[-2:]
            row = beta * row + (1 - beta) * sq.mean(first, keepdims=True)
            col = beta * col + (1 - beta) * sq.mean(second, keepdims=True)
            u = g / np.sqrt(row * col / row.mean(second, keepdims=True))
        else:
            v = beta * v + (1 - beta) * sq
            u = g / np.sqrt(v)
        u = u / max(1.0, np.sqrt(np.mean(u * u)))
        p = p - lr(t) * (u + wd * p)
    return p


def newton_schulz(x, eps):
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / (np.linalg.norm(x) + eps)
    for _ in range(5):
        a = x @ x.T
        x = NS[0] * x + (NS[1] * a + NS[2] * a @ a) @ x
    return x.T if tall else x


def muon(p, grads, lr, b1, b2, eps, wd, matrix):
    """`matrix` is the 2-D shape that the parameter has as a matrix."""
    m = np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = b1 * m + (1 - b1) * g
        ahead = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        u = 0.2 * np.sqrt(max(matrix)) * newton_schulz(ahead.reshape(matrix), eps).reshape(p.shape)
        p = p - lr(t - 1) * (u + wd * p)
    return p
