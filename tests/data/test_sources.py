"""Every source format, its document names, and its errors."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config.schema import SourceConfig
from jaxtrain.data.sources import documents, list_files, plan_shards, read_shard, split_of
from jaxtrain.data.token_cache import content_hash
from jaxtrain.data.token_cache.content_hash import hash_files
from jaxtrain.errors import DataError
from jaxtrain.io.packages import import_optional


def read(path: Path | str, **options: object) -> dict[str, str]:
    return {d.name: d.text for d in documents(SourceConfig(path=str(path), **options))}


def error(path: Path | str, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        read(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def lines(count: int, field: str = "text") -> list[str]:
    return [json.dumps({"id": i, field: f"line {i} é\u2028\n" * (i % 3)}) for i in range(count)]


def test_folder_of_text(tmp_path: Path) -> None:
    for name in (
        "b.md",
        "a.txt",
        "sub/c.py",
        "sub/deep/d.RST",
        "e.bin",
        ".hidden.txt",
        ".git/f.txt",
        "__pycache__/g.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "empty.txt").touch()
    assert list(read(tmp_path)) == ["a.txt", "b.md", "sub/c.py", "sub/deep/d.RST"]
    assert list(read(tmp_path, include=("*.py", "*.bin"))) == ["e.bin", "sub/c.py"]
    assert list(read(tmp_path, include=("sub/*",))) == ["sub/c.py", "sub/deep/d.RST"]
    assert read(tmp_path / "a.txt") == {"a.txt": "text of a.txt"}
    assert list(read(f"{tmp_path}/**/*.py", include=())) == ["__pycache__/g.py", "sub/c.py"]
    assert list(read(f"{tmp_path}/*/c.py")) == ["sub/c.py"]


def test_standard_library() -> None:
    files = list_files(SourceConfig())
    names = [f.name for f in files]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not any("site-packages" in n or "__pycache__" in n for n in names)
    shard = [s for s in plan_shards(files, 1 << 30)[0] if s.file.name == "json/decoder.py"]
    found = {d.name: d.text for d in read_shard(shard, "text")}
    assert found == {"json/decoder.py": Path(json.decoder.__file__).read_text()}


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data.jsonl{suffix}"
    body = ("\n".join([*lines(5), "", "  ", *lines(3)]) + "\n").encode()
    if suffix == ".zst":
        zstandard = pytest.importorskip("zstandard", reason="needs jaxtrain[data]")
        compress = zstandard.ZstdCompressor().compress
        path.write_bytes(compress(body[:100]) + compress(body[100:]))  # two frames, as parallel compressors write
    else:
        path.write_bytes(gzip.compress(body) if suffix else body)
    expected = {f"data.jsonl{suffix}:{i + 1}": f"line {i} é\u2028\n" * (i % 3) for i in range(5) if i % 3}
    expected |= {f"data.jsonl{suffix}:{i + 8}": f"line {i} é\u2028\n" * (i % 3) for i in range(3) if i % 3}
    assert read(path) == expected


@pytest.mark.parametrize("target", [1, 50, 333, 10_000])
@pytest.mark.parametrize("final", ["", "\n"])
def test_jsonl_spans_lose_no_line(tmp_path: Path, target: int, final: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines(40)) + final)
    whole = read(path)
    shards = plan_shards(list_files(SourceConfig(path=str(path))), target)
    assert len(shards) > 1 or target == 10_000
    cut = [(d.name, d.text) for shard in shards for d in read_shard(shard, "text")]
    assert cut == list(whole.items())
    assert sum(s.size for shard in shards for s in shard) == path.stat().st_size


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs jaxtrain[data]")
    pq = pytest.importorskip("pyarrow.parquet", reason="needs jaxtrain[data]")
    texts = [None if i % 7 == 3 else f"row {i}" for i in range(100)]
    table = pa.table({"id": range(100), "body": texts})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=30)
    source = SourceConfig(path=str(tmp_path), field="body")
    expected = [(f"x.parquet:{i}", t) for i, t in enumerate(texts) if t]
    for target in (1, 400, 1 << 20):
        shards = plan_shards(list_files(source), target)
        assert [(d.name, d.text) for shard in shards for d in read_shard(shard, "body")] == expected
    assert len(plan_shards(list_files(source), 1)) == 4
    assert "no column `text`; set data.sources[].field to one of: id, body" in error(tmp_path)
    assert "column `id` holds int64, not text" in error(tmp_path, field="id")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nothing")
    assert "x.parquet: not a readable Parquet file" in error(tmp_path)


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    assert "no such file or folder" in error(tmp_path / "nowhere")
    assert "no files found (looked for *.zz)" in error(tmp_path, include=("*.zz",))
    assert "no files found (looked for jsonl)" in error(tmp_path, format="jsonl")
    assert "no files found" in error(f"{tmp_path}/*.jsonl")
    (tmp_path / "bad.txt").write_bytes(b"one\ntwo\n\xff\xfe")
    assert f"{tmp_path}/bad.txt:3: not UTF-8 (byte 0xff)" in error(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join([*lines(3), '{"text": "broken']))
    assert "holds several kinds of files (1 text, 1 jsonl)" in error(tmp_path)
    assert f"{tmp_path}/data.jsonl:4: broken JSON" in error(tmp_path, format="jsonl")
    (tmp_path / "data.jsonl").write_text('{"text": "x"}\n{"body": "y", "n": 1}\n')
    assert "data.jsonl:2: field `text` is missing; set data.sources[].field to one of the text fields: body" in error(
        tmp_path / "data.jsonl"
    )
    (tmp_path / "data.jsonl").write_text('{"text": 5}\n')
    assert "data.jsonl:1: field `text` is not text" in error(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").write_text("[1]\n")
    assert "data.jsonl:1: list instead of an object" in error(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").write_text('{"text": ' + "[" * 100_000)
    assert "data.jsonl:1: broken JSON" in error(tmp_path / "data.jsonl")
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n')
    assert "data.jsonl:2: not UTF-8" in error(tmp_path / "data.jsonl")


def test_truncated_gzip(tmp_path: Path) -> None:
    packed = gzip.compress("\n".join(lines(2000)).encode())
    (tmp_path / "data.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    message = error(tmp_path)
    assert "data.jsonl.gz:" in message
    assert "is it complete?" in message


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude00"}\n')
    texts = list(read(tmp_path).values())
    assert all(t.encode() for t in texts)
    assert texts[1] == "😀"
    assert texts[0].startswith("a�")


def test_split_depends_on_the_name_and_has_its_share() -> None:
    names = [f"folder/{i}.txt" for i in range(20_000)]
    held = [n for n in names if split_of(n, 0.05) == "validation"]
    assert abs(len(held) / len(names) - 0.05) < 0.005
    assert set(held) <= {n for n in names if split_of(n, 0.2) == "validation"}  # a larger share only adds
    assert not [n for n in names[:100] if split_of(n, 0.0) == "validation"]
    assert all(split_of(n, 1.0) == "validation" for n in names[:100])
    assert [split_of(n, 0.5)[0] for n in ("a", "b", "json/decoder.py", "é", "x.jsonl:12")] == [
        "t", "v", "v", "t", "v",
    ]  # fmt: skip  # must never change


def test_content_hashes_follow_the_content(tmp_path: Path) -> None:
    folder, memory = tmp_path / "in", tmp_path / "memory.json"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(name * 10)
    files = list_files(SourceConfig(path=str(folder)))
    first = [h for h, _ in hash_files(files, memory)]
    assert len(set(first)) == 2
    memory.write_text("{broken")
    assert [h for h, _ in hash_files(files, memory)] == first
    (folder / "a.txt").write_text("c" * 10)
    assert [h for h, _ in hash_files(files, memory)] == [hash_files(files[:1], tmp_path / "m2")[0][0], first[1]]
    assert hash_files(files, memory)[0][0] != first[0]


def test_content_hashes_are_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, memory = tmp_path / "a.txt", tmp_path / "memory.json"
    path.write_text("a" * 10)
    files = list_files(SourceConfig(path=str(path)))
    first = hash_files(files, memory)
    assert json.loads(memory.read_text()) == {}  # too young: it could change again within a clock tick
    monkeypatch.setattr(content_hash, "MIN_AGE", -60.0)
    assert hash_files(files, memory) == first
    with monkeypatch.context() as patch:
        patch.setattr(content_hash, "hash_content", lambda path: pytest.fail("read again"))
        assert hash_files(files, memory) == first
    before = path.stat()
    path.write_text("b" * 10)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same mtime
    assert hash_files(files, memory)[0][0] != first[0][0]


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(
        DataError, match=r"^x\.zst needs the package no_such_package_x: pip install 'jaxtrain\[data\]'$"
    ):
        import_optional("no_such_package_x.part", "x.zst")


def test_no_jax_and_no_optional_package_is_imported() -> None:
    code = (
        "import sys, jaxtrain.data, jaxtrain.data.token_cache.worker\n"
        "print([m for m in ('jax', 'flax', 'tokenizers', 'pyarrow', 'zstandard') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
