"""Batches of packed text as a pure function of (seed, step)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from jaxtrain.config.schema import DataConfig, DocumentsConfig, SourceConfig
from jaxtrain.config.user_class import load_class
from jaxtrain.data.mixture import Mixture, weight_segments
from jaxtrain.data.packing import Packer, Pieces, groups
from jaxtrain.data.token_cache.build import Progress, build_cache
from jaxtrain.data.token_cache.store import CHECKED, entropy
from jaxtrain.data.token_runs import TokenizedDocuments, TokenSource
from jaxtrain.data.tokenizer import Tokenizer, load_tokenizer
from jaxtrain.errors import DataError

KEYS = ("tokens", "targets", "positions", "segments", "weights")
FILLED = 1 << 16  # tokens of a batch that are computed together
Rows = slice | Sequence[int] | np.ndarray | None
AHEAD = 1 << 18  # tokens asked of the disk ahead of their use: some hundred documents, enough to keep its queue full
VALIDATION_SEED = 0  # validation is the same for every seed of a run


@runtime_checkable
class Dataset(Protocol):
    """Interface of training data, which a user's class implements.

    It is made as `Class(split=..., seed=..., global_batch=..., **options)`. It may also have `batches: int` (of the
    validation split), `fingerprint: str` (what the data is, compared on resume) and `unigram_entropy: float`.
    """

    def batch(self, step: int, rows: slice | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Rows (places in the global batch; default all) of the batch of a step: a pure function of its arguments."""
        ...


class TextDataset:
    """Packed documents of a mixture of sources.

    Batches are dicts of [rows, sequence] arrays:
      `tokens` int32; 0 where the row is padded: some rows have a few such places at their end, 0.05% in all.
      `targets` int32: the token that follows in the document, also where the row ends; 0 where there is none.
      `positions` int32: 0, 1, 2 ... from the start of each piece of a document, so below `sequence` however long the
      document is: rotary embeddings in float32 lose accuracy where positions are large, and need only differences.
      `segments` int32: the piece, 1, 2, 3 ... per row, 0 for padding.
      `weights` float32: 1, or 0 where there is no target (eos ends a document) or padding. In an epoch each token of
      a document but its first is a target exactly once.

    Training: global row step * global_batch + i is a row of the source that the mixture names; each source counts its
    own epochs, a new permutation each. Validation: every row of every source once, in an order that is fixed for all
    seeds, interleaved in proportion, the last batch padded; `batch(i)` is `batch(i % batches)`.

    Attributes:
      batches: number of validation batches; None for training.
      tokenizer, vocab, eos; documents, tokens: of this split, one epoch of all sources.
      unigram_entropy: nats per token, of the token frequencies of all sources together: in training weighted as at
        step 0, in validation as many as there are.
      targets_per_byte: targets of this split per byte of its text (UTF-8). A document of n tokens has n targets: all
        tokens but the first, and eos, which has no byte. With the tokenizer `bytes` this is 1. None where there is no
        text: of what came as tokens.
      fingerprint: changes with the content of the sources, the tokenizer and the share kept for validation.
    """

    def __init__(
        self, data: DataConfig, seed: int, split: str, caches: Sequence[TokenSource], tokenizer: Tokenizer | None = None
    ) -> None:
        self.sequence, self.global_batch, self.name = data.sequence, data.global_batch, split
        self.tokenizer = tokenizer or load_tokenizer(data.tokenizer)
        self.vocab, self.eos = caches[0].vocab, caches[0].eos
        self.splits: list[TokenizedDocuments] = [c.split(split) for c in caches]
        train = split == "train"
        for source, part, cache in zip(data.sources, self.splits, caches):
            if not part.documents and (train or not any(s.documents for s in self.splits)):
                raise _nothing_in(split, source.path, cache, data.validation_fraction)
        self._packers = [
            Packer(part.lengths, data.sequence, seed if train else VALIDATION_SEED) if part.documents else None
            for part in self.splits
        ]
        self.documents, self.tokens = sum(s.documents for s in self.splits), sum(s.tokens for s in self.splits)
        sizes = [s.text_bytes for s in self.splits]
        known = [size for size in sizes if size is not None]
        targets = self.tokens - self.documents
        self.targets_per_byte = targets / max(sum(known), 1) if len(known) == len(sizes) else None
        self.fingerprint = "-".join(c.key for c in caches)
        self._cold = sum(c.bytes for c in caches) > CHECKED  # a smaller one was just read whole, and is in memory
        self._asked = (b"", 0, 0)  # (places, first step, step after the last) of the last read-ahead
        self.batches: int | None = None
        self._mixture: Mixture | None = None
        if train:
            segments = weight_segments([s.weight for s in data.sources], data.global_batch)
            self._mixture = Mixture(segments)
            shares = np.array(segments[0][1])
        else:
            self._order = _proportional([p.rows if p else 0 for p in self._packers])
            self.batches = -(-len(self._order[0]) // data.global_batch)
            shares = np.array([s.tokens for s in self.splits], np.float64)
        self.unigram_entropy = _mixed_entropy([c.counts(split) for c in caches], shares)

    def epoch(self, step: int) -> float:
        """Epochs of the first source begun before `step`, with the part done: 1.5 is half-way in the second."""
        if self._mixture is None or self._packers[0] is None:
            return 0.0
        source, local = self._mixture.locate(np.arange(step * self.global_batch, (step + 1) * self.global_batch))
        mine = local[source == 0]
        return float(mine[0]) / self._packers[0].rows if mine.size else 0.0

    def batch(self, step: int, rows: Rows = None) -> dict[str, np.ndarray]:
        """The batch of a step, or some rows of it: a slice or array of places in [0, global_batch).

        Raises:
          IndexError: a row outside the global batch, or a negative step.
        """
        if step < 0:
            raise IndexError(f"step {step}: must be 0 or more")
        places = np.arange(self.global_batch)
        if rows is not None:
            places = places[rows if isinstance(rows, slice) else np.asarray(rows, np.int64)]
        if self._cold and len(places):
            self._read_ahead(step, places)
        pieces, source = self._pieces(step * self.global_batch + places)
        return _assemble(self.splits, pieces, source, self.sequence, len(places))

    def _read_ahead(self, step: int, places: np.ndarray) -> None:
        """Ask the kernel for what the next batches need. What was asked for is remembered only to ask once."""
        asker = places.tobytes()
        window = max(AHEAD // (len(places) * self.sequence), 1)
        known, begin, end = self._asked
        if known != asker or not begin <= step < end:
            begin = end = step
        if step + window <= end:
            return
        self._asked = (asker, begin, step + 2 * window)
        steps = np.arange(end, step + 2 * window)
        pieces, source = self._pieces((steps[:, None] * self.global_batch + places).reshape(-1))
        for k, mine in groups(source):
            split = self.splits[k]
            shard, start = split.locate(pieces.document[mine])
            split.advise(shard, start + pieces.offset[mine], pieces.length[mine])

    def _pieces(self, index: np.ndarray) -> tuple[Pieces, np.ndarray]:
        """(pieces sorted by row, source of each piece int64[P]) of the global rows int64[R]."""
        at = np.arange(len(index))
        if self._mixture is not None:
            source, local = self._mixture.locate(index)
        else:
            index = index % ((self.batches or 1) * self.global_batch)
            at = np.flatnonzero(index < len(self._order[0]))
            source, local = (column[index[at]] for column in self._order)
        found: list[tuple[Pieces, np.ndarray]] = []
        for k, mine in groups(source):
            packer = self._packers[k]
            if packer is not None:
                pieces = packer.pieces(local[mine])
                found.append((pieces._replace(row=at[mine][pieces.row]), np.full(len(pieces.row), k)))
        if len(found) == 1:
            return found[0]
        if not found:
            return Pieces(*np.zeros((4, 0), np.int64)), np.zeros(0, np.int64)
        columns = [np.concatenate(c) for c in zip(*((*pieces, source) for pieces, source in found))]
        order = np.argsort(columns[0], kind="stable")
        *columns, source = (c[order] for c in columns)
        return Pieces(*columns), source


def _nothing_in(split: str, path: str, cache: TokenSource, validation: float) -> DataError:
    """The error for a source without documents in a split."""
    total = cache.train.documents + cache.validation.documents
    if validation == 1:
        return DataError(f"{path}: has no documents; a set of eval.sets needs at least one")
    if split == "train":
        right = "set a smaller data.validation_fraction, or give more documents"
    else:
        right = (
            "set data.validation_fraction=0, or give more documents"
            if validation
            else "set data.validation_fraction above 0"
        )
    found = f"none of its {total} documents is in the {split} split (data.validation_fraction is {validation:g})"
    return DataError(f"{path}: {found}; {right}")


def _mixed_entropy(counts: Sequence[np.ndarray], shares: np.ndarray) -> float:
    """Entropy, nats, of tokens drawn from source k, with frequencies counts[k] [V], for shares[k] of the time."""
    mixed = np.zeros(len(counts[0]))
    for count, share in zip(counts, shares / shares.sum()):
        if share:
            mixed += share * (count / count.sum())
    return entropy(mixed)


def _proportional(rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Every row of every source once, evenly interleaved: (source int64[sum], its row int64[sum])."""
    source = np.repeat(np.arange(len(rows)), rows)
    local = np.concatenate([np.arange(n) for n in rows])
    order = np.argsort((local + 0.5) / np.repeat(np.array(rows), rows), kind="stable")
    return source[order], local[order]


def _assemble(
    splits: Sequence[TokenizedDocuments], pieces: Pieces, source: np.ndarray, sequence: int, rows: int
) -> dict[str, np.ndarray]:
    """The arrays of a batch from its pieces (sorted by row, each row filled from the left).

    One allocation holds them all: from 4 MiB on NumPy then asks for huge pages, which saves thousands of page faults
    a batch. A few rows are filled at a time, so that what is computed on the way stays in the processor's cache.
    """
    buffer = np.empty((len(KEYS), rows, sequence), np.int32)
    together = max(FILLED // sequence, 1)
    bounds = np.searchsorted(pieces.row, np.arange(0, rows + together, together)).tolist()
    for first, lo, hi in zip(range(0, rows, together), bounds, bounds[1:]):
        row, document, offset, length = (column[lo:hi] for column in pieces)
        _fill(splits, Pieces(row - first, document, offset, length), source[lo:hi], buffer[:, first : first + together])
    return {k: array.view(np.float32) if k == "weights" else array for k, array in zip(KEYS, buffer)}


def _fill(splits: Sequence[TokenizedDocuments], pieces: Pieces, source: np.ndarray, out: np.ndarray) -> None:
    """Fill int32[5, rows, sequence] (`KEYS`) from pieces."""
    _, rows, sequence = out.shape
    row, document, offset, length = pieces
    tokens, targets, positions, segments, weights = (array.reshape(-1) for array in out)  # views
    weights = weights.view(np.float32)
    filled = np.bincount(row, length, minlength=rows).astype(np.int64)
    ends = np.cumsum(length)
    first = np.searchsorted(row, np.arange(rows + 1))  # first piece of each row
    before = np.concatenate(([0], ends))[first]  # tokens in earlier rows
    begin = row * sequence + (ends - length) - before[row]  # place of each piece
    padded = np.flatnonzero(filled < sequence)
    runs, numbers, shift = length, np.arange(len(row)) - first[row] + 1, -begin
    if padded.size:  # the rest of a row is a piece of nothing
        runs = np.insert(runs, first[padded + 1], sequence - filled[padded])
        numbers = np.insert(numbers, first[padded + 1], 0)
        shift = np.insert(shift, first[padded + 1], 0)

    total = np.empty(len(row), np.int64)  # length of each piece's document
    follows = np.zeros(len(row), np.int32)  # the token after a piece, where the document goes on
    for k, mine in groups(source):
        split = splits[k]
        total[mine] = split.lengths[document[mine]]
        shard, start = split.locate(document[mine])
        start += offset[mine]
        stop = start + length[mine]
        _copy(split, tokens, shard, start, begin[mine], length[mine])
        for i in np.flatnonzero(offset[mine] + length[mine] < total[mine]).tolist():
            follows[mine[i]] = split.shard(int(shard[i]))[1][stop[i]]

    segments[:] = np.repeat(numbers.astype(np.int32), runs)
    positions[:] = np.arange(rows * sequence, dtype=np.int32)
    positions += np.repeat(shift.astype(np.int32), runs)
    targets[:-1] = tokens[1:]
    weights[:] = 1.0
    last = begin + length - 1
    targets[last] = follows
    weights[last] = offset + length < total
    for r in padded.tolist():
        nothing = slice(r * sequence + int(filled[r]), (r + 1) * sequence)
        tokens[nothing], targets[nothing], positions[nothing], weights[nothing] = 0, 0, 0, 0.0


def _copy(
    split: TokenizedDocuments,
    out: np.ndarray,
    shard: np.ndarray,
    start: np.ndarray,
    begin: np.ndarray,
    length: np.ndarray,
) -> None:
    """out[begin : begin + length] = tokens of shard[start : start + length], for each piece."""
    order = np.argsort(shard, kind="stable")  # one shard after the other, so that few are held open
    columns = (shard, begin, begin + length, start, start + length)
    current, tokens = -1, np.zeros(0, split.dtype)
    for i, b, e, s, t in zip(*(column[order].tolist() for column in columns)):
        if i != current:
            current, tokens = i, split.shard(i)[1]
        out[b:e] = tokens[s:t]


def open_dataset(data: DataConfig, seed: int, split: str = "train", progress: Progress | None = None) -> Any:
    """The dataset of a config: `TextDataset`, its caches built if missing, or the user's class that `data.type` names.

    Args:
      data: the `data` section.
      seed: selects the order.
      split: `train` or `validation`.
      progress: called with (bytes done, bytes in all) while a cache is built.

    Raises:
      UserError: bad input, a damaged cache, a user's class that cannot be loaded or has no `batch`. (What the user's
        own code raises comes as it is.)
    """
    if data.type != "text":
        return _user_dataset(data, seed, split)
    return TextDataset(data, seed, split, _caches(data, progress))


def open_datasets(data: DataConfig, seed: int, progress: Progress | None = None) -> tuple[Any, Any | None]:
    """(train, validation) of a config, as `open_dataset` gives each, but the input is listed and checked once.

    Validation is None where text has `data.validation_fraction` 0; a user's class is always made for both.
    """
    if data.type != "text":
        return _user_dataset(data, seed, "train"), _user_dataset(data, seed, "validation")
    caches = _caches(data, progress)
    train = TextDataset(data, seed, "train", caches)
    if data.validation_fraction == 0:
        return train, None
    return train, TextDataset(data, seed, "validation", caches, train.tokenizer)


def open_validation_sets(
    data: DataConfig, sets: Mapping[str, DocumentsConfig], seed: int, progress: Progress | None = None
) -> dict[str, TextDataset]:
    """The validation sets by name: all documents of each, tokenized, cached, packed and batched as those of `data`.

    Raises:
      UserError: bad input, a set without documents, or `data` is no text, so that there is no tokenizer.
    """
    if sets and data.type != "text":
        raise DataError(f"eval.sets: data.type is `{data.type}`, so there is no tokenizer; expected `text`")
    found: dict[str, TextDataset] = {}
    for name, one in sets.items():
        whole = validation_set_config(data, one)
        found[name] = TextDataset(whole, seed, "validation", _caches(whole, progress))
    return found


def validation_set_config(data: DataConfig, one: DocumentsConfig) -> DataConfig:
    """`data` with a validation set as its only source, all of whose documents are kept for validation."""
    return data.model_copy(update={"sources": (SourceConfig(**one.model_dump()),), "validation_fraction": 1.0})


def _caches(data: DataConfig, progress: Progress | None) -> list[TokenSource]:
    """The cache of each source, built where it is missing."""
    return [
        build_cache(s, data.tokenizer, data.validation_fraction, data.cache_dir, data.workers, progress)
        for s in data.sources
    ]


def _user_dataset(data: DataConfig, seed: int, split: str) -> Dataset:
    if ":" not in data.type:
        raise DataError(f"data.type: `{data.type}` is neither `text` nor `package.module:Class`")
    cls = load_class(data.type, "data.type")
    if not callable(getattr(cls, "batch", None)):
        raise DataError(f"data.type: `{data.type}` has no method `batch(step, rows)`")
    arguments = {"split": split, "seed": seed, "global_batch": data.global_batch, **data.options}
    try:
        inspect.signature(cls).bind(**arguments)
    except TypeError as error:
        given = ", ".join(arguments)
        raise DataError(f"data.options: `{data.type}` does not take the arguments {given} ({error})") from error
    return cls(**arguments)
