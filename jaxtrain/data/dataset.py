"""Batches of packed text as a pure function of (seed, step)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxtrain.config.schema import DataConfig, DocumentsConfig, SourceConfig
from jaxtrain.config.user_class import is_reference, load_class
from jaxtrain.data.mixture import Mixture, weight_ranges
from jaxtrain.data.packing import Packer, Pieces, concat_pieces, groups
from jaxtrain.data.sources import Progress
from jaxtrain.data.token_cache.build import build_cache
from jaxtrain.data.token_cache.store import MAX_VERIFIED_BYTES, entropy
from jaxtrain.data.token_files import TokenizedDocuments, TokenSource
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

KEYS = ("tokens", "targets", "positions", "segments", "weights")
FILL_TOKENS = 1 << 16  # tokens of a batch that are computed together
READ_AHEAD_TOKENS = 1 << 18  # requested from the disk at a time: some hundred documents, enough to fill its queue
VALIDATION_SEED = 0  # the order of validation data does not depend on the seed of a run
Rows = slice | Sequence[int] | np.ndarray | None


@runtime_checkable
class Dataset(Protocol):
    """Interface of training data, for user classes.

    jaxtrain calls `Class(split=..., seed=..., global_batch=..., **options)`. Optional attributes are `batches: int` (of
    the validation split), `fingerprint: str` (identifies the data, compared on resume) and `unigram_entropy: float`.
    """

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Returns the batch of a step, a pure function of the arguments.

        Args:
          step: from 0.
          rows: positions in the global batch; by default all.
        """
        ...


class TextDataset:
    """Packed documents of a mixture of sources.

    Batches are dicts of [rows, sequence] arrays:
      `tokens` int32; 0 for padding: some rows have a few padded positions at their end, 0.05% in all.
      `targets` int32: the next token of the document, also at the end of a row; 0 if there is none.
      `positions` int32: 0, 1, 2 ... from the start of each piece of a document, so below `sequence` for documents of
      any length: rotary embeddings in float32 lose accuracy at large positions, and depend only on differences.
      `segments` int32: number of the piece in its row, 1, 2, 3 ...; 0 for padding.
      `weights` float32: 1, or 0 without a target (eos ends a document) and for padding. In an epoch each token of a
      document except its first is a target exactly once.

    Training: global row step * global_batch + i is a row of the source that the mixture selects; each source counts
    its epochs separately, and each epoch has a new permutation. Validation: every row of every source once, in an order
    that does not depend on the seed, interleaved in proportion, the last batch padded; `batch(i)` is
    `batch(i % batches)`.

    Attributes:
      batches: number of validation batches; None for training.
      tokenizer, vocab, eos: of the tokenizer.
      documents, tokens: of this split, one epoch of all sources.
      unigram_entropy: nats per token, of the token frequencies of all sources together; in training weighted as at
        step 0, in validation by their tokens.
      targets_per_byte: targets of this split per byte of its text (UTF-8). A document of n tokens has n targets: all
        tokens but the first, and eos, which has no byte. This is 1 with the tokenizer `bytes`, and None if the bytes
        are unknown because the source holds tokens.
      fingerprint: changes with the content of the sources, the tokenizer and the validation fraction.
    """

    def __init__(
        self, data: DataConfig, seed: int, split: str, caches: Sequence[TokenSource], tokenizer: Tokenizer | None = None
    ) -> None:
        self.sequence, self.global_batch, self.name = data.sequence, data.global_batch, split
        self.tokenizer = tokenizer or load_tokenizer(data.tokenizer)
        self.vocab, self.eos = caches[0].vocab, caches[0].eos
        self.splits: list[TokenizedDocuments] = [c.split(split) for c in caches]
        is_train = split == "train"
        for source, documents, cache in zip(data.sources, self.splits, caches):
            if not documents.documents and (is_train or not any(s.documents for s in self.splits)):
                raise _empty_split_error(split, source.path, cache, data.validation_fraction)
        self.documents, self.tokens = sum(s.documents for s in self.splits), sum(s.tokens for s in self.splits)
        text_bytes = [s.text_bytes for s in self.splits if s.text_bytes is not None]
        if is_train and data.sequence > self.tokens:
            message = f"is more than the {self.tokens:,} tokens of the training data; expected at most these"
            raise DataError(f"data.sequence: {data.sequence:,} {message}")
        self._packers = [
            Packer(s.lengths, data.sequence, seed if is_train else VALIDATION_SEED) if s.documents else None
            for s in self.splits
        ]
        targets = self.tokens - self.documents
        self.targets_per_byte = targets / max(sum(text_bytes), 1) if len(text_bytes) == len(self.splits) else None
        self.fingerprint = "-".join(c.key for c in caches)
        self._reads_ahead = sum(c.bytes for c in caches) > MAX_VERIFIED_BYTES  # smaller ones are in the page cache
        self._requested = (b"", 0, 0)  # last read-ahead: (rows, first step, step after the last)
        self.batches: int | None = None
        self._mixture: Mixture | None = None
        if is_train:
            ranges = weight_ranges([s.weight for s in data.sources], data.global_batch)
            self._mixture = Mixture(ranges)
            shares = np.array(ranges[0][1])
        else:
            self._order = _interleave([p.rows if p else 0 for p in self._packers])
            self.batches = -(-len(self._order[0]) // data.global_batch)
            shares = np.array([s.tokens for s in self.splits], np.float64)
        self.unigram_entropy = _mixed_entropy([c.counts(split) for c in caches], shares)

    def epoch(self, step: int) -> float:
        """Returns the progress in epochs of the first source before `step`: 1.5 is the middle of the second."""
        if self._mixture is None or self._packers[0] is None:
            return 0.0
        source, local = self._mixture.locate(np.arange(step * self.global_batch, (step + 1) * self.global_batch))
        rows = local[source == 0]
        return float(rows[0]) / self._packers[0].rows if rows.size else 0.0

    @property
    def epoch_rows(self) -> int | None:
        """Rows of an epoch of training; None for a mixture, whose sources have epochs of their own."""
        packer = self._packers[0]
        return packer.rows if self._mixture is not None and len(self._packers) == 1 and packer is not None else None

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """Returns the batch of a step, or some of its rows.

        Args:
          step: from 0.
          rows: slice or array of positions in [0, global_batch); by default all.

        Raises:
          IndexError: a row outside the global batch, or a negative step.
        """
        if step < 0:
            raise IndexError(f"step {step}: must be 0 or more")
        positions = np.arange(self.global_batch)
        if rows is not None:
            positions = positions[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
        if self._reads_ahead and len(positions):
            self._read_ahead(step, positions)
        pieces = self._pieces(step * self.global_batch + positions)
        return _build_batch(self.splits, pieces, self.sequence, len(positions))

    def _read_ahead(self, step: int, positions: np.ndarray) -> None:
        """Asks the kernel to load the tokens of the next steps; remembers which, to ask only once."""
        window = max(READ_AHEAD_TOKENS // (len(positions) * self.sequence), 1)
        rows, begin, end = self._requested
        if rows != positions.tobytes() or not begin <= step < end:
            begin = end = step
        if step + window <= end:
            return
        self._requested = (positions.tobytes(), begin, step + 2 * window)
        steps = np.arange(end, step + 2 * window)
        pieces = self._pieces((steps[:, None] * self.global_batch + positions).reshape(-1))
        for k, index in groups(pieces.source):
            split = self.splits[k]
            file, start = split.locate(pieces.document[index])
            split.read_ahead(file, start + pieces.offset[index], pieces.length[index])

    def _pieces(self, rows: np.ndarray) -> Pieces:
        """Returns the pieces of global rows int64[R]; a validation row after the last has none."""
        positions = np.arange(len(rows))
        if self._mixture is not None:
            source, local = self._mixture.locate(rows)
        else:
            rows = rows % ((self.batches or 1) * self.global_batch)
            positions = np.flatnonzero(rows < len(self._order[0]))
            source, local = (column[rows[positions]] for column in self._order)
        parts: list[Pieces] = []
        for k, index in groups(source):
            packer = self._packers[k]
            if packer is not None:
                pieces = packer.pieces(local[index])
                parts.append(pieces._replace(row=positions[index][pieces.row], source=np.full_like(pieces.row, k)))
        return concat_pieces(parts)


def _empty_split_error(split: str, path: str, cache: TokenSource, validation: float) -> DataError:
    total = cache.train.documents + cache.validation.documents
    if not total:
        return DataError(f"{path}: has no documents; expected at least one")
    if validation == 1:
        return DataError(f"{path}: has no documents; a set of eval.sets needs at least one")
    if split == "train":
        advice = "set a smaller data.validation_fraction, or give more documents"
    elif validation:
        advice = "set data.validation_fraction=0, or give more documents"
    else:
        advice = "set data.validation_fraction above 0"
    problem = f"none of its {total} documents is in the {split} split (data.validation_fraction is {validation:g})"
    return DataError(f"{path}: {problem}; {advice}")


def _mixed_entropy(counts: Sequence[np.ndarray], shares: np.ndarray) -> float:
    """Returns the entropy, nats, of a mixture of sources with token frequencies counts[k] [V] and shares[k]."""
    mixed = np.zeros(len(counts[0]))
    for count, share in zip(counts, shares / shares.sum()):
        if share:
            mixed += share * (count / count.sum())
    return entropy(mixed)


def _interleave(rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Interleaves all rows of all sources evenly. Returns (source int64[sum], its row int64[sum])."""
    source = np.repeat(np.arange(len(rows)), rows)
    local = np.concatenate([np.arange(n) for n in rows])
    order = np.argsort((local + 0.5) / np.repeat(np.array(rows), rows), kind="stable")
    return source[order], local[order]


def _build_batch(
    splits: Sequence[TokenizedDocuments], pieces: Pieces, sequence: int, rows: int
) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch, built from its pieces.

    They share one allocation: from 4 MiB on NumPy then asks for huge pages, which saves thousands of page faults. A few
    rows are filled at a time, so that intermediate arrays stay in the processor's cache.
    """
    buffer = np.empty((len(KEYS), rows, sequence), np.int32)
    step = max(FILL_TOKENS // sequence, 1)
    bounds = np.searchsorted(pieces.row, np.arange(0, rows + step, step)).tolist()
    for first, low, high in zip(range(0, rows, step), bounds, bounds[1:]):
        part = Pieces(*(column[low:high] for column in pieces))
        _fill_rows(splits, part._replace(row=part.row - first), buffer[:, first : first + step])
    return {k: array.view(np.float32) if k == "weights" else array for k, array in zip(KEYS, buffer)}


def _fill_rows(splits: Sequence[TokenizedDocuments], pieces: Pieces, out: np.ndarray) -> None:
    """Fills int32[5, rows, sequence] (`KEYS`) from pieces."""
    _, rows, sequence = out.shape
    row, document, offset, length, source = pieces
    tokens, targets, positions, segments, weights = (array.reshape(-1) for array in out)  # views
    weights = weights.view(np.float32)
    filled = np.bincount(row, length, minlength=rows).astype(np.int64)
    ends = np.cumsum(length)
    first = np.searchsorted(row, np.arange(rows + 1))  # first piece of each row
    before = np.concatenate(([0], ends))[first]  # tokens in earlier rows
    begin = row * sequence + (ends - length) - before[row]  # position of each piece in the flat arrays
    padded = np.flatnonzero(filled < sequence)
    runs, numbers, shift = length, np.arange(len(row)) - first[row] + 1, -begin
    if padded.size:  # padding counts as a piece with number 0
        runs = np.insert(runs, first[padded + 1], sequence - filled[padded])
        numbers = np.insert(numbers, first[padded + 1], 0)
        shift = np.insert(shift, first[padded + 1], 0)

    total = np.empty(len(row), np.int64)  # length of each piece's document
    next_token = np.zeros(len(row), np.int32)  # after each piece, if its document continues
    for k, index in groups(source):
        split = splits[k]
        total[index] = split.lengths[document[index]]
        file, start = split.locate(document[index])
        start += offset[index]
        stop = start + length[index]
        _copy_tokens(split, tokens, file, start, begin[index], length[index])
        for i in np.flatnonzero(offset[index] + length[index] < total[index]).tolist():
            next_token[index[i]] = split.file(int(file[i]))[1][stop[i]]

    segments[:] = np.repeat(numbers.astype(np.int32), runs)
    positions[:] = np.arange(rows * sequence, dtype=np.int32)
    positions += np.repeat(shift.astype(np.int32), runs)
    targets[:-1] = tokens[1:]
    weights[:] = 1.0
    last = begin + length - 1
    targets[last] = next_token
    weights[last] = offset + length < total
    for r in padded.tolist():
        padding = slice(r * sequence + int(filled[r]), (r + 1) * sequence)
        tokens[padding], targets[padding], positions[padding], weights[padding] = 0, 0, 0, 0.0


def _copy_tokens(
    split: TokenizedDocuments,
    out: np.ndarray,
    file: np.ndarray,
    start: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
) -> None:
    """Sets out[begin : begin + length] = tokens of file[start : start + length] for each piece."""
    order = np.argsort(file, kind="stable")  # one file after the other, so that few are mapped at a time
    columns = (file, begin, begin + length, start, start + length)
    current, tokens = -1, np.zeros(0, split.dtype)
    for i, b, e, s, t in zip(*(column[order].tolist() for column in columns)):
        if i != current:
            current, tokens = i, split.file(i)[1]
        out[b:e] = tokens[s:t]


def open_dataset(data: DataConfig, seed: int, split: str = "train", progress: Progress | None = None) -> Any:
    """Opens the dataset of a config: a `TextDataset`, whose missing caches are built, or the user's class.

    Args:
      data: the `data` section.
      seed: selects the order.
      split: `train` or `validation`.
      progress: called with (bytes done, bytes in all) while a cache is built.

    Returns:
      an object with `batch(step, rows)`.

    Raises:
      UserError: bad input, a damaged cache, a user's class that cannot be loaded or has no `batch`. Exceptions of the
        user's code are not wrapped.
    """
    if not data.is_text:
        return _user_dataset(data, seed, split)
    return TextDataset(data, seed, split, _caches(data, progress))


def declared_example(data: DataConfig) -> Any:
    """Returns what the static method `example(**options)` of a user's class says of a batch; None without one.

    It needs no data: {name: array, or anything with a shape and a dtype}, with a leading dim of any number of rows.
    """
    declare = None if data.is_text else getattr(load_class(data.type, "data.type", "data"), "example", None)
    return None if declare is None else declare(**data.options)


def open_datasets(data: DataConfig, seed: int, progress: Progress | None = None) -> tuple[Any, Any | None]:
    """Opens the training and the validation dataset like `open_dataset`, but lists and checks the input only once.

    Returns:
      (train, validation). Validation is None for text with `data.validation_fraction` 0, never for a user's class.
    """
    if not data.is_text:
        return _user_dataset(data, seed, "train"), _user_dataset(data, seed, "validation")
    caches = _caches(data, progress)
    train = TextDataset(data, seed, "train", caches)
    if data.validation_fraction == 0:
        return train, None
    return train, TextDataset(data, seed, "validation", caches, train.tokenizer)


def open_validation_sets(
    data: DataConfig, sets: Mapping[str, DocumentsConfig], seed: int, progress: Progress | None = None
) -> dict[str, TextDataset]:
    """Opens the sets of `eval.sets`, with the tokenizer, sequence length and batch size of `data`.

    Returns:
      name -> dataset.

    Raises:
      DataError: bad input, a set without documents, or `data` is not text, so that there is no tokenizer.
    """
    if sets and not data.is_text:
        raise DataError(f"eval.sets: data.type is `{data.type}`, so there is no tokenizer; expected `text`")
    configs = {name: validation_set_config(data, documents) for name, documents in sets.items()}
    return {name: TextDataset(c, seed, "validation", _caches(c, progress)) for name, c in configs.items()}


def validation_set_config(data: DataConfig, documents: DocumentsConfig) -> DataConfig:
    """Returns `data` with a validation set as its only source, all of it in the validation split."""
    return data.model_copy(update={"sources": (SourceConfig(**documents.model_dump()),), "validation_fraction": 1.0})


def _caches(data: DataConfig, progress: Progress | None) -> list[TokenSource]:
    """Opens the cache of each source; builds it if it is missing."""
    return [
        build_cache(s, data.tokenizer, data.validation_fraction, data.cache_dir, data.workers, progress)
        for s in data.sources
    ]


def _user_dataset(data: DataConfig, seed: int, split: str) -> Dataset:
    if not is_reference(data.type, "data"):
        raise DataError(f"data.type: `{data.type}` is neither `text` nor `package.module:Class`")
    cls = load_class(data.type, "data.type", "data")
    if not callable(getattr(cls, "batch", None)):
        raise DataError(f"data.type: `{data.type}` has no method `batch(step, rows)`")
    arguments = {"split": split, "seed": seed, "global_batch": data.global_batch, **data.options}
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise DataError(f"data.options: `{data.type}` does not take the arguments {given} ({error})") from error
    return cls(**arguments)
