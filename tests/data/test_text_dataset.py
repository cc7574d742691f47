"""Text batches against the documents they come from; purity in seed and step; validation; user classes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import DataError, TextDataset, open_dataset, open_datasets
from jaxtrain.data.sources import split_of
from jaxtrain.data.token_cache import build
from jaxtrain.errors import UserError

KEYS = {"tokens": np.int32, "targets": np.int32, "positions": np.int32, "segments": np.int32, "weights": np.float32}


def write_texts(folder: Path, count: int, seed: int, longest: int = 400) -> dict[str, str]:
    """Documents whose every position is recognisable: name -> text."""
    rng = np.random.default_rng(seed)
    folder.mkdir()
    texts = {}
    for i in range(count):
        size = int(rng.integers(1, longest))
        texts[f"{i:04d}.txt"] = "".join(chr(c) for c in rng.integers(32, 127, size))
        (folder / f"{i:04d}.txt").write_text(texts[f"{i:04d}.txt"])
    return texts


def config(tmp_path: Path, *folders: Path, **changes: object) -> DataConfig:
    sources = changes.pop("sources", None) or tuple(SourceConfig(path=str(f)) for f in folders)
    values = {
        "sequence": 128,
        "global_batch": 4,
        "validation_fraction": 0.2,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
    }
    return DataConfig(sources=sources, **{**values, **changes})


def pieces_of(batch: dict[str, np.ndarray]) -> list[tuple[list[int], list[int], list[float]]]:
    """(tokens, targets, weights) of each segment of a batch, checking the row structure."""
    out = []
    for tokens, targets, positions, segments, weights in zip(*(batch[k] for k in KEYS)):
        used = segments[segments > 0]
        assert (segments[len(used) :] == 0).all()  # padding only at the end of a row
        assert np.isin(np.diff(used), (0, 1)).all()
        assert used.size == 0 or used[0] == 1
        for k in range(1, int(segments.max(initial=0)) + 1):
            at = np.flatnonzero(segments == k)
            assert np.array_equal(positions[at], np.arange(len(at)))
            out.append((tokens[at].tolist(), targets[at].tolist(), weights[at].tolist()))
        for array in (tokens, targets, positions, weights):
            assert (array[segments == 0] == 0).all()
    return out


def check_covers(pieces: list, texts: list[str]) -> None:
    """The pieces spell exactly the documents; each token but a document's first is a target once, the true next one."""
    waiting = sorted(pieces, key=lambda piece: -len(piece[0]))
    for document in sorted(([*text.encode(), 256] for text in texts), key=len, reverse=True):
        place = 0
        while place < len(document):
            after = [*document[place + 1 :], 0]
            wanted = [1.0] * (len(after) - 1) + [0.0]
            for piece in waiting:
                tokens, targets, weights = piece
                n = len(tokens)
                if tokens == document[place : place + n] and targets == after[:n]:
                    break
            else:
                raise AssertionError(f"no piece continues a document of {len(document)} tokens at {place}")
            assert weights == wanted[:n]
            waiting.remove(piece)
            place += n
    assert not waiting


def epoch_batches(dataset: TextDataset, start: int, rows: int) -> dict[str, np.ndarray]:
    """`rows` global rows from row `start`, as one batch."""
    size = dataset.global_batch
    steps = range(start // size, -(-(start + rows) // size))
    joined = {k: np.concatenate([dataset.batch(s)[k] for s in steps]) for k in KEYS}
    first = start - steps[0] * size
    return {k: v[first : first + rows] for k, v in joined.items()}


@pytest.mark.parametrize(("sequence", "longest"), [(128, 400), (64, 30), (1000, 300)])
def test_batches_are_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sequence: int, longest: int
) -> None:
    monkeypatch.setattr("jaxtrain.data.dataset.FILL_TOKENS", 3 * 128)  # so that a batch is filled in several parts
    texts = write_texts(tmp_path / "a", 150, 0, longest)
    dataset = open_dataset(config(tmp_path, tmp_path / "a", sequence=sequence), seed=3)
    train = [t for n, t in texts.items() if split_of(n, 0.2) == "train"]
    assert dataset.documents == len(train)
    assert dataset.tokens == sum(len(t) + 1 for t in train)
    batch = dataset.batch(0)
    assert {k: v.dtype for k, v in batch.items()} == KEYS
    assert all(v.shape == (4, sequence) for v in batch.values())
    rows = dataset._packers[0].rows
    for epoch in (0, 2):
        check_covers(pieces_of(epoch_batches(dataset, epoch * rows, rows)), train)


def test_the_check_notices_a_flipped_token(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "a", 30, 0)
    dataset = open_dataset(config(tmp_path, tmp_path / "a"), seed=0)
    batch = epoch_batches(dataset, 0, dataset._packers[0].rows)
    batch["targets"][0, 5] ^= 1
    train = [t for n, t in texts.items() if split_of(n, 0.2) == "train"]
    with pytest.raises(AssertionError):
        check_covers(pieces_of(batch), train)


def test_pure_in_seed_and_step_and_rows(tmp_path: Path) -> None:
    write_texts(tmp_path / "a", 60, 0)
    write_texts(tmp_path / "b", 40, 1)
    sources = (
        SourceConfig(path=str(tmp_path / "a"), weight=2.0),
        SourceConfig(path=str(tmp_path / "b"), weight={5: 3.0, 9: 0.0}),
    )
    data = config(tmp_path, sources=sources, global_batch=6)
    dataset, fresh = open_dataset(data, 1), open_dataset(data, 1)
    other = open_dataset(data, 2)
    for step in (0, 4, 5, 8, 9, 700):
        whole = dataset.batch(step)
        parts = [fresh.batch(step, slice(0, 2)), fresh.batch(step, np.array([2])), fresh.batch(step, slice(3, None))]
        backwards = fresh.batch(step, [5, 4, 3, 2, 1, 0])
        for k in KEYS:
            assert np.array_equal(whole[k], np.concatenate([p[k] for p in parts]))
            assert np.array_equal(whole[k][::-1], backwards[k])
        assert not np.array_equal(whole["tokens"], other.batch(step)["tokens"])
    assert dataset.batch(0, slice(0, 0))["tokens"].shape == (0, 128)
    with pytest.raises(IndexError):
        dataset.batch(0, [6])
    with pytest.raises(IndexError):
        dataset.batch(-1)


def test_mixture_weights_decide_the_source_of_rows(tmp_path: Path) -> None:
    for name, letter in (("a", "a"), ("b", "b")):
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.txt").write_text(letter * 50)
    sources = (
        SourceConfig(path=str(tmp_path / "a"), weight=3.0),
        SourceConfig(path=str(tmp_path / "b"), weight={10: 0.0}),
    )
    dataset = open_dataset(config(tmp_path, sources=sources), 0)

    def share(steps: range) -> float:
        tokens = np.concatenate([dataset.batch(s)["tokens"][:, 0] for s in steps])
        assert np.isin(tokens, (ord("a"), ord("b"))).all()
        return float((tokens == ord("a")).mean())

    assert share(range(0, 10)) == 0.75
    assert share(range(10, 20)) == 1.0


def test_validation_is_fixed_disjoint_and_complete(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "a", 120, 0)
    more = write_texts(tmp_path / "b", 30, 1)
    data = config(tmp_path, tmp_path / "a", tmp_path / "b")
    one, two = open_dataset(data, 1, "validation"), open_dataset(data, 2, "validation")
    held = [t for group in (texts, more) for n, t in group.items() if split_of(n, 0.2) == "validation"]
    assert 0 < len(held) < 60
    assert one.batches == -(-sum(p.rows for p in one._packers) // 4)
    batches = [one.batch(i) for i in range(one.batches)]
    for i, batch in enumerate(batches):
        assert batch["tokens"].shape == (4, 128)
        assert np.array_equal(batch["tokens"], two.batch(i)["tokens"])
        assert np.array_equal(batch["tokens"], one.batch(i + one.batches)["tokens"])
    check_covers(pieces_of({k: np.concatenate([b[k] for b in batches]) for k in KEYS}), held)


def test_late_steps_cost_as_much_as_early_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks packed and epochs counted for the first batch, at step 0 and 1,000,000: O(1)."""
    write_texts(tmp_path / "a", 300, 0)
    data = config(tmp_path, tmp_path / "a")
    for step in (0, 1_000_000):
        dataset = open_dataset(data, 0)
        dataset.batch(step)
        packer = dataset._packers[0]
        assert packer._pack.cache_info().misses <= 2
        assert packer._index.cache_info().misses <= 2


def test_read_ahead_does_not_change_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "a", 200, 0)
    data = config(tmp_path, tmp_path / "a")
    plain, eager = open_dataset(data, 0), open_dataset(data, 0)
    monkeypatch.setattr("jaxtrain.data.dataset.READ_AHEAD_TOKENS", 2000)
    eager._reads_ahead = True
    requested: list[int] = []
    read_ahead = eager.splits[0].read_ahead
    monkeypatch.setattr(eager.splits[0], "read_ahead", lambda *a: requested.append(int(a[2].sum())) or read_ahead(*a))
    for step in (0, 1, 2, 3, 4, 5, 50, 51, 52, 3):
        for k in KEYS:
            assert np.array_equal(plain.batch(step)[k], eager.batch(step)[k])
    assert requested
    assert sum(requested) < 50 * 4 * 128


def test_cache_is_rebuilt_only_for_changed_content(tmp_path: Path) -> None:
    write_texts(tmp_path / "a", 20, 0)
    data = config(tmp_path, tmp_path / "a", validation_fraction=0.0)
    first = open_dataset(data, 0)
    before = os.stat(tmp_path / "a" / "0003.txt")
    assert open_dataset(data, 0).fingerprint == first.fingerprint
    text = (tmp_path / "a" / "0003.txt").read_text()
    (tmp_path / "a" / "0003.txt").write_text(text[::-1] if text != text[::-1] else "x" * len(text))
    os.utime(tmp_path / "a" / "0003.txt", ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same mtime
    assert open_dataset(data, 0).fingerprint != first.fingerprint


def test_positions_stay_below_the_row_in_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "long.txt").write_text("x" * 5000)
    dataset = open_dataset(config(tmp_path, tmp_path / "a", validation_fraction=0.0), 0)
    batch = epoch_batches(dataset, 0, dataset._packers[0].rows)
    assert batch["positions"].max() == 127
    for positions, segments in zip(batch["positions"], batch["segments"]):
        assert (positions[np.flatnonzero(np.diff(segments, prepend=0))] == 0).all()


def entropy(shares: list[float]) -> float:
    return float(-sum(p * np.log(p) for p in shares))


def test_entropy_of_a_mixture_is_that_of_the_mixed_tokens(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        for i in range(40):
            (tmp_path / name / f"{i}.txt").write_text(name * 99)  # and the eos: one in a hundred
    two = [SourceConfig(path=str(tmp_path / n)) for n in "ab"]
    dataset = open_dataset(config(tmp_path, sources=tuple(two)), 0)
    assert dataset.unigram_entropy == pytest.approx(entropy([0.495, 0.495, 0.01]), rel=1e-12)
    weighted = [
        SourceConfig(path=str(tmp_path / "a"), weight={0: 3.0, 7: 9.0}),
        SourceConfig(path=str(tmp_path / "b"), weight={0: 1.0}),
        SourceConfig(path=str(tmp_path / "c"), weight={0: 0.0, 7: 1.0}),
    ]
    dataset = open_dataset(config(tmp_path, sources=tuple(weighted)), 0)
    assert dataset.unigram_entropy == pytest.approx(entropy([0.99 * 0.75, 0.99 * 0.25, 0.01]), rel=1e-12)
    held = open_dataset(config(tmp_path, sources=tuple(weighted)), 0, "validation")
    tokens = np.concatenate([s.document(i) for s in held.splits for i in range(s.documents)])
    _, counts = np.unique(tokens, return_counts=True)
    assert held.unigram_entropy == pytest.approx(entropy((counts / counts.sum()).tolist()), rel=1e-12)


def test_a_sequence_is_no_longer_than_the_data(tmp_path: Path) -> None:
    """A hundred million tokens a sequence would otherwise take minutes and all memory."""
    write_texts(tmp_path / "a", 3, 0)
    tokens = open_dataset(config(tmp_path, tmp_path / "a", validation_fraction=0), 0, "train").tokens
    open_dataset(config(tmp_path, tmp_path / "a", validation_fraction=0, sequence=tokens), 0, "train")
    with pytest.raises(DataError, match=f"data.sequence: 100,000,000 is more than the {tokens:,} tokens of the train"):
        open_dataset(config(tmp_path, tmp_path / "a", validation_fraction=0, sequence=100_000_000), 0, "train")


@pytest.mark.parametrize(
    ("split", "validation", "advice"),
    [
        ("validation", 1e-9, "set data.validation_fraction=0, or give more documents"),
        ("validation", 0.0, "set data.validation_fraction above 0"),
        ("train", 0.999999, "set a smaller data.validation_fraction, or give more documents"),
    ],
)
def test_error_of_an_empty_split(tmp_path: Path, split: str, validation: float, advice: str) -> None:
    write_texts(tmp_path / "a", 1, 0)
    with pytest.raises(DataError) as caught:
        open_dataset(config(tmp_path, tmp_path / "a", validation_fraction=validation), 0, split)
    problem = f"none of its 1 documents is in the {split} split (data.validation_fraction is {validation:g})"
    assert str(caught.value) == f"{tmp_path / 'a'}: {problem}; {advice}"


def test_error_of_a_file_without_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match=r"a\.jsonl: has no documents; expected at least one$"):
        open_dataset(config(tmp_path, tmp_path / "a.jsonl"), 0)


def test_open_datasets_reads_the_input_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_texts(tmp_path / "a", 60, 0)
    write_texts(tmp_path / "b", 60, 1)
    data = config(tmp_path, tmp_path / "a", tmp_path / "b")
    separate = open_dataset(data, 5), open_dataset(data, 5, "validation")
    calls: list[str] = []
    for name in ("list_files", "hash_files", "open_cache"):
        real = getattr(build, name)
        monkeypatch.setattr(build, name, lambda *a, n=name, f=real: calls.append(n) or f(*a))
    datasets = open_datasets(data, 5)
    assert sorted(calls) == sorted(["list_files", "hash_files", "open_cache"] * 2)
    for actual, expected in zip(datasets, separate):
        assert actual.batches == expected.batches
        for k in KEYS:
            assert np.array_equal(actual.batch(3)[k], expected.batch(3)[k])
    train, validation = open_datasets(config(tmp_path, tmp_path / "a", validation_fraction=0.0), 5)
    assert train.documents == 60
    assert validation is None


USER = """
import numpy as np
class Squares:
    def __init__(self, split, seed, global_batch, power=2):
        self.split, self.seed, self.size, self.power = split, seed, global_batch, power
    def batch(self, step, rows=None):
        x = (np.arange(self.size) + step * self.size)[rows if rows is not None else slice(None)]
        return {"x": x, "y": x ** self.power}
class Empty: pass
"""


def test_user_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_squares.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    dataset = open_dataset(DataConfig(type="user_squares:Squares", options={"power": 3}, global_batch=2), 7, "train")
    assert dataset.seed == 7
    assert dataset.batch(1)["y"].tolist() == [8, 27]
    both = open_datasets(DataConfig(type="user_squares:Squares", validation_fraction=0.0), 7)
    assert [d.split for d in both] == ["train", "validation"]
    sys.modules.pop("user_squares")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("squares", "neither `text` nor"),
        ("no_such_module_x:A", "no module `no_such_module_x`; put its folder on PYTHONPATH"),
        ("user_squares:Cubes", "has no `Cubes`"),
        ("user_squares:Empty", "no method `batch"),
        ("user_squares:Squares", "does not take the arguments split, seed, global_batch, base"),
    ],
)
def test_user_class_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str) -> None:
    (tmp_path / "user_squares.py").write_text(USER)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        open_dataset(DataConfig(type=kind, options={"base": 2}), 0)
    assert "\n" not in str(caught.value)
    sys.modules.pop("user_squares", None)


def test_exceptions_of_user_modules_are_not_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_faulty.py").write_text("import no_such_dependency_x")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency_x"):
        open_dataset(DataConfig(type="user_faulty:A"), 0)
