"""Sources in object stores (in memory and simulated S3): same files, names and order as on a disk."""

from __future__ import annotations

import uuid
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.schema import DataConfig, SourceConfig
from jaxtrain.data import open_dataset
from jaxtrain.data.sources import list_files, remote
from jaxtrain.errors import DataError

fsspec = pytest.importorskip("fsspec", reason="needs fsspec (jaxtrain[remote])")
TEXTS = {f"{'sub/' * (i % 2)}{i:02d}.txt": f"text {i} " * (i + 1) for i in range(20)}


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Writes the same texts to a store and to the folder `local`."""
    where = request.getfixturevalue("s3") if request.param == "s3" else f"memory://{uuid.uuid4().hex}"
    for name, text in {**TEXTS, ".hidden/x.txt": "no"}.items():
        put(f"{where}/{name}", text)
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_text(text)
    return where


def put(url: str, text: str) -> None:
    """Writes a file of a store."""
    store, path = fsspec.core.url_to_fs(url)
    store.pipe_file(path, text.encode())


def names(path: str, cache: Path, **options: object) -> list[str]:
    return [f.name for f in list_files(SourceConfig(path=path, **options), cache)]


def test_same_order_as_on_a_local_disk(tmp_path: Path, url: str) -> None:
    values = {
        "sequence": 128,
        "global_batch": 4,
        "validation_fraction": 0.2,
        "cache_dir": str(tmp_path / "cache"),
        "workers": 1,
    }
    seen: list[tuple[int, int]] = []
    sources = (SourceConfig(path=url), SourceConfig(path=str(tmp_path / "local")))
    made, local = (
        open_dataset(DataConfig(sources=(s,), **values), 3, progress=lambda *a: seen.append(a)) for s in sources
    )
    assert made.fingerprint == local.fingerprint
    assert np.array_equal(made.batch(7)["tokens"], local.batch(7)["tokens"])
    size = sum(len(t) for t in TEXTS.values())
    assert (size, size) in seen
    assert names(url, tmp_path / "cache") == sorted(TEXTS)
    assert names(f"{url}/sub/*.txt", tmp_path / "cache") == [n[4:] for n in sorted(TEXTS) if "/" in n]
    assert names(f"{url}/00.txt", tmp_path / "cache") == ["00.txt"]
    for name in ("x.bin", "x.idx"):
        put(f"{url}/pair/{name}", "")
    assert names(f"{url}/pair/x.bin", tmp_path / "cache") == ["x.bin", "x.idx"]
    assert names(url, tmp_path / "cache", include=("sub/*",)) == [n for n in sorted(TEXTS) if "/" in n]


def test_files_are_copied_once_and_again_after_a_change(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    copy = remote.ObjectStore._copy

    def failing(self: remote.ObjectStore, name: str, path: Path, report: object) -> None:
        if len(copied) == 5:
            raise KeyboardInterrupt
        copied.append(name)
        copy(self, name, path, report)

    monkeypatch.setattr(remote.ObjectStore, "_copy", failing)
    with pytest.raises(KeyboardInterrupt):
        names(url, tmp_path)
    monkeypatch.setattr(remote.ObjectStore, "_copy", lambda self, *a: copied.append(a[0]) or copy(self, *a))
    files = list_files(SourceConfig(path=url), tmp_path)
    assert copied == sorted(TEXTS)  # each once, over both
    assert {f.name: Path(f.path).read_text() for f in files} == TEXTS
    assert not list(tmp_path.rglob("*.tmp"))
    put(f"{url}/00.txt", "texts")
    assert Path(list_files(SourceConfig(path=url), tmp_path)[0].path).read_text() == "texts"
    assert copied == [*sorted(TEXTS), "00.txt"]


def test_errors_are_one_line(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (
        ("nosuch://bucket/x", "nosuch://bucket/x: cannot be listed (ValueError: Protocol not known: nosuch)"),
        (f"{url}/nowhere", "no files there; check data.sources[].path"),
        (f"{url}/*.jsonl", "no files there; check data.sources[].path"),
    ):
        with pytest.raises(DataError) as caught:
            names(path, tmp_path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="no files found"):
        names(url, tmp_path, format="jsonl")
    (tmp_path / "remote").write_text("a file where the folder should be")
    with pytest.raises(DataError) as caught:
        open_dataset(DataConfig(sources=(SourceConfig(path=url),), cache_dir=str(tmp_path)), 0)
    assert "is data.cache_dir writable" in str(caught.value)
