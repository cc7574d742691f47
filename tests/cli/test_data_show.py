"""`jaxtrain data show`: a batch as the model reads it, decoded, with the borders of documents and the mask."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtrain.cli.main import main
from jaxtrain.core.resolve import resolve
from jaxtrain.data.dataset import open_dataset


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Documents of 10 to 18 bytes, several to a row."""
    (tmp_path / "text").mkdir()
    for index in range(60):
        (tmp_path / "text" / f"{index}.txt").write_text(f"doc {index:02}\n{'é' * (index % 5)}end")
    file = tmp_path / "mine.yaml"
    data = f"{{sources: [{tmp_path}/text], cache_dir: {tmp_path}/cache, sequence: 64, global_batch: 4, workers: 1}}"
    file.write_text(f"data: {data}\nmodel: {{embed: 16, layers: 1, heads: 2}}\n")
    return str(file)


def test_documents_are_shown_with_their_borders_and_mask(config: str, capsys):
    assert main(["data", "show", config, "--rows", "4", "--step", "1"]) == 0
    out = capsys.readouterr().out
    data = open_dataset(resolve(config)[0].data, 0)
    batch = data.batch(1)
    assert "tokens     int32[4, 64]" in out
    rows = out.split("\nrow ")[1:]
    assert len(rows) == 4
    for row, text in enumerate(rows):
        segments, tokens, weights = (batch[name][row] for name in ("segments", "tokens", "weights"))
        borders = [line for line in text.splitlines() if "] document " in line]
        assert len(borders) == segments.max() > 1
        for number, line in enumerate(borders, 1):
            places = (segments == number).nonzero()[0]
            assert f"[{places[0]}:{places[-1] + 1}] document {number}: {len(places)} tokens" in line
            masked = [str(place) for place in places if weights[place] == 0]
            assert (f"no target at {', '.join(masked)}" if masked else "a target everywhere") in line
            assert ("the document ends" in line) == (tokens[places[-1]] == 256)
        assert "\n  | doc " in text
        assert ("] padding" in text) == bool((segments == 0).any())
    targets = int(batch["weights"].sum())
    assert f"{targets} of 256 positions have a target" in out


def test_data_of_ones_own_is_shown_as_arrays(capsys):
    assert main(["data", "show", "recipes/spirals", "--rows", "1"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[1].startswith("  xy         float32[256, 2], -")
    assert out[2] == "  label      int32[256], 0 to 1"
    assert out[3] == "row 0"


@pytest.mark.parametrize("options", [["--rows", "5"], ["--rows", "0"], ["--step", "-1"]])
def test_rows_that_are_not_there_are_refused(config: str, options: list[str], capsys):
    assert main(["data", "show", config, *options]) == 2
    assert "expected a step from 0 on, and 1 to 4 rows" in capsys.readouterr().err
