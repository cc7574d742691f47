"""Text view of a training batch: decoded documents with their borders and their mask, or the arrays of own data."""

# pyright: strict, reportUnknownMemberType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.core.resolve import ConfigSource, load_config
from jaxtrain.data.dataset import TextDataset, open_dataset
from jaxtrain.data.sources import Progress
from jaxtrain.data.tokenizer import Tokenizer
from jaxtrain.errors import UserError, escape_unprintable

SHOWN_VALUES = 8  # of a row of an array
Arrays = Mapping[str, np.ndarray[Any, Any]]


def show_data(
    config: ConfigSource, *overrides: str, step: int = 0, rows: int = 2, progress: Progress | None = None, **keys: Any
) -> str:
    """Returns text about the batch that a run trains on after some steps: its arrays, and the first rows of it.

    Rows of packed text are decoded, with the borders of documents and the positions that have no target.

    Args:
        config: see `Trainer`.
        overrides: `key=value` texts.
        step: finished steps.
        rows: rows to show, from the first on.
        progress: called with (bytes done, bytes in all) while a token cache is built.
        keys: sections or keys of the config.

    Raises:
        UserError: a step or a number of rows that is not there, a bad config, or bad data.
    """
    loaded = load_config(config, *overrides, checks=(), **keys)
    size = loaded.data.global_batch
    if step < 0 or not 1 <= rows <= size:
        raise UserError(f"show_data: step {step}, {rows} rows; expected a step from 0 on, and 1 to {size} rows")
    data = open_dataset(loaded.data, loaded.seed, "train", progress)
    batch: Arrays = data.batch(step)
    lines = [f"batch {step} (after {step:,} steps) of {size:,} rows, seed {loaded.seed}"]
    lines += [f"  {name:<10} {array.dtype}{list(array.shape)}{_range(array)}" for name, array in batch.items()]
    if isinstance(data, TextDataset):
        lines += _summary(batch)
        return "\n".join([*lines, *(line for row in range(rows) for line in _text_row(batch, row, data.tokenizer))])
    return "\n".join([*lines, *(line for row in range(rows) for line in _array_row(batch, row))])


def _range(array: np.ndarray[Any, Any]) -> str:
    """Returns the smallest and the largest value of numbers."""
    if not array.size or array.dtype.kind not in "iuf":
        return ""
    return f", {array.min():.6g} to {array.max():.6g}"


def _summary(batch: Arrays) -> list[str]:
    segments, weights = batch["segments"], batch["weights"]
    pieces, padding = int(segments.max(1).sum()), int((segments == 0).sum())
    targets = int((weights > 0).sum())
    share = f"{targets:,} of {weights.size:,} positions have a target ({100 * targets / weights.size:.1f}%)"
    return [f"{pieces:,} pieces of documents, {padding:,} positions of padding; {share}"]


def _text_row(batch: Arrays, row: int, tokenizer: Tokenizer) -> list[str]:
    """Returns a row of packed text: each piece of a document with its place, its text, and where the mask is 0."""
    tokens, segments, weights = (batch[name][row] for name in ("tokens", "segments", "weights"))
    lines = [f"row {row}"]
    for segment in range(1, int(segments.max()) + 1):
        places = np.flatnonzero(segments == segment)
        first, last = int(places[0]), int(places[-1])
        ids = tokens[places].tolist()
        ends = ids[-1] == tokenizer.eos
        masked = places[weights[places] == 0].tolist()
        end = "the document ends" if ends else "the document goes on in another row"
        mask = f"no target at {', '.join(map(str, masked))}" if masked else "a target everywhere"
        lines.append(f"  [{first}:{last + 1}] document {segment}: {len(ids)} tokens; {end}; {mask}")
        text = tokenizer.decode(ids) + (tokenizer.token_text(tokenizer.eos) if ends else "")
        lines += [f"  | {escape_unprintable(line.expandtabs(4))}" for line in text.split("\n")]
    padding = int((segments == 0).sum())
    return [*lines, *([f"  [{len(tokens) - padding}:{len(tokens)}] padding"] if padding else [])]


def _array_row(batch: Arrays, row: int) -> list[str]:
    """Returns the first values of each array of a row."""
    lines = [f"row {row}"]
    for name, array in batch.items():
        values: Any = np.ravel(array[row])
        shown = " ".join(
            f"{value:.4g}" if values.dtype.kind in "iuf" else str(value) for value in values[:SHOWN_VALUES]
        )
        lines.append(f"  {name:<10} {shown}{' ...' if values.size > SHOWN_VALUES else ''}")
    return lines
