"""Megatron-LM .bin and .idx files against a token cache of the same documents."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import build_caches, megatron, open_dataset, open_datasets, train_tokenizer
from jaxtrain.data.sources import split_of
from jaxtrain.errors import DataError

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
TEXTS = [f"document {i} é\n" * (1 + i % 7) for i in range(90)]


def tokens(text: str) -> list[int]:
    return [*text.encode(), 256]


def write_pair(
    stem: Path, documents: list[list[list[int]]], dtype: str = "<u2", modes: bool = False, gap: int = 0
) -> None:
    """Documents of sequences of tokens, as `IndexedDatasetBuilder` leaves them; `gap` bytes before each document."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    data, sizes, pointers, bounds = b"", [], [], [0]
    for document in documents:
        data += bytes(gap)
        for sequence in document:
            sizes.append(len(sequence))
            pointers.append(len(data))
            data += np.array(sequence, dtype).tobytes()
        bounds.append(len(sizes))
    stem.with_suffix(".bin").write_bytes(data)
    parts = [
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype]),
        struct.pack("<QQ", len(sizes), len(bounds)),
        np.array(sizes, "<i4").tobytes(),
        np.array(pointers, "<i8").tobytes(),
        np.array(bounds, "<i8").tobytes(),
        bytes(len(sizes)) if modes else b"",
    ]
    stem.with_suffix(".idx").write_bytes(b"".join(parts))


def config(tmp_path: Path, *sources: SourceConfig, **changes: object) -> DataConfig:
    values = {
        "sequence": 128,
        "global_batch": 4,
        "validation_fraction": 0.0,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
    }
    return DataConfig(sources=sources, **{**values, **changes})


def error(tmp_path: Path, path: Path, **changes: object) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(config(tmp_path, SourceConfig(path=str(path)), **changes), 0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def texts(tmp_path: Path) -> SourceConfig:
    (tmp_path / "texts").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{i:04d}.txt").write_text(text)
    return SourceConfig(path=str(tmp_path / "texts"))


@pytest.mark.parametrize("dtype", ["<u2", "<i2", "<i4", "<i8"])
def test_the_same_order_as_a_token_cache_of_the_documents(
    tmp_path: Path, texts: SourceConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron, "COUNT_CHUNK", 500)
    split = [[tokens(t)[:5], [], tokens(t)[5:]] for t in TEXTS]  # documents of several sequences
    write_pair(tmp_path / "in" / "a_text_document", [*split[:40], [[]], []], dtype, modes=dtype == "<i4")
    write_pair(tmp_path / "in" / "b_text_document", [[tokens(t)] for t in TEXTS[40:]], dtype, gap=8)
    seen: list[tuple[int, int]] = []
    data = config(tmp_path, SourceConfig(path=str(tmp_path / "in")))
    made = open_dataset(data, 3, progress=lambda done, total: seen.append((done, total)))
    expected = open_dataset(config(tmp_path, texts), 3)
    assert (made.documents, made.tokens) == (expected.documents, expected.tokens)
    assert made.unigram_entropy == pytest.approx(expected.unigram_entropy, rel=1e-12)
    for step in (0, 1, 5, 999):
        mine, theirs = made.batch(step), expected.batch(step)
        assert all(np.array_equal(mine[k], theirs[k]) for k in theirs)
    size = sum(p.stat().st_size for p in (tmp_path / "in").glob("*.bin"))
    assert seen[-1] == (size, size)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert not list((tmp_path / "cache" / "tokens").glob("in-*/*.bin"))  # nothing is copied
    monkeypatch.setattr(megatron, "_count", lambda *a: pytest.fail("counted twice"))
    assert open_dataset(data, 3).fingerprint == made.fingerprint
    assert made.splits[0].document(0).tolist() == tokens(TEXTS[0])


def test_documents_are_split_by_name(tmp_path: Path) -> None:
    write_pair(tmp_path / "in" / "x", [[tokens(t)] for t in TEXTS])
    train, held = open_datasets(config(tmp_path, SourceConfig(path=str(tmp_path / "in")), validation_fraction=0.3), 0)
    for split, name in ((train, "train"), (held, "validation")):
        wanted = [tokens(t) for i, t in enumerate(TEXTS) if split_of(f"x.bin:{i}", 0.3) == name]
        runs = split.splits[0]
        assert [runs.document(i).tolist() for i in range(runs.documents)] == wanted
        _, counts = np.unique(np.concatenate(wanted), return_counts=True)
        p = counts / counts.sum()
        assert runs.entropy == pytest.approx(float(-(p * np.log(p)).sum()), rel=1e-12)


def test_paths_of_pairs_and_mixture_with_text(tmp_path: Path, texts: SourceConfig) -> None:
    write_pair(tmp_path / "in" / "x", [[[7] * 50 + [256]]] * 30)
    write_pair(tmp_path / "in" / "y", [[[8] * 50 + [256]]] * 30)
    for path in ("x", "x.bin", "x.idx", "x*", "*x.bin"):
        dataset = open_dataset(config(tmp_path, SourceConfig(path=str(tmp_path / "in" / path))), 0)
        assert (dataset.documents, dataset.batch(0)["tokens"][0, 0]) == (30, 7)
    both = SourceConfig(path=str(tmp_path / "in"), include=("y.bin",), weight=3.0)
    mixed = open_dataset(config(tmp_path, both, texts), 0)
    firsts = np.concatenate([mixed.batch(step)["tokens"][:, 0] for step in range(10)])
    assert (firsts == 8).mean() == 0.75
    parts = [mixed.batch(2, [i])["tokens"][0] for i in range(4)]
    assert np.array_equal(np.stack(parts), mixed.batch(2)["tokens"])
    assert [r.tokens["train"] for r in build_caches(config(tmp_path, both, texts))] == [
        30 * 51,
        sum(map(len, map(tokens, TEXTS))),
    ]


def test_read_ahead_does_not_change_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pair(tmp_path / "in" / "x", [[tokens(t)] for t in TEXTS])
    data = config(tmp_path, SourceConfig(path=str(tmp_path / "in")), validation_fraction=0.3)
    plain, eager = open_dataset(data, 0), open_dataset(data, 0)
    eager._reads_ahead = True
    for step in range(5):
        assert np.array_equal(plain.batch(step)["tokens"], eager.batch(step)["tokens"])


def test_errors_of_bad_input_are_one_line(tmp_path: Path) -> None:
    stem = tmp_path / "in" / "x"
    write_pair(stem, [[tokens(t)] for t in TEXTS])
    index, data = stem.with_suffix(".idx").read_bytes(), stem.with_suffix(".bin").read_bytes()
    for cut in (0, 20, 34, len(index) // 2, len(index) - 8):
        stem.with_suffix(".idx").write_bytes(index[:cut])
        assert f"{stem}.idx: " in error(tmp_path, stem)
    stem.with_suffix(".idx").write_bytes(index[:9] + bytes([2]) + index[10:])
    assert "version 2 is not supported" in error(tmp_path, stem)
    stem.with_suffix(".idx").write_bytes(index[:17] + bytes([7]) + index[18:])
    assert "dtype code 7 is not supported" in error(tmp_path, stem)
    stem.with_suffix(".idx").write_bytes(index)
    stem.with_suffix(".bin").write_bytes(data[:-2])
    assert "x.idx: its sequences are outside of the .bin, which has" in error(tmp_path, stem)
    stem.with_suffix(".bin").write_bytes(data.replace(b"\x00\x01", b"\x01\x01", 1))
    message = error(tmp_path, stem)
    assert message.startswith(f"{stem}.bin: token id 257 is outside of the vocabulary of 257 of data.tokenizer (bytes)")
    write_pair(stem, [[[1, 2], [-3]]], "<i4")
    assert "token id -3 is outside of the vocabulary" in error(tmp_path, stem)
    write_pair(tmp_path / "in" / "y", [[tokens("a")]], "<u2")
    assert "token id -3" in error(tmp_path, stem.parent)
    write_pair(stem, [[[1, 2]]], "<i4")
    assert "files of several dtypes" in error(tmp_path, stem.parent)
    os.remove(stem.with_suffix(".idx"))
    with pytest.raises(DataError, match=r"no x\.idx beside it"):
        open_dataset(config(tmp_path, SourceConfig(path=f"{stem}.bin", format="megatron")), 0)
    source = SourceConfig(path=str(tmp_path / "in" / "y"))
    with pytest.raises(DataError, match="holds tokens already, and no text"):
        train_tokenizer([source], 300, tmp_path / "tokenizer")
