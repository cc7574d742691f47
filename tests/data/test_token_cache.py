"""Token cache: equal bytes for any number of workers and kills, named damage, counts and entropy."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import DataError, build_cache, build_caches, open_cache, open_dataset
from jaxtrain.data.sources import documents, split_of
from jaxtrain.data.tokenizer import ByteTokenizer, train_bpe


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 MB of pseudo-words in 300 files and one JSONL."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(1, 9))) for _ in range(500)]
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(" ".join(rng.choices(words, k=rng.randint(1, 7000))))
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("tokenizers", reason="needs jaxtrain[data]")
    texts = (p.read_text()[:5000] for p in sorted(corpus.iterdir())[:20])
    return str(train_bpe(texts, 600, tmp_path_factory.mktemp("tok")))


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != ".lock"}


def make(corpus: Path, root: Path, workers: int = 1, tokenizer: str = "bytes", **options: object):
    return build_cache(SourceConfig(path=str(corpus)), tokenizer, 0.1, root, workers, **options)


def test_cache_holds_the_documents(corpus: Path, tmp_path: Path) -> None:
    cache = make(corpus, tmp_path, shard_bytes=1 << 20)
    assert len(list(cache.folder.glob("*.count"))) >= 5
    encoder = ByteTokenizer()
    for name, split in (("train", cache.train), ("validation", cache.validation)):
        texts = [d.text for d in documents(SourceConfig(path=str(corpus))) if split_of(d.name, 0.1) == name]
        assert split.documents == len(texts) > 10
        assert split.tokens == sum(len(t) + 1 for t in texts)
        assert split.text_bytes == sum(len(t.encode()) for t in texts)
        for i in (0, 1, len(texts) // 2, len(texts) - 1):
            tokens = split.document(i)
            assert not tokens.flags.owndata  # read in place
            assert tokens[-1] == encoder.eos
            assert encoder.decode(tokens) == texts[i]
        assert split.lengths.tolist() == [len(t) + 1 for t in texts]


def test_a_cache_without_text_bytes_is_completed_in_place(corpus: Path, tmp_path: Path) -> None:
    cache = make(corpus, tmp_path)
    before = contents(cache.folder)
    for path in cache.folder.glob("*.json"):
        meta = json.loads(path.read_text())
        for part in [meta, meta.get("splits", {})]:
            for split in ("train", "validation"):
                part.get(split, {}).pop("text_bytes", None)
                for shard in part.get(split, {}).get("shards", []):
                    shard.pop("text_bytes")
        path.write_text(json.dumps(meta))
    assert make(corpus, tmp_path).key == cache.key  # a run that began with it can be resumed
    assert contents(cache.folder) == before


def test_entropy_against_a_count(corpus: Path, tmp_path: Path) -> None:
    cache = make(corpus, tmp_path)
    every = np.concatenate([cache.train.document(i) for i in range(cache.train.documents)])
    _, counts = np.unique(every, return_counts=True)
    p = counts / counts.sum()
    assert cache.train.entropy == pytest.approx(float(-(p * np.log(p)).sum()), rel=1e-12)


def test_progress(corpus: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    make(corpus, tmp_path, progress=lambda done, total: seen.append((done, total)), shard_bytes=1 << 20)
    size = sum(p.stat().st_size for p in corpus.iterdir())
    assert seen[0] == (0, size)
    assert seen[-1] == (size, size)
    assert [d for d, _ in seen] == sorted(d for d, _ in seen)


BUILD = """
import sys
from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.token_cache.build import build_cache
build_cache(SourceConfig(path=sys.argv[1]), sys.argv[2], 0.1, sys.argv[3], int(sys.argv[4]), shard_bytes=1 << 17)
print("complete")
"""


def kill_after(arguments: list[str], root: Path, markers: int) -> bool:
    """Kills a build when `markers` shards are finished. Returns whether it was still running."""
    process = subprocess.Popen([sys.executable, "-c", BUILD, *arguments], stdout=subprocess.PIPE, text=True)
    while process.poll() is None and len(list(root.glob("tokens/*/[0-9]*.json"))) < markers:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    out, _ = process.communicate(timeout=60)
    return "complete" not in out


def test_killed_and_resumed_with_other_workers_gives_equal_bytes(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    reference = make(corpus, tmp_path / "reference", 1, tokenizer, shard_bytes=1 << 17)
    root = tmp_path / "killed"
    killed = [
        kill_after([str(corpus), tokenizer, str(root), str(workers)], root, markers)
        for workers, markers in ((2, 3), (1, 9), (3, 15))
    ]
    assert all(killed)
    assert not list(root.glob("tokens/*/cache.json"))
    with pytest.raises(DataError, match=r"cache\.json"):
        open_cache(next(root.glob("tokens/*")))
    todo: list[int] = []
    resumed = make(
        corpus, root, 2, tokenizer, shard_bytes=1 << 17, progress=lambda done, total: todo.append(total - done)
    )
    assert 0 < todo[0] < sum(p.stat().st_size for p in corpus.iterdir())  # some shards were finished
    assert resumed.folder.name == reference.folder.name
    assert contents(resumed.folder) == contents(reference.folder)


def test_damage_is_named_and_repaired(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig(
        sources=(SourceConfig(path=str(corpus)),), cache_dir=str(tmp_path), workers=1, validation_fraction=0.1
    )
    folder = open_dataset(data, 0).splits[0].folder
    whole = contents(folder)

    def check(name: str, damage: bytes | None) -> None:
        path = folder / name
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(DataError) as caught:
            open_dataset(data, 0)
        assert f"{path}: damaged token cache" in str(caught.value)
        assert "`jaxtrain data build` repairs it" in str(caught.value)
        build_caches(data)
        assert contents(folder) == whole
        open_dataset(data, 0)

    tokens, lengths = whole["train-00000.bin"], whole["validation-00000.len"]
    check("train-00000.bin", tokens[:-2])
    check("train-00000.bin", None)
    check("train-00000.bin", tokens[:1000] + bytes([tokens[1000] ^ 1]) + tokens[1001:])
    check("validation-00000.len", lengths[:-4])
    check("validation-00000.len", bytes([lengths[0] ^ 1]) + lengths[1:])
    check("total.count", whole["total.count"][:-8])
    check("total.count", None)
    check("cache.json", whole["cache.json"][:-40])


def test_large_caches_are_verified_on_demand(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(corpus, tmp_path)
    path = cache.folder / "train-00000.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr("jaxtrain.data.token_cache.store.MAX_VERIFIED_BYTES", 0)
    large = open_cache(cache.folder)
    with pytest.raises(DataError, match=r"train-00000\.bin: damaged"):
        large.verify()
    path.write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"train-00000\.bin: damaged token cache: has \d+ bytes instead of \d+"):
        open_cache(cache.folder)


def test_errors_in_workers_reach_the_caller(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    rows = [json.dumps({"text": "x" * 100}) for _ in range(2000)]
    rows[1500] = '{"text": 3}'
    (folder / "data.jsonl").write_text("\n".join(rows))
    for workers in (1, 2):
        with pytest.raises(DataError, match=r"data\.jsonl:1501: field `text` is not text"):
            build_cache(SourceConfig(path=str(folder)), "bytes", 0.1, tmp_path / "root", workers, shard_bytes=20_000)


def test_a_file_changed_during_the_build_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.txt").write_text("x" * 1000)

    def change_file(done: int, total: int) -> None:
        (folder / "4.txt").write_text("y" * 1000)

    with pytest.raises(DataError, match=r"4\.txt: changed while it was read; run again"):
        make(folder, tmp_path, progress=change_file, shard_bytes=1000)
    assert not list(tmp_path.glob("tokens/*/cache.json"))


def test_a_dead_worker_is_reported(
    corpus: Path, tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def short_lived(command, **options):
        return real([sys.executable, "-c", "import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"], **options)

    monkeypatch.setattr(subprocess, "Popen", short_lived)
    with pytest.raises(DataError, match=r"the tokenizing process died \(exit code -9\)"):
        make(corpus, tmp_path, 2, tokenizer)


def test_unwritable_cache(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"is data\.cache_dir writable"):
        make(corpus, tmp_path / "file")


def test_key_depends_on_all_inputs(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    source = SourceConfig(path=str(corpus))
    folders = {
        build_cache(source, "bytes", 0.1, tmp_path, 1).folder,
        build_cache(source, "bytes", 0.2, tmp_path, 1).folder,
        build_cache(SourceConfig(path=str(corpus), include=("00*.txt",)), "bytes", 0.1, tmp_path, 1).folder,
        build_cache(SourceConfig(path=str(corpus), include=("00*.txt",)), tokenizer, 0.1, tmp_path, 1).folder,
    }
    assert len(folders) == 4
    moved = tmp_path / "moved"
    moved.mkdir()
    for p in corpus.iterdir():
        os.link(p, moved / p.name)
    elsewhere = build_cache(
        SourceConfig(path=str(moved)), "bytes", 0.1, tmp_path, 1
    )  # the same content at another path
    assert elsewhere.key == build_cache(source, "bytes", 0.1, tmp_path, 1).key


def test_build_reports(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig(
        sources=(SourceConfig(path=str(corpus)), SourceConfig(path=str(corpus), include=("0*",))),
        cache_dir=str(tmp_path),
    )
    first, second = build_caches(data)
    assert first.path.is_dir()
    assert sum(first.documents.values()) == 300
    assert sum(second.documents.values()) == 100
    assert first.bytes == 2 * sum(first.tokens.values())
    with pytest.raises(DataError, match="without documents to tokenize"):
        build_caches(DataConfig(type="a.b:C"))
