"""The loss plot: drawn from what is in the files, and really there."""

import matplotlib.image
import numpy as np
import pytest

from jaxtrain.reports import loss_plot as plot
from jaxtrain.reports.loss_plot import plot_loss
from jaxtrain.trackers.files import JsonlTracker


def run(run_dir, losses, evals=(), entropy=None):
    files = JsonlTracker(run_dir)
    files.start({"step": 0, "name": "my run"} | ({} if entropy is None else {"unigram_entropy": entropy}))
    for step, loss in enumerate(losses, 1):
        files.log(step, {"loss": loss, "lr": 1e-3 / step})
    for step, loss in evals:
        files.log(step, {"eval/loss": loss})
    files.close()
    return run_dir


def drawn(monkeypatch, run_dir):
    """The axes that `loss_plot` drew on, top and bottom."""
    from matplotlib.figure import Figure

    kept = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kwargs: kept.append(self))
    plot_loss(run_dir)
    return kept[0].axes


def test_png(tmp_path):
    path = plot_loss(run(tmp_path, np.linspace(5, 1, 200), [(100, 3.2)], entropy=3.1))
    assert path == tmp_path / "loss.png"
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 600
    assert image.shape[1] > 1000
    assert image.std() > 0.05


def test_what_is_drawn(tmp_path, monkeypatch):
    top, bottom = drawn(monkeypatch, run(tmp_path, [4.0, 3.0, 2.0], [(2, 3.5), (3, 2.5)], entropy=3.1))
    lines = {line.get_label().split(",")[0]: line for line in top.lines}
    np.testing.assert_allclose(lines["train"].get_xydata(), [[1, 4], [2, 3], [3, 2]])
    np.testing.assert_allclose(lines["validation"].get_xydata(), [[2, 3.5], [3, 2.5]])
    assert set(lines["unigram entropy 3.100"].get_ydata()) == {3.1}
    assert lines["unigram entropy 3.100"].get_linestyle() == "--"
    assert top.get_ylabel() == "loss (nats per token)"
    assert top.get_title(loc="left") == "my run"
    np.testing.assert_allclose(bottom.lines[0].get_ydata(), [1e-3, 5e-4, 1e-3 / 3])
    assert (bottom.get_xlabel(), bottom.get_ylabel()) == ("step", "learning rate")


def test_smoothing_and_spikes(tmp_path, monkeypatch):
    losses = np.full(500, 2.0)
    losses[0], losses[250], losses[300] = 6.0, 1000.0, np.nan
    top, _ = drawn(monkeypatch, run(tmp_path, losses))
    assert len(top.lines) == 2  # raw and smoothed
    low, high = top.get_ylim()
    assert low < 2.0 < 6.0 < high
    assert top.get_ylabel() == "loss"  # of unknown unit


def test_smoothed_mean():
    np.testing.assert_allclose(plot._smoothed(np.array([1.0, 2, 3, np.nan, 5]), 3), [1.5, 2, 2.5, 4, 5])
    assert np.isnan(plot._smoothed(np.array([np.nan, np.nan]), 1)).all()


@pytest.mark.parametrize("losses", [[float("nan")] * 3, [2.0], [2.0, 2.0], [float("inf"), 1.0]], ids=str)
def test_odd_runs_still_draw(tmp_path, losses):
    assert plot_loss(run(tmp_path, losses)).stat().st_size > 1000


def test_nothing_logged(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl: no training loss to plot"):
        plot_loss(run(tmp_path, []))
    with pytest.raises(ValueError, match="not a run"):
        plot_loss(tmp_path / "empty")
