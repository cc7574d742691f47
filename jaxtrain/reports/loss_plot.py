"""Loss plot of a run, from its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import UserError, did_you_mean
from jaxtrain.io.figure import Plot, draw, new_figure
from jaxtrain.reports.history import RunHistory, read_history
from jaxtrain.trackers.files import METRICS

TRAIN, VALIDATION, RATE, YARDSTICK = "#2f6db3", "#d1495b", "#6c757d", "#8a8a8a"


def plot_loss(run_dir: Path, out: Path | None = None) -> Path:
    """Draws RUN_DIR/loss.png, see `loss_figure`.

    Args:
        run_dir: directory with `metrics.jsonl` and `events.jsonl`.
        out: file to write; default: RUN_DIR/loss.png.

    Raises:
        UserError: the directory is not a run, or no training loss was logged.
    """
    return loss_figure(read_history(run_dir)).save(Path(out) if out else run_dir / "loss.png")


@draw.register
def run_figure(run: RunHistory, *names: str) -> Plot:
    """Draws metrics of a run over steps, see `metrics_figure`; by default `loss_figure`."""
    return metrics_figure(run, names) if names else loss_figure(run)


def loss_figure(run: RunHistory) -> Plot:
    """Draws training and validation loss over steps, the learning rate below.

    The dashed line is the unigram entropy of the text in nats per token, if the start event has it. Values that are not
    finite leave gaps.

    Raises:
        UserError: no training loss was logged.
    """
    loss, validation, rate = (_series(run, key) for key in ("loss", "eval/loss", "lr"))
    if not len(loss):
        raise UserError(f"{run.directory / METRICS}: no training loss to plot")
    figure, (top, bottom) = new_figure([4, 1], (8, 5.2))
    _draw_loss(top, loss, validation, run.entropy)
    top.set_title(run.name, loc="left", fontsize=11)
    bottom.plot(rate[:, 0], rate[:, 1], color=RATE, linewidth=1.5)
    bottom.set_ylabel("learning rate")
    bottom.set_ylim(bottom=0)
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    bottom.set_xlabel("step")
    figure.align_ylabels()
    return Plot(figure)


def metrics_figure(run: RunHistory, names: Sequence[str]) -> Plot:
    """Draws metrics over steps, one below the other.

    Raises:
        UserError: one was not logged.
    """
    figure, axes = new_figure([1] * len(names), (8, 1.2 + 2 * len(names)))
    for each, name in zip(axes, names):
        values = _series(run, name)
        if not len(values):
            known = sorted({key for record in run.metrics for key in record} - {"step"})
            raise UserError(f"{run.directory / METRICS}: no metric `{name}`{did_you_mean(name, known)}")
        each.plot(values[:, 0], values[:, 1], color=TRAIN, linewidth=1.5)
        each.set_ylabel(name)
    axes[-1].set_xlabel("step")
    return Plot(figure)


def _draw_loss(axes: Any, loss: np.ndarray, validation: np.ndarray, entropy: float | None) -> None:
    window = max(1, len(loss) // 50)
    smooth = _smoothed(loss[:, 1], window)
    if window > 1:
        axes.plot(loss[:, 0], loss[:, 1], color=TRAIN, alpha=0.25, linewidth=0.8)
    label = f"train (mean of {window})" if window > 1 else "train"
    axes.plot(loss[:, 0], smooth, color=TRAIN, linewidth=1.8, label=f"{label}, last {_last(smooth)}")
    if len(validation):
        label = f"validation, last {_last(validation[:, 1])}"
        axes.plot(*validation.T, "o-", color=VALIDATION, markersize=4.5, linewidth=1, label=label)
    if entropy is not None:
        axes.axhline(entropy, color=YARDSTICK, linestyle="--", linewidth=1.2, label=f"unigram entropy {entropy:.3f}")
    axes.set_ylabel("loss (nats per token)" if entropy is not None else "loss")
    low, high = _limits(loss[:, 1], smooth, validation, entropy)
    if low < high:
        axes.set_ylim(low, high)
    axes.legend(loc="upper right", framealpha=0.9, edgecolor="none")


def _limits(raw: np.ndarray, smooth: np.ndarray, validation: np.ndarray, entropy: float | None) -> tuple[float, float]:
    """Returns limits that include all values but lone spikes above the largest smoothed value and the first loss."""
    always = [smooth, validation[:, 1] if len(validation) else smooth, [] if entropy is None else [entropy]]
    shown = np.concatenate([*always, raw[:1], raw[np.isfinite(raw) & (raw <= np.nanmax(smooth, initial=-np.inf))]])
    shown = shown[np.isfinite(shown)]
    if not len(shown):
        return 0.0, 0.0
    pad = 0.05 * (shown.max() - shown.min()) or 0.05
    return float(shown.min() - pad), float(shown.max() + pad)


def _series(run: RunHistory, key: str) -> np.ndarray:
    """Returns [n, 2] float64 of (step, value), by step; nan for values that are not finite."""
    values = np.array(run.series(key), np.float64).reshape(-1, 2)
    values[~np.isfinite(values[:, 1]), 1] = np.nan
    return values


def _smoothed(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred moving mean of `window` values, fewer at the ends and if some are not finite."""
    good = np.isfinite(values)
    kernel = np.ones(window)
    sums = np.convolve(np.where(good, values, 0), kernel, "same")
    counts = np.convolve(good.astype(float), kernel, "same")
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _last(values: np.ndarray) -> str:
    good = values[np.isfinite(values)]
    return f"{good[-1]:.3f}" if len(good) else "not finite"
