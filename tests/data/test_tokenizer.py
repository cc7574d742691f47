"""Tokenizers: round trips, special tokens in texts, end-of-document tokens, training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import prepare
from jaxtrain.data.prepare import train_tokenizer
from jaxtrain.data.tokenizer import EOS, ByteTokenizer, load_tokenizer, smallest_dtype, train_bpe
from jaxtrain.errors import DataError

TEXTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + 1\n" * 20, "naïve café 日本語 😀 " * 5]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    return train_bpe(iter(TEXTS), 400, tmp_path_factory.mktemp("bpe"))


@settings(max_examples=100)
@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == list(text.encode())
    assert ids.dtype == np.uint16
    assert tokenizer.decode([*ids, tokenizer.eos]) == text


def test_bytes_decode_of_broken_utf8() -> None:
    assert ByteTokenizer().decode([0xC3, 65]) == "�A"


def test_bpe_round_trip(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    texts = [*TEXTS, "", " ", "ßтест\x00\r\n\t", "unseen ĸ ✓"]
    encoded = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    assert all(ids.dtype == np.uint16 and (ids < tokenizer.vocab).all() for ids in encoded)
    assert len(encoded[0]) < len(TEXTS[0]) / 2
    assert encoded[3].size == 0


def test_special_tokens_in_a_text_stay_text(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    (ids,) = tokenizer.encode_batch([f"before {EOS} after"])
    assert tokenizer.eos not in ids
    assert tokenizer.decode(ids) == f"before {EOS} after"


def test_vocab_and_eos(bpe: Path) -> None:
    tokenizer = load_tokenizer(str(bpe))
    described = json.loads(bpe.read_text())
    assert tokenizer.vocab == len(described["model"]["vocab"]) <= 400
    assert tokenizer.eos == described["model"]["vocab"][EOS]


def test_eos_comes_from_the_config_or_is_an_error(bpe: Path, tmp_path: Path) -> None:
    described = json.loads(bpe.read_text())
    path = tmp_path / "tokenizer.json"

    def write(name: str) -> None:
        text = json.dumps(described).replace(json.dumps(EOS), json.dumps(name))
        path.write_text(text)

    write("<stop>")
    with pytest.raises(DataError, match="no end-of-document token") as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    assert load_tokenizer(str(path)).eos == described["model"]["vocab"][EOS]
    (tmp_path / "tokenizer_config.json").unlink()
    write("</s>")
    assert load_tokenizer(str(path)).eos == described["model"]["vocab"][EOS]


def test_an_eos_that_texts_can_encode_to_is_refused(bpe: Path, tmp_path: Path) -> None:
    described = json.loads(bpe.read_text())
    for token in described["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="encodes to the end-of-document token"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def test_fingerprint_follows_the_file(bpe: Path, tmp_path: Path) -> None:
    same = tmp_path / "other.json"
    same.write_bytes(bpe.read_bytes())
    assert load_tokenizer(str(same)).fingerprint == load_tokenizer(str(bpe)).fingerprint
    same.write_text(bpe.read_text().replace('"version"', ' "version"'))
    assert load_tokenizer(str(same)).fingerprint != load_tokenizer(str(bpe)).fingerprint


@pytest.mark.parametrize("content", [None, "{", "{}", '{"model": 3}'])
def test_unreadable_files(tmp_path: Path, content: str | None) -> None:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_smallest_dtype() -> None:
    assert [smallest_dtype(v) for v in (256, 257, 65_536, 65_537)] == [np.uint8, np.uint16, np.uint16, np.uint32]


def test_train_tokenizer_leaves_validation_out(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    (tmp_path / "in").mkdir()
    for i in range(30):
        (tmp_path / "in" / f"{i}.txt").write_text(TEXTS[i % 3])
    seen: list[tuple[int, int]] = []
    source = SourceConfig(path=str(tmp_path / "in"))
    result = train_tokenizer([source], 300, tmp_path / "out", lambda d, n: seen.append((d, n)), validation=0.3)
    assert result.path == tmp_path / "out" / "tokenizer.json"
    assert 10 < result.documents < 30
    assert seen[-1][0] == seen[-1][1] > 0
    again = train_tokenizer([source], 300, tmp_path / "again.json", validation=0.3)
    assert again.path.read_bytes() == result.path.read_bytes()
    with pytest.raises(DataError, match="257 at least"):
        train_tokenizer([source], 256, tmp_path / "out")


def test_train_tokenizer_alternates_between_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    for name, count in (("a", 2), ("b", 4), ("c", 1)):
        (tmp_path / name).mkdir()
        for i in range(count):
            (tmp_path / name / f"{i}.txt").write_text((name + "pqrs"[i]) * 50)
    read: list[str] = []
    real = prepare.train_bpe
    monkeypatch.setattr(prepare, "train_bpe", lambda texts, *a: real((read.append(t[:2]) or t for t in texts), *a))
    sources = [SourceConfig(path=str(tmp_path / n)) for n in "abc"]
    seen: list[tuple[int, int]] = []
    result = train_tokenizer(sources, 270, tmp_path / "out", lambda d, n: seen.append((d, n)), validation=0.0)
    assert read == ["ap", "bp", "cp", "aq", "bq", "br", "bs"]
    assert (result.documents, result.bytes) == (7, 700)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)
    assert {n for _, n in seen} == {700}
    assert seen[-1][0] == 700
    learned = load_tokenizer(str(result.path))
    assert all(len(learned.encode_batch([word * 50])[0]) <= 50 for word in read)


def test_train_tokenizer_without_documents_writes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt: no documents to train a tokenizer on$"):
        train_tokenizer([SourceConfig(path=str(tmp_path / "empty.txt"))], 300, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_user_classes_have_no_tokenizer() -> None:
    with pytest.raises(DataError, match=r"^data\.type: `a\.b:C` is a user.s class.*only `text`") as caught:
        prepare.text_sources(DataConfig(type="a.b:C"))
    assert "\n" not in str(caught.value)
    data = DataConfig()
    assert prepare.text_sources(data) == data.sources
